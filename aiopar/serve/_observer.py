"""Who watches a `Batcher` work: metrics, tracing, progress."""

import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Literal, Protocol, TypeAlias

import torch

from .._base.arguments import check_instance
from ..errors import DeadlineExceeded
from ..executor._observer import tell
from ._outcomes import Part

Outcome: TypeAlias = Literal["completed", "failed", "rejected", "expired", "cancelled"]


class ItemInfo(Protocol):
    """One item, as observers see it; the same object in each of its events, and hashable.

    Attributes:
        key: What `batch_key` said of it; None without one.
        priority: What its caller gave; lower goes first.
        cost: What `cost` said of it; 1.0 without one.
        arrived: When it came, by `time.monotonic`.
        rejected: Why it was refused: the causes of `BatcherStats.rejected`; None: it was not.

    Of one that ended while its batcher was being opened, key, priority and cost are not known: they
    are as if none was given.
    """

    key: Hashable
    priority: int
    cost: float
    arrived: float
    rejected: str | None


@dataclass(slots=True, eq=False)
class BatchInfo:
    """One batch, as observers see it; the same object in each of its events, and hashable.

    Attributes:
        items: What it was made of.
        device: Where it runs; None: on an event loop.
        replica: The index of the pool's replica that runs it; None: a function runs it.
        began: When it was taken, by `time.monotonic`: an item has waited `began - item.arrived`.
        seconds: At its end: how long it took. On an accelerator that is when its kernels were done.
        outputs: At its end: how many items have an output.
        errors: At its end: how many have an error. The rest has gone, or is given back to the
            queue.
    """

    items: Sequence[ItemInfo]
    device: torch.device | None
    replica: int | None
    began: float
    seconds: float = 0.0
    outputs: int = 0
    errors: int = 0


class BatchObserver:
    """Base class for observers of a `Batcher`: override what you want to see.

    An item: `enqueue`, then, exactly once, `completed`; both at once for one that ends before it is
    queued (its pool does not open, `batch_key` raises). A batch: `start`, for each run of the
    function (more than one only after an error) `compute` and `computed`, then `ended`. What of its
    items is completed by it comes after that; who reads a stream may leave before. An item is in
    two batches where a replica failed under the first.

    Each method is called in the thread where the event happens and delays it, so be brief; an
    exception is logged and otherwise ignored.

    Example:
        >>> import asyncio, aiopar, torch
        >>> class Sizes(aiopar.serve.BatchObserver):
        ...     def ended(self, batch, error):
        ...         print(len(batch.items), "items,", batch.errors, "errors")
        >>> async def main():
        ...     async with aiopar.Batcher(torch.neg) as batcher:
        ...         batcher.add_observer(Sizes())
        ...         return await batcher(torch.ones(2))
        >>> asyncio.run(main())
        1 items, 0 errors
        tensor([-1., -1.])
    """

    def enqueue(self, item: ItemInfo) -> None:
        """Its caller is about to queue it, or fails to; in the caller's task and context."""

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        """Its caller gets its output, or `error`; in the caller's task and context.

        Which may be that it was refused (`item.rejected` says why), a `DeadlineExceeded`, or the
        cancellation of the caller.
        """

    def start(self, batch: BatchInfo) -> None:
        """It was taken from the queue, and is about to be computed; where it runs."""

    def compute(self, batch: BatchInfo, size: int) -> None:
        """The function is about to run for so many of its items; where it runs.

        In the context in which it runs, so that it sees what is set here. Of a generator's steps
        only the first is told of; what is set then is seen in all of them, also when it was undone
        in `computed`.
        """

    def computed(self, batch: BatchInfo, error: BaseException | None) -> None:
        """That run is over; where it ran. On an accelerator its kernels may still run."""

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        """What becomes of its items is known; from any thread.

        Args:
            batch: With `seconds`, `outputs` and `errors`.
            error: What ended it as a whole: its replica's failure, or a kernel's.
        """


