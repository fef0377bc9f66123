"""`OpenTelemetryTracing`: spans of batchers. OpenTelemetry is an extra, imported when needed."""

from typing import TYPE_CHECKING, Any

from .._base.arguments import described
from .._base.tracebacks import in_words
from ._base_batcher import BaseBatcher
from ._continuous import ContinuousBatcher
from ._observer import BatchInfo, BatchObserver, ItemInfo, is_failure

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer, TracerProvider


class OpenTelemetryTracing:
    """OpenTelemetry spans for the items and batches of batchers.

    - `queue` spans an item's wait: from the call until the item is in a batch, or is refused,
      expired or cancelled. Its parent is the caller's current span. It is linked to the batch.
    - `batch` spans a batch: from the queue until the outcome of its items is known. It is a root,
      because a batch belongs to many requests. It is linked to the callers' spans, or to the
      `queue` span of a caller without a span.
    - `compute` spans one run of the function; there are several runs only after an error. Its
      parent is `batch`, and it is the current span while the function runs. For a generator
      function this span ends with the first step, but stays the current span in later steps. Spans
      of later steps become its children; attributes that they set on it are lost.

    A `ContinuousBatcher` takes too many steps for a span of each step. Each item has two spans:

    - `queue` spans the wait until the item joins a batch, as above, without a link.
    - `run` spans the time from joining to the outcome of the caller. The event `first part` says
      when the first part was made. The event `joined again` says that the batch was lost, or had
      no room for the item. The parent of `run` is the caller's span, or the `queue` span if the
      caller has no span.

    The name of each span ends with the name of the batcher: `queue tiny`.

    Args:
        batchers: The batchers to trace, from now on.
        tracer_provider: What makes the spans; None: the global tracer provider.

    Raises:
        ImportError: OpenTelemetry's API is not installed. It is in the extra `tracing`.
        TypeError: A batcher is not a `Batcher` or `ContinuousBatcher`.

    Example:
        >>> import asyncio, aiopar, torch
        >>> async def main():
        ...     async with aiopar.Batcher(torch.neg) as batcher:
        ...         aiopar.serve.OpenTelemetryTracing(batcher)
        ...         return await batcher(torch.ones(2))
        >>> asyncio.run(main())
        tensor([-1., -1.])
    """

    def __init__(
        self, *batchers: BaseBatcher[Any, Any], tracer_provider: "TracerProvider | None" = None
    ) -> None:
        try:
            from opentelemetry import trace
        except ModuleNotFoundError as error:
            raise ImportError(
                "OpenTelemetryTracing needs OpenTelemetry: pip install 'aiopar[tracing]'"
            ) from error
        for batcher in batchers:
            if not isinstance(batcher, BaseBatcher):
                raise TypeError(
                    f"expected a Batcher or a ContinuousBatcher, got {described(batcher)}"
                )
        tracer = trace.get_tracer("aiopar", tracer_provider=tracer_provider)
        self._observed: list[tuple[BaseBatcher[Any, Any], BatchObserver]] = []
        for batcher in batchers:
            kind = _StepSpans if isinstance(batcher, ContinuousBatcher) else _BatchSpans
            spans = kind(tracer, batcher.name)
            batcher.add_observer(spans)
            self._observed.append((batcher, spans))

    def close(self) -> None:
        """Make no more spans. It may be called again."""
        for batcher, spans in self._observed:
            batcher.remove_observer(spans)


