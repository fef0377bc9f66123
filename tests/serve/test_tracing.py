"""OpenTelemetry spans of a `Batcher`: how they belong together, made by the real SDK."""

import subprocess
import sys

import anyio
import pytest
import torch
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import SpanContext, StatusCode, get_current_span
from torch import Tensor

import aiopar
from aiopar.serve import Batcher
from aiopar.serve._tracing import Tracing
from aiopar.testing import Gate

from .batches import Callers, busy, until
from .replicas import Fragile, open_pool, poison


class Traces:
    """A tracer, and the spans that it has recorded."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler, Resource({}), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("tests")

    def watch(self, batcher: Batcher) -> Tracing:
        """Make spans of what comes to it."""
        tracing = Tracing(self.tracer, batcher.name)
        batcher.add_observer(tracing)
        return tracing

    def of(self, name: str) -> list[ReadableSpan]:
        """The spans of this name, in the order in which they ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        [span] = self.of(name)
        return span


def spans_linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def is_idle(tracing: Tracing) -> bool:
    """Whether it has let go of everything."""
    return not (tracing._waiting or tracing._callers or tracing._batches)


class Requests(Callers):
    """Callers, each within a span of its own, named as the item."""

    def __init__(self, callers: Callers, traces: Traces) -> None:
        super().__init__(callers.batcher, callers._tasks)
        self._traces = traces

    async def _call(self, item: object, options: dict[str, object]) -> None:
        with self._traces.tracer.start_as_current_span(str(item)):
            await super()._call(item, options)


@pytest.mark.anyio
async def test_queue_is_the_requests_child_and_compute_the_batchs() -> None:
    traces = Traces()
    async with Batcher(torch.square, name="squares") as batcher:
        tracing = traces.watch(batcher)
        with traces.tracer.start_as_current_span("request"):
            await batcher(torch.ones(1), priority=-1)
            assert len(traces.of("batch squares")) == 1, "ended when there is an output"
        assert is_idle(tracing)
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


@pytest.mark.anyio
async def test_a_batch_is_linked_to_all_its_requests() -> None:
    traces = Traces()
    async with busy(name="fn") as callers:
        traces.watch(callers.batcher)
        requests = Requests(callers, traces)
        await requests.queue("a", "b")
        await callers.queue("c")  # outside of any span: its queue is a root
        callers.gate.open()
        await until(lambda: len(callers.outcomes) + len(requests.outcomes) == 4)
    batch = traces.one("batch fn")
    expected = [traces.one("a"), traces.one("b"), traces.of("queue fn")[-1]]
    assert expected[-1].parent is None
    assert spans_linked(batch) == [span.context.span_id for span in expected]
    assert [spans_linked(span) for span in traces.of("queue fn")] == [[batch.context.span_id]] * 3


@pytest.mark.anyio
async def test_compute_is_the_current_span_in_the_function_and_only_there() -> None:
    seen: list[SpanContext] = []

    def fn(batch: Tensor) -> Tensor:
        seen.append(get_current_span().get_span_context())
        return batch

    traces = Traces()
    with traces.tracer.start_as_current_span("startup") as startup:
        batcher = Batcher(fn)
    async with batcher:
        await batcher(torch.ones(1))
        assert seen.pop() == startup.get_span_context(), "the state of who made it"
        tracing = traces.watch(batcher)
        await batcher(torch.ones(1))
        batcher.remove_observer(tracing)
        await batcher(torch.ones(1))
    assert seen == [traces.one("compute fn").context, startup.get_span_context()]
    assert traces.one("batch fn").parent is None


@pytest.mark.anyio
async def test_each_run_of_a_batch_that_is_split_has_a_span() -> None:
    traces = Traces()
    async with busy(lambda item: item if item == "first" else 1 / item, name="fn") as callers:
        traces.watch(callers.batcher)
        await callers.queue(1, 0)
        callers.gate.open()
        await until(lambda: len(callers.outcomes) == 3)
    batch, computes = traces.one("batch fn"), traces.of("compute fn")
    assert [span.attributes["aiopar.batch.size"] for span in computes if span.attributes] == [
        2,
        1,
        1,
    ]
    assert [span.parent for span in computes] == [batch.context] * 3
    whole, good, bad = computes
    for span in (whole, bad):
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "ZeroDivisionError: division by zero"
        assert [event.name for event in span.events] == ["exception"]
        assert (span.attributes or {})["error.type"] == "ZeroDivisionError"
    assert good.status.status_code is batch.status.status_code is StatusCode.UNSET
    assert batch.attributes is not None
    assert (batch.attributes["aiopar.batch.outputs"], batch.attributes["aiopar.batch.errors"]) == (
        1,
        1,
    )