class BatchObservers(BatchObserver):
    """Several observers as one, none of which can disturb a batch."""

    def __init__(self, observers: tuple[BatchObserver, ...]) -> None:
        self.observers = observers
        # Two of the events come with each item: only who overrides one is told of it.
        self._enqueue = [one for one in observers if _overrides(one, "enqueue")]
        self._completed = [one for one in observers if _overrides(one, "completed")]

    def enqueue(self, item: ItemInfo) -> None:
        tell(self._enqueue, "enqueue", item)

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        tell(self._completed, "completed", item, error)

    def start(self, batch: BatchInfo) -> None:
        tell(self.observers, "start", batch)

    def compute(self, batch: BatchInfo, size: int) -> None:
        tell(self.observers, "compute", batch, size)

    def computed(self, batch: BatchInfo, error: BaseException | None) -> None:
        # The last to come is the first to go, as with context managers.
        tell(self.observers[::-1], "computed", batch, error)

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        tell(self.observers, "ended", batch, error)


def _overrides(observer: BatchObserver, event: str) -> bool:
    inherited = getattr(BatchObserver, event)
    return getattr(getattr(observer, event), "__func__", None) is not inherited


def with_observer(observers: BatchObservers | None, observer: BatchObserver) -> BatchObservers:
    """One more of them.

    Raises:
        TypeError: It is none.
    """
    check_instance("observer", observer, BatchObserver)
    return BatchObservers((*_each(observers), observer))


def without_observer(
    observers: BatchObservers | None, observer: BatchObserver
) -> BatchObservers | None:
    """One less of them, if it is one; None: nobody is left."""
    left = tuple(one for one in _each(observers) if one is not observer)
    return BatchObservers(left) if left else None


def _each(observers: BatchObservers | None) -> tuple[BatchObserver, ...]:
    return () if observers is None else observers.observers


class BatchWatch:
    """One batch and the observers that watch it, through all its events."""

    __slots__ = ("_info", "_observers")

    def __init__(self, observers: BatchObservers, info: BatchInfo) -> None:
        self._observers = observers
        self._info = info
        observers.start(info)

    @contextmanager
    def run(self, size: int) -> Iterator[None]:
        """The function runs for so many of its items."""
        self._observers.compute(self._info, size)
        try:
            yield
        except BaseException as error:
            self._observers.computed(self._info, error)
            raise
        self._observers.computed(self._info, None)

    def ended(self, parts: Sequence[Part], error: BaseException | None) -> None:
        """It came to `parts`, or, as a whole, to `error`."""
        info = self._info
        info.seconds = monotonic() - info.began
        for part in parts:
            if part.error is None:
                info.outputs += len(part.requests)
            else:
                info.errors += len(part.requests)
        self._observers.ended(info, error)


_UNWATCHED = nullcontext()


def watched_run(watch: BatchWatch | None, size: int) -> AbstractContextManager[None]:
    """The function runs for so many items of a batch, which may have observers."""
    return _UNWATCHED if watch is None else watch.run(size)


def outcome_of(item: ItemInfo, error: BaseException | None) -> Outcome:
    """What has become of an item that is completed with `error`."""
    if error is None:
        return "completed"
    if item.rejected is not None:
        return "rejected"
    if isinstance(error, DeadlineExceeded):
        return "expired"
    return "failed" if is_failure(error) else "cancelled"


def is_failure(error: BaseException | None) -> bool:
    """Whether it is one, and not the cancellation or the end of a task."""
    return isinstance(error, Exception | SystemExit | KeyboardInterrupt)


def tracing_of(name: str) -> BatchObserver | None:
    """OpenTelemetry spans for the batcher `name`, if the application has set a tracer provider."""
    # Who has set one has imported this; it is not ours to import.
    if "opentelemetry.trace" not in sys.modules:
        return None
    from ._tracing import find_tracing

    return find_tracing(name)