class _QueueSpans(BatchObserver):
    """The `queue` spans of one batcher."""

    def __init__(self, tracer: "Tracer", name: str) -> None:
        from opentelemetry import context, trace

        self._context, self._trace = context, trace
        self._tracer, self._name = tracer, name
        # A worker or the caller ends a span: whichever removes the span from its dict.
        self._queue: dict[ItemInfo, Span] = {}
        self._callers: dict[ItemInfo, SpanContext] = {}

    def enqueue(self, item: ItemInfo) -> None:
        caller = self._trace.get_current_span().get_span_context()
        span = self._tracer.start_span(
            f"queue {self._name}",
            attributes={"aiopar.batcher": self._name, "aiopar.priority": item.priority},
        )
        self._queue[item] = span
        self._callers[item] = caller if caller.is_valid else span.get_span_context()

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        self._callers.pop(item, None)
        span = self._queue.pop(item, None)
        if span is not None:
            self._end_with_outcome(span, item, error)

    def _attributes(self, batch: BatchInfo) -> dict[str, str | int]:
        attributes: dict[str, str | int] = {"aiopar.batcher": self._name}
        if batch.device is not None:
            attributes["aiopar.device"] = str(batch.device)
        if batch.replica is not None:
            attributes["aiopar.replica"] = batch.replica
        return attributes

    def _end_with_outcome(self, span: "Span", item: ItemInfo, error: BaseException | None) -> None:
        span.set_attribute("aiopar.outcome", item.outcome)
        if item.refused is not None:
            span.set_attribute("aiopar.refused", item.refused)
        self._end(span, error)

    def _end(self, span: "Span", error: BaseException | None) -> None:
        # The cancellation of a caller or a batch is no error of the service.
        if error is not None and is_failure(error):
            span.set_attribute("error.type", type(error).__qualname__)
            span.record_exception(error)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, in_words(error)))
        span.end()


class _BatchSpans(_QueueSpans):
    """The spans of a `Batcher`."""

    def __init__(self, tracer: "Tracer", name: str) -> None:
        super().__init__(tracer, name)
        self._batches: dict[BatchInfo, Span] = {}
        self._computes: dict[BatchInfo, tuple[Span, Any]] = {}  # with the token of the context

    def start(self, batch: BatchInfo) -> None:
        callers = filter(None, map(self._callers.get, batch.items))
        span = self._tracer.start_span(
            f"batch {self._name}",
            context=self._context.Context(),
            links=[self._trace.Link(caller) for caller in callers if caller.trace_flags.sampled],
            attributes=self._attributes(batch) | {"aiopar.batch.size": len(batch.items)},
        )
        self._batches[batch] = span
        for item in batch.items:
            waited = self._queue.pop(item, None)
            if waited is not None:
                waited.add_link(span.get_span_context())
                waited.end()

    def compute(self, batch: BatchInfo, size: int) -> None:
        span = self._tracer.start_span(
            f"compute {self._name}",
            context=self._trace.set_span_in_context(self._batches[batch]),
            attributes={"aiopar.batcher": self._name, "aiopar.batch.size": size},
        )
        token = self._context.attach(self._trace.set_span_in_context(span))
        self._computes[batch] = span, token

    def computed(self, batch: BatchInfo, error: BaseException | None) -> None:
        span, token = self._computes.pop(batch)
        self._context.detach(token)
        self._end(span, error)

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        span = self._batches.pop(batch)
        span.set_attribute("aiopar.batch.outputs", batch.outputs)
        span.set_attribute("aiopar.batch.errors", batch.errors)
        self._end(span, error)


class _StepSpans(_QueueSpans):
    """The spans of a `ContinuousBatcher`."""

    def __init__(self, tracer: "Tracer", name: str) -> None:
        super().__init__(tracer, name)
        self._runs: dict[ItemInfo, Span] = {}

    def start(self, batch: BatchInfo) -> None:
        for item in batch.joined:
            waited = self._queue.pop(item, None)
            if waited is not None:
                waited.end()
                self._begin(item, batch)
            elif (running := self._runs.get(item)) is not None:
                running.add_event("joined again")

    def _begin(self, item: ItemInfo, batch: BatchInfo) -> None:
        caller = self._callers.get(item)
        if caller is None:
            return
        self._runs[item] = self._tracer.start_span(
            f"run {self._name}",
            context=self._trace.set_span_in_context(self._trace.NonRecordingSpan(caller)),
            attributes=self._attributes(batch),
        )
        if item not in self._callers:  # the caller has left meanwhile
            self.completed(item, GeneratorExit())

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        for item in batch.first_parts:
            span = self._runs.get(item)
            if span is not None:
                span.add_event("first part")

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        super().completed(item, error)
        span = self._runs.pop(item, None)
        if span is not None:
            self._end_with_outcome(span, item, error)
