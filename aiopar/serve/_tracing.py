"""`OpenTelemetryTracing`: spans of batchers. OpenTelemetry is an extra, imported when needed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._base.arguments import check_instance
from .._base.tracebacks import in_words
from ._batcher import Batcher
from ._observer import BatchInfo, BatchObserver, ItemInfo, is_failure, outcome_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer, TracerProvider


class OpenTelemetryTracing:
    """OpenTelemetry spans for the items and batches of batchers.

    - `queue` spans an item's wait: from its call until it is in a batch, or is refused, expired or
      cancelled. Its parent is the caller's current span. It is linked to the batch.
    - `batch` spans a batch: from the queue until the outcome of its items is known. It is a root,
      because it belongs to many requests, and is linked to the callers' spans. For a caller without
      a span it is linked to the `queue` span.
    - `compute` spans one run of the function; there are several runs only after an error. Its
      parent is the batch, and it is the current span while the function runs. For a generator
      function it is the current span in each step, and ends with the first step: attributes that
      later steps set on it are lost, but their own spans become its children.

    Each name ends with the name of the batcher: `queue tiny`.

    Args:
        batchers: The batchers to trace, from now on.
        tracer_provider: What makes the spans; None: the global tracer provider.

    Raises:
        ImportError: OpenTelemetry's API is not installed. It is in the extra `tracing`.
        TypeError: A batcher is not a `Batcher`.

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
        self, *batchers: Batcher[Any, Any], tracer_provider: "TracerProvider | None" = None
    ) -> None:
        try:
            from opentelemetry import trace
        except ModuleNotFoundError as error:
            raise ImportError(
                "OpenTelemetryTracing needs OpenTelemetry: pip install 'aiopar[tracing]'"
            ) from error
        for batcher in batchers:
            check_instance("batcher", batcher, Batcher)
        tracer = trace.get_tracer("aiopar", tracer_provider=tracer_provider)
        self._observed = [(batcher, _Spans(tracer, batcher.name)) for batcher in batchers]
        for batcher, spans in self._observed:
            batcher.add_observer(spans)

    def close(self) -> None:
        """Make no more spans. It may be called again."""
        for batcher, spans in self._observed:
            batcher.remove_observer(spans)


@dataclass(slots=True)
class _BatchSpans:
    batch: "Span"
    compute: "Span | None" = None
    token: Any = None  # restores the context before `compute`


class _Spans(BatchObserver):
    """The spans of one batcher."""

    def __init__(self, tracer: "Tracer", name: str) -> None:
        from opentelemetry import context, trace

        self._context, self._trace = context, trace
        self._tracer = tracer
        self._name = name
        # A span is ended by whoever removes it from its dict: a worker or the caller.
        self._queue: dict[ItemInfo, Span] = {}
        self._callers: dict[ItemInfo, SpanContext] = {}
        self._batches: dict[BatchInfo, _BatchSpans] = {}

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
            outcome = outcome_of(item, error)
            span.set_attribute("aiopar.outcome", outcome)
            if item.rejected is not None:
                span.set_attribute("aiopar.rejected", item.rejected)
            # A cancelled caller is no error of the service.
            self._end(span, None if outcome == "cancelled" else error)

    def start(self, batch: BatchInfo) -> None:
        callers = filter(None, map(self._callers.get, batch.items))
        attributes: dict[str, str | int] = {
            "aiopar.batcher": self._name,
            "aiopar.batch.size": len(batch.items),
        }
        if batch.device is not None:
            attributes["aiopar.device"] = str(batch.device)
        if batch.replica is not None:
            attributes["aiopar.replica"] = batch.replica
        span = self._tracer.start_span(
            f"batch {self._name}",
            context=self._context.Context(),
            links=[self._trace.Link(caller) for caller in callers if caller.trace_flags.sampled],
            attributes=attributes,
        )
        self._batches[batch] = _BatchSpans(span)
        for item in batch.items:
            waited = self._queue.pop(item, None)
            if waited is not None:
                waited.add_link(span.get_span_context())
                waited.end()

    def compute(self, batch: BatchInfo, size: int) -> None:
        spans = self._batches[batch]
        spans.compute = self._tracer.start_span(
            f"compute {self._name}",
            context=self._trace.set_span_in_context(spans.batch),
            attributes={"aiopar.batcher": self._name, "aiopar.batch.size": size},
        )
        spans.token = self._context.attach(self._trace.set_span_in_context(spans.compute))

    def computed(self, batch: BatchInfo, error: BaseException | None) -> None:
        spans = self._batches[batch]
        if spans.compute is not None:
            self._context.detach(spans.token)
            # A cancellation (no caller is left, or `aclose`) is no error of the service.
            self._end(spans.compute, error if is_failure(error) else None)

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        span = self._batches.pop(batch).batch
        span.set_attribute("aiopar.batch.outputs", batch.outputs)
        span.set_attribute("aiopar.batch.errors", batch.errors)
        self._end(span, error)

    def _end(self, span: "Span", error: BaseException | None) -> None:
        if error is not None:
            span.set_attribute("error.type", type(error).__qualname__)
            span.record_exception(error)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, in_words(error)))
        span.end()
