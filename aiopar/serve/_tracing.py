"""OpenTelemetry spans of a `Batcher`; imported where the application uses OpenTelemetry only."""

from contextvars import Token
from dataclasses import dataclass

from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NoOpTracerProvider,
    ProxyTracerProvider,
    Span,
    SpanContext,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    get_tracer_provider,
    set_span_in_context,
)

from .._base.tracebacks import in_words
from ._observer import BatchInfo, BatchObserver, ItemInfo, is_failure, outcome_of


def find_tracing(name: str) -> "Tracing | None":
    """Spans for the batcher `name`; None: no tracer provider is set, or one for nothing."""
    provider = get_tracer_provider()
    if isinstance(provider, ProxyTracerProvider | NoOpTracerProvider):
        return None
    return Tracing(provider.get_tracer("aiopar"), name)


@dataclass(slots=True)
class _Batch:
    span: Span
    compute: Span | None = None
    token: Token[Context] | None = None


class Tracing(BatchObserver):
    """A span for each item's wait, each batch, and each run of the function.

    - `queue`: a child of the span in which the batcher was called; from then until the item is in a
      batch, or is refused, expired or cancelled. It is linked to its batch.
    - `batch`: a root, as it belongs to many requests; linked to the spans in which the batcher was
      called (where there is none, to those of the queue). From when the batch is taken until the
      outcome of its items is known.
    - `compute`: a child of the batch, one for each run of the function (more than one after an
      error only), and the current span while it runs. Of a generator it is the current span in each
      step, and ends with the first: spans made in the others are its children, and what is set on
      the span itself comes too late.
    """

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name
        # Whoever pops it ends it: worker and caller may come to a span at the same time.
        self._waiting: dict[ItemInfo, Span] = {}
        self._callers: dict[ItemInfo, SpanContext] = {}
        self._batches: dict[BatchInfo, _Batch] = {}

    def enqueue(self, item: ItemInfo) -> None:
        caller = get_current_span().get_span_context()
        span = self._tracer.start_span(
            f"queue {self._name}",
            attributes={"aiopar.batcher": self._name, "aiopar.priority": item.priority},
        )
        self._waiting[item] = span
        self._callers[item] = caller if caller.is_valid else span.get_span_context()

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        self._callers.pop(item, None)
        span = self._waiting.pop(item, None)
        if span is not None:
            outcome = outcome_of(item, error)
            span.set_attribute("aiopar.outcome", outcome)
            if item.rejected is not None:
                span.set_attribute("aiopar.rejected", item.rejected)
            # That a caller has gone is no error of the service.
            _end(span, None if outcome == "cancelled" else error)

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
            context=Context(),
            links=[Link(caller) for caller in callers if caller.trace_flags.sampled],
            attributes=attributes,
        )
        self._batches[batch] = _Batch(span)
        for item in batch.items:
            waited = self._waiting.pop(item, None)
            if waited is not None:
                waited.add_link(span.get_span_context())
                waited.end()

    def compute(self, batch: BatchInfo, size: int) -> None:
        known = self._batches[batch]
        known.compute = self._tracer.start_span(
            f"compute {self._name}",
            context=set_span_in_context(known.span),
            attributes={"aiopar.batcher": self._name, "aiopar.batch.size": size},
        )
        known.token = contexts.attach(set_span_in_context(known.compute))

    def computed(self, batch: BatchInfo, error: BaseException | None) -> None:
        known = self._batches[batch]
        if known.token is not None:
            contexts.detach(known.token)
        if known.compute is not None:
            # A cancellation, as nobody waited any more, or by `aclose`, is no error of the service.
            _end(known.compute, error if is_failure(error) else None)

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        span = self._batches.pop(batch).span
        span.set_attribute("aiopar.batch.outputs", batch.outputs)
        span.set_attribute("aiopar.batch.errors", batch.errors)
        _end(span, error)


def _end(span: Span, error: BaseException | None) -> None:
    if error is not None:
        span.set_attribute("error.type", type(error).__qualname__)
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, in_words(error)))
    span.end()