@pytest.mark.anyio
async def test_what_never_comes_into_a_batch_says_why() -> None:
    traces = Traces()
    async with busy(name="fn", max_pending=1) as callers:
        tracing = traces.watch(callers.batcher)
        with pytest.raises(aiopar.DeadlineExceeded):
            await callers.batcher(1, timeout=0.01)
        await callers.queue(2)
        with pytest.raises(aiopar.Overloaded):
            await callers.batcher(3)
        callers.cancel(2)
        await until(lambda: len(traces.of("queue fn")) == 3)
        assert is_idle(tracing)
    expired, rejected, cancelled = traces.of("queue fn")
    outcomes = [(span.attributes or {})["aiopar.outcome"] for span in traces.of("queue fn")]
    assert outcomes == ["expired", "rejected", "cancelled"]
    assert (rejected.attributes or {})["aiopar.rejected"] == "queue_full"
    assert expired.status.status_code is rejected.status.status_code is StatusCode.ERROR
    assert cancelled.status.status_code is StatusCode.UNSET
    assert traces.of("batch fn") == []


@pytest.mark.anyio
async def test_a_request_that_is_not_sampled_is_not_linked() -> None:
    traces, unsampled = Traces(), Traces(ALWAYS_OFF)
    async with Batcher(torch.square, name="fn") as batcher:
        traces.watch(batcher)
        with unsampled.tracer.start_as_current_span("request"):
            await batcher(torch.ones(1))
    assert spans_linked(traces.one("batch fn")) == []


@pytest.mark.anyio
async def test_a_batch_that_is_given_back_has_the_error_of_its_replica() -> None:
    traces, gate, module = Traces(), Gate(), Fragile()
    async with (
        open_pool(module, warmup=torch.ones(1, 2), name="replicas") as pool,
        Batcher(pool, max_batch_size=1) as batcher,
    ):
        tracing = traces.watch(batcher)
        poison(pool._replicas[0])
        module.on_call.append(gate)
        with gate:
            async with anyio.create_task_group() as tasks:
                for _ in pool._replicas:
                    tasks.start_soon(batcher, torch.ones(2))
                await gate.entered(2)  # one on each
                gate.open()
        assert is_idle(tracing)
    batches = traces.of("batch replicas")
    [failed] = [span for span in batches if span.status.status_code is StatusCode.ERROR]
    assert (failed.attributes or {})["aiopar.replica"] == 0
    assert len(batches) == 3
    links = [spans_linked(span) for span in batches]
    assert links.count(spans_linked(failed)) == 2, "tried again"


_SERVE = """
import asyncio, sys, torch
from aiopar import Batcher

{before}
from_start = "opentelemetry.trace" in sys.modules

async def main():
    async with Batcher(torch.square) as batcher:
        await batcher(torch.ones(1))
        print(batcher._scheduler.observers is not None)

asyncio.run(main())
print("opentelemetry.trace" in sys.modules and not from_start)
"""
_PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

provider = TracerProvider()
exporter = ConsoleSpanExporter(formatter=lambda span: span.name + chr(10))
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
"""
_NO_OP = """
from opentelemetry import trace

trace.set_tracer_provider(trace.NoOpTracerProvider())
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param("", ["False", "False"], id="the API is not imported"),
        pytest.param("from opentelemetry import trace", ["False", "False"], id="no provider"),
        pytest.param(_NO_OP, ["False", "False"], id="a provider that does nothing"),
        pytest.param(
            _PROVIDER,
            ["queue square", "compute square", "batch square", "True", "False"],
            id="a provider",
        ),
    ],
)
def test_spans_are_made_where_a_tracer_provider_is_set(before: str, expected: list[str]) -> None:
    command = [sys.executable, "-c", _SERVE.format(before=before)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines() == expected
