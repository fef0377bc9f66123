"""`OpenTelemetryTracing`: spans of batchers, recorded by the real SDK."""

import gc
import sys
import weakref
from collections.abc import Generator
from typing import Any

import anyio
import pytest
import torch
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import Span, SpanContext, StatusCode, get_current_span
from torch import Tensor

import aiopar
from aiopar.serve import Batcher, ContinuousBatcher, OpenTelemetryTracing
from aiopar.testing import Gate
from tests.freeing import survivors

from .batches import Bad, Callers, busy, on_asyncio, running, until
from .replicas import Fragile, break_copy, held, open_pool
from .steppers import Counting as CountingSteps, Item
from .streams import Counting, counted, idle, of_kind, one_worker, read_all, reading

pytestmark = pytest.mark.anyio


class Traces:
    """A tracer provider, and the spans that it has recorded."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler, Resource({}), shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("tests")

    def trace(self, batcher: Batcher[Any, Any]) -> OpenTelemetryTracing:
        """Record spans of `batcher`."""
        return OpenTelemetryTracing(batcher, tracer_provider=self.provider)

    def of(self, name: str) -> list[ReadableSpan]:
        """The spans of this name, in the order in which they ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        [span] = self.of(name)
        return span


def spans_linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


class Requests(Callers):
    """Callers that each call in a span with the name of the item."""

    def __init__(self, callers: Callers, traces: Traces) -> None:
        super().__init__(callers.batcher, callers._tasks)
        self._traces = traces

    async def _call(self, item: object, options: dict[str, object]) -> None:
        with self._traces.tracer.start_as_current_span(str(item)):
            await super()._call(item, options)


async def test_spans_of_an_item_and_its_batch() -> None:
    traces = Traces()
    async with Batcher(torch.square, name="squares") as batcher:
        traces.trace(batcher)
        with traces.tracer.start_as_current_span("request"):
            await batcher(torch.ones(1), priority=-1)
            assert len(traces.of("batch squares")) == 1, "ended before the caller goes on"
    request = traces.one("request")
    queue, batch, compute = (
        traces.one(f"{name} squares") for name in ("queue", "batch", "compute")
    )
    assert queue.parent == request.context
    assert batch.parent is None
    assert compute.parent == batch.context
    assert batch.context.trace_id != request.context.trace_id
    assert [link.context for link in batch.links] == [request.context]
    assert [link.context for link in queue.links] == [batch.context]
    assert queue.attributes == {"aiopar.batcher": "squares", "aiopar.priority": -1}
    assert batch.attributes == {
        "aiopar.batcher": "squares",
        "aiopar.batch.size": 1,
        "aiopar.device": "cpu",
        "aiopar.batch.outputs": 1,
        "aiopar.batch.errors": 0,
    }
    assert compute.attributes == {"aiopar.batcher": "squares", "aiopar.batch.size": 1}
    assert {span.status.status_code for span in (queue, batch, compute)} == {StatusCode.UNSET}
    times = [queue.start_time, batch.start_time, compute.start_time, compute.end_time]
    assert sorted(times) == times  # type: ignore[type-var]  # they have ended


async def test_batch_is_linked_to_all_its_callers() -> None:
    traces = Traces()
    async with busy(name="fn") as callers:
        traces.trace(callers.batcher)
        requests = Requests(callers, traces)
        await requests.queue("a", "b")
        await callers.queue("c")  # without a span, so the queue span is a root
        callers.gate.open()
        await until(lambda: len(callers.outcomes) + len(requests.outcomes) == 4)
    batch = traces.one("batch fn")
    expected = [traces.one("a"), traces.one("b"), traces.of("queue fn")[-1]]
    assert expected[-1].parent is None
    assert spans_linked(batch) == [span.context.span_id for span in expected]
    assert [spans_linked(span) for span in traces.of("queue fn")] == [[batch.context.span_id]] * 3


