"""OpenTelemetry's current span in the steps of a stream, and that it is nobody else's."""

import contextvars
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from opentelemetry.trace import Span, SpanContext, get_current_span

import aiopar
from aiopar.serve import Batcher

from .streams import Counting, counted, idle, one_worker, read_all, reading
from .test_tracing import Traces, is_idle, spans_linked

pytestmark = pytest.mark.anyio


_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable")


def current() -> SpanContext:
    return get_current_span().get_span_context()


def of_kind(
    kind: str, generate: Callable[[list[Any]], Iterator[list[Any]]]
) -> Callable[[list[Any]], Any]:
    """`generate`, or an async generator function that does the same."""

    async def generate_async(batch: list[Any]) -> AsyncIterator[list[Any]]:
        steps = generate(batch)
        try:
            for outputs in steps:
                yield outputs
        finally:
            steps.close()  # type: ignore[attr-defined]  # it is a generator

    return generate if kind == "generator" else generate_async


async def test_compute_is_the_current_span_in_each_step(kind: str) -> None:
    traces = Traces()
    seen: list[SpanContext] = []

    def generate(batch: list[Any]) -> Iterator[list[Any]]:
        try:
            for number in range(3):
                seen.append(current())
                with traces.tracer.start_as_current_span("inner"):
                    pass
                yield [(item, number) for item in batch]
        finally:
            seen.append(current())

    async with Batcher(of_kind(kind, generate), collate_fn=list, name="fn") as batcher:
        tracing = traces.watch(batcher)
        assert await read_all(batcher.stream("a")) == counted("a", 3)
        await idle(batcher)
        assert is_idle(tracing)
    compute = traces.one("compute fn").context
    assert seen == [compute] * 4
    assert [inner.parent for inner in traces.of("inner")] == [compute] * 3


async def test_it_is_the_current_span_while_a_generator_is_closed(kind: str) -> None:
    traces = Traces()
    seen: list[SpanContext] = []

    def generate(batch: list[Any]) -> Iterator[list[Any]]:
        try:
            while True:
                yield batch
        finally:
            seen.append(current())

    async with Batcher(of_kind(kind, generate), collate_fn=list, name="fn") as batcher:
        traces.watch(batcher)
        async with batcher.stream("a") as stream:
            await anext(stream)
        await idle(batcher)
    assert seen == [traces.one("compute fn").context]


async def test_streams_in_turn_on_one_worker_have_each_its_own(kind: str) -> None:
    traces = Traces()
    seen: dict[str, list[SpanContext]] = {"a": [], "b": [], "c": []}
    counting = Counting(4, lambda batch, _: seen[batch[0]].append(current()))
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            batcher = Batcher(
                counting.of(kind), collate_fn=list, max_batch_size=1, concurrency=3, name="fn"
            )
        async with batcher:
            traces.watch(batcher)
            streams = []
            for item in seen:
                with traces.tracer.start_as_current_span(item):
                    streams.append(batcher.stream(item, buffer=1))
                    assert await anext(streams[-1]) == (item, 0)
            for number in range(1, 4):
                assert [(await anext(stream))[1] for stream in streams] == [number] * 3
            assert [await anext(stream, None) for stream in streams] == [None] * 3
    computes = {
        span.parent.span_id: span.context for span in traces.of("compute fn") if span.parent
    }
    assert len(computes) == 3
    for item, contexts in seen.items():
        asked = traces.one(item).context.span_id
        [batch] = [span for span in traces.of("batch fn") if spans_linked(span) == [asked]]
        assert contexts == [computes[batch.context.span_id]] * 4


async def test_the_generators_of_a_split_batch_have_each_its_own(kind: str) -> None:
    traces = Traces()
    seen: list[tuple[Any, SpanContext]] = []

    def on_step(batch: list[Any], number: int) -> None:
        seen.append((list(batch), current()))
        if "bad" in batch:
            raise ZeroDivisionError

    options: dict[str, Any] = {"collate_fn": list, "max_batch_size": 2, "max_queue_delay": 1000}
    batcher = Batcher(Counting(2, on_step).of(kind), name="fn", **options)
    async with reading(batcher) as readers:
        traces.watch(batcher)
        await readers.queue("good")
        readers.read("bad")
    computes = [span.context for span in traces.of("compute fn")]
    first, good, bad = computes
    assert seen[:2] == [(["good", "bad"], first), (["good"], good)]
    assert sorted(seen[2:], key=str) == sorted([(["good"], good), (["bad"], bad)], key=str)


async def test_a_span_that_a_generator_holds_over_a_yield_stays_current(kind: str) -> None:
    traces = Traces()
    seen: list[Span] = []
    held: list[Span] = []

    def generate(batch: list[Any]) -> Iterator[list[Any]]:
        with traces.tracer.start_as_current_span("held") as span:
            held.append(span)
            for _ in range(2):
                yield batch
                seen.append(get_current_span())
        yield batch
        seen.append(get_current_span())

    async with Batcher(of_kind(kind, generate), collate_fn=list, name="fn") as batcher:
        traces.watch(batcher)
        assert await read_all(batcher.stream("a")) == ["a"] * 3
    compute = traces.one("compute fn").context
    assert traces.one("held").parent == compute
    assert seen[:2] == held * 2
    assert [span.get_span_context() for span in seen[2:]] == [compute]


async def test_the_state_of_a_generator_is_as_without_tracing(kind: str) -> None:
    seen: list[tuple[bool, str, int]] = []

    def generate(batch: list[Any]) -> Iterator[list[Any]]:
        for number in range(2):
            device = torch.empty(0).device.type
            seen.append((torch.is_grad_enabled(), device, _VARIABLE.get()))
            _VARIABLE.set(number)
            yield batch

    _VARIABLE.set(7)
    with torch.no_grad(), torch.device("meta"):
        batcher = Batcher(of_kind(kind, generate), collate_fn=list)
    _VARIABLE.set(8)
    async with batcher:
        for traced in (False, True):
            if traced:
                Traces().watch(batcher)
            assert await read_all(batcher.stream("a")) == ["a"] * 2
            await idle(batcher)
            assert seen == [(False, "meta", 7), (False, "meta", 0)]
            seen.clear()
    assert (torch.is_grad_enabled(), _VARIABLE.get()) == (True, 8)


async def test_it_is_the_current_span_nowhere_else(kind: str) -> None:
    traces = Traces()
    seen: list[SpanContext] = []
    counting = Counting(3, lambda *_: seen.append(current()))
    async with one_worker() as executor:
        with traces.tracer.start_as_current_span("startup") as startup:
            batcher = Batcher(counting.of(kind), collate_fn=list, name="fn")
        outside = startup.get_span_context()
        async with batcher:
            tracing = traces.watch(batcher)
            with traces.tracer.start_as_current_span("request") as request:
                async with batcher.stream("a", buffer=1) as stream:
                    async for _ in stream:
                        assert get_current_span() is request
                        on_worker = await executor.run_sync(current)
                        assert on_worker == request.get_span_context(), "who calls it has that"
                assert get_current_span() is request
            assert not (await executor.run_sync(current)).is_valid
            assert not current().is_valid
            await idle(batcher)
            batcher.remove_observer(tracing)
            assert await read_all(batcher.stream("b")) == counted("b", 3)
            await idle(batcher)
            traces.watch(batcher)
            assert await read_all(batcher.stream("c")) == counted("c", 3)
    first, later = (span.context for span in traces.of("compute fn"))
    assert seen == [first] * 3 + [outside] * 3 + [later] * 3