async def test_compute_is_the_current_span_only_in_the_function() -> None:
    seen: list[SpanContext] = []

    def fn(batch: Tensor) -> Tensor:
        seen.append(get_current_span().get_span_context())
        return batch

    traces = Traces()
    with traces.tracer.start_as_current_span("startup") as startup:
        batcher = Batcher(fn)
    async with batcher:
        await batcher(torch.ones(1))
        assert seen.pop() == startup.get_span_context(), "the context in which the batcher was made"
        tracing = traces.trace(batcher)
        await batcher(torch.ones(1))
        tracing.close()
        tracing.close()
        await batcher(torch.ones(1))
    assert seen == [traces.one("compute fn").context, startup.get_span_context()]
    assert traces.one("batch fn").parent is None


async def test_each_run_of_a_split_batch_has_a_span() -> None:
    traces = Traces()
    async with busy(lambda item: item if item == "first" else 1 / item, name="fn") as callers:
        traces.trace(callers.batcher)
        await callers.queue(1, 0)
        callers.gate.open()
        await until(lambda: len(callers.outcomes) == 3)
    batch, computes = traces.one("batch fn"), traces.of("compute fn")
    sizes = [span.attributes["aiopar.batch.size"] for span in computes if span.attributes]
    assert sizes == [2, 1, 1]
    assert [span.parent for span in computes] == [batch.context] * 3
    whole, good, bad = computes
    for span in (whole, bad):
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "ZeroDivisionError: division by zero"
        assert [event.name for event in span.events] == ["exception"]
        assert (span.attributes or {})["error.type"] == "ZeroDivisionError"
    assert good.status.status_code is batch.status.status_code is StatusCode.UNSET
    expected = {"aiopar.batch.outputs": 1, "aiopar.batch.errors": 1}
    assert expected.items() <= (batch.attributes or {}).items()


async def test_items_without_a_batch_have_their_outcome() -> None:
    traces = Traces()
    async with busy(name="fn", max_pending=1) as callers:
        traces.trace(callers.batcher)
        with pytest.raises(aiopar.DeadlineExceeded):
            await callers.batcher(1, timeout=0.01)
        await callers.queue(2)
        with pytest.raises(aiopar.Overloaded):
            await callers.batcher(3)
        callers.cancel(2)
        await until(lambda: len(traces.of("queue fn")) == 3)
    expired, refused, cancelled = traces.of("queue fn")
    outcomes = [(span.attributes or {})["aiopar.outcome"] for span in traces.of("queue fn")]
    assert outcomes == ["expired", "refused", "cancelled"]
    assert (refused.attributes or {})["aiopar.refused"] == "queue_full"
    assert expired.status.status_code is refused.status.status_code is StatusCode.ERROR
    assert cancelled.status.status_code is StatusCode.UNSET
    assert traces.of("batch fn") == []


async def test_caller_that_is_not_sampled_is_not_linked() -> None:
    traces, unsampled = Traces(), Traces(ALWAYS_OFF)
    async with Batcher(torch.square, name="fn") as batcher:
        traces.trace(batcher)
        with unsampled.tracer.start_as_current_span("request"):
            await batcher(torch.ones(1))
    assert spans_linked(traces.one("batch fn")) == []


async def test_batch_of_a_failed_replica_has_its_error() -> None:
    traces, gate, module = Traces(), Gate(), Fragile()
    async with (
        open_pool(module, warmup=torch.ones(1, 2), name="replicas") as pool,
        Batcher(pool, max_batch_size=1) as batcher,
    ):
        traces.trace(batcher)
        break_copy(module, 0)
        module.on_call.append(gate)
        async with held(gate) as tasks:
            for _ in pool.devices:
                tasks.start_soon(batcher, torch.ones(2))
            await gate.entered(2)  # one per replica
    batches = traces.of("batch replicas")
    [failed] = [span for span in batches if span.status.status_code is StatusCode.ERROR]
    assert (failed.attributes or {})["aiopar.replica"] == 0
    assert len(batches) == 3
    links = [spans_linked(span) for span in batches]
    assert links.count(spans_linked(failed)) == 2, "tried again"


class _Item:
    """An item that can be weakly referenced."""


async def test_spans_of_an_item_of_a_continuous_batcher() -> None:
    traces, stepper = Traces(), CountingSteps()
    stepper.in_place["bad"] = Bad()
    async with ContinuousBatcher(stepper, name="steps") as batcher:
        tracing = OpenTelemetryTracing(batcher, tracer_provider=traces.provider)
        with traces.tracer.start_as_current_span("request"):
            parts = [part async for part in batcher.stream(Item("good"))]
        assert len(parts) == 3
        with pytest.raises(Bad):
            await batcher(Item("bad"))
        with pytest.raises(aiopar.DeadlineExceeded):
            await batcher(Item("late"), timeout=-1)
        tracing.close()
    request, (good, bad) = traces.one("request"), traces.of("run steps")
    waits = traces.of("queue steps")
    assert [wait.parent for wait in waits] == [request.context, None, None]
    assert [run.parent for run in (good, bad)] == [request.context, waits[1].context]
    assert good.attributes == {
        "aiopar.batcher": "steps",
        "aiopar.device": "cpu",
        "aiopar.outcome": "answered",
    }
    assert [event.name for event in good.events] == ["first part"]
    assert [event.name for event in bad.events] == ["exception"]
    assert (bad.attributes or {})["aiopar.outcome"] == "failed"
    assert bad.status.status_code is StatusCode.ERROR
    assert waits[0].end_time is not None
    assert good.start_time is not None
    assert waits[0].end_time <= good.start_time
    assert [(wait.attributes or {}).get("aiopar.outcome") for wait in waits] == [
        None,
        None,
        "expired",
    ]
    assert len(traces._exporter.get_finished_spans()) == 6, "no span of a step"


@on_asyncio
async def test_run_of_a_caller_that_leaves_while_its_item_joins_ends() -> None:
    class Joining(SpanProcessor):
        def on_start(self, span: Span, parent_context: Context | None = None) -> None:
            if isinstance(span, ReadableSpan) and span.name == "run steps":
                gate()

    traces, gate = Traces(), Gate()
    traces.provider.add_span_processor(Joining())
    async with ContinuousBatcher(CountingSteps(), name="steps") as batcher:
        OpenTelemetryTracing(batcher, tracer_provider=traces.provider)
        async with held(gate) as tasks:
            tasks.start_soon(batcher, Item("gone"))
            await gate.entered()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
        await until(lambda: running(batcher) == 0)
    assert (traces.one("run steps").attributes or {})["aiopar.outcome"] == "cancelled"


@on_asyncio
async def test_tracing_keeps_no_item_alive() -> None:
    traces = Traces()
    items: list[weakref.ref[_Item]] = []

    def fn(batch: list[_Item]) -> list[None]:
        items.extend(map(weakref.ref, batch))
        return [None] * len(batch)

    async with Batcher(fn, collate_fn=list) as batcher:
        traces.trace(batcher)
        await batcher(_Item())
        gc.collect()
        assert await survivors(items) == []


@on_asyncio
async def test_only_traced_batchers_make_spans_by_default_with_the_global_provider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces = Traces()
    # The real one can be set only once in a process.
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: traces.provider)
    async with Batcher(torch.square, name="fn") as batcher:
        await batcher(torch.ones(1))
        assert traces.of("batch fn") == []
        OpenTelemetryTracing(batcher)
        await batcher(torch.ones(1))
    assert len(traces.of("batch fn")) == 1
    with pytest.raises(TypeError, match="expected a Batcher or a ContinuousBatcher, got builtin"):
        OpenTelemetryTracing(torch.neg)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # importing it fails
    with pytest.raises(ImportError, match=r"pip install 'aiopar\[tracing\]'"):
        OpenTelemetryTracing()


# Streams: the current span in the steps of a generator.


def current() -> SpanContext:
    return get_current_span().get_span_context()


@pytest.mark.parametrize("steps", [3, 1], ids=["to its end", "closed after a step"])
async def test_compute_is_the_current_span_in_each_step_of_a_stream(kind: str, steps: int) -> None:
    traces = Traces()
    seen: list[SpanContext] = []

    def generate(batch: list[Any]) -> Generator[list[Any]]:
        try:
            for number in range(3):
                seen.append(current())
                with traces.tracer.start_as_current_span("inner"):
                    pass
                yield [(item, number) for item in batch]
        finally:
            seen.append(current())

    async with Batcher(of_kind(kind, generate), collate_fn=list, name="fn") as batcher:
        traces.trace(batcher)
        async with batcher.stream("a", buffer=1) as stream:
            assert [await anext(stream) for _ in range(steps)] == counted("a", steps)
            if steps == 3:
                assert await anext(stream, None) is None
        await idle(batcher)
    compute = traces.one("compute fn").context
    inner = [span.parent for span in traces.of("inner")]
    assert steps + 1 <= len(seen) == len(inner) + 1 <= 4
    assert seen + inner == [compute] * (len(seen) + len(inner))


async def test_generators_of_a_split_batch_have_their_own_compute_spans(kind: str) -> None:
    traces = Traces()
    seen: list[tuple[Any, SpanContext]] = []

    def on_step(batch: list[Any], number: int) -> None:
        seen.append((list(batch), current()))
        if "bad" in batch:
            raise ZeroDivisionError

    options: dict[str, Any] = {"collate_fn": list, "max_batch_size": 2, "max_queue_delay": 1000}
    batcher = Batcher(Counting(2, on_step).of(kind), name="fn", **options)
    async with reading(batcher) as readers:
        traces.trace(batcher)
        await readers.queue("good")
        readers.read("bad")
    computes = [span.context for span in traces.of("compute fn")]
    first, good, bad = computes
    assert seen[:2] == [(["good", "bad"], first), (["good"], good)]
    assert sorted(seen[2:], key=str) == sorted([(["good"], good), (["bad"], bad)], key=str)


async def test_span_that_is_open_across_a_yield_stays_current(kind: str) -> None:
    traces = Traces()
    seen: list[Span] = []
    held: list[Span] = []

    def generate(batch: list[Any]) -> Generator[list[Any]]:
        with traces.tracer.start_as_current_span("held") as span:
            held.append(span)
            for _ in range(2):
                yield batch
                seen.append(get_current_span())
        yield batch
        seen.append(get_current_span())

    async with Batcher(of_kind(kind, generate), collate_fn=list, name="fn") as batcher:
        traces.trace(batcher)
        assert await read_all(batcher.stream("a")) == ["a"] * 3
    compute = traces.one("compute fn").context
    assert traces.one("held").parent == compute
    assert seen[:2] == held * 2
    assert [span.get_span_context() for span in seen[2:]] == [compute]


async def test_compute_is_the_current_span_only_in_the_generator(kind: str) -> None:
    traces = Traces()
    seen: list[SpanContext] = []
    counting = Counting(3, lambda *_: seen.append(current()))
    async with one_worker() as executor:
        with traces.tracer.start_as_current_span("startup") as startup:
            batcher = Batcher(counting.of(kind), collate_fn=list, name="fn")
        outside = startup.get_span_context()
        async with batcher:
            tracing = traces.trace(batcher)
            with traces.tracer.start_as_current_span("request") as request:
                async with batcher.stream("a", buffer=1) as stream:
                    async for _ in stream:
                        assert get_current_span() is request
                        on_worker = await executor.run_sync(current)
                        assert on_worker == request.get_span_context()
                assert get_current_span() is request
            assert not (await executor.run_sync(current)).is_valid
            assert not current().is_valid
            await idle(batcher)
            tracing.close()
            assert await read_all(batcher.stream("b")) == counted("b", 3)
            await idle(batcher)
            traces.trace(batcher)
            assert await read_all(batcher.stream("c")) == counted("c", 3)
    first, later = (span.context for span in traces.of("compute fn"))
    assert seen == [first] * 3 + [outside] * 3 + [later] * 3
