"""Who watches a `Batcher` work: metrics, tracing, progress."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal, Protocol, TypeAlias

import torch

from .._errors import DeadlineExceeded
from .._observer import tell
from ._compute import Compute
from ._part import Part

Outcome: TypeAlias = Literal["completed", "failed", "rejected", "expired", "cancelled"]


class ItemInfo(Protocol):
    """One item, as observers see it; the same object in each of its events, and hashable."""

    key: Hashable
    priority: int
    cost: float
    arrived: float
    """When it came, by `time.monotonic`."""
    rejected: str | None
    """Why it was not queued: the causes of `BatcherStats.rejected`."""


@dataclass(slots=True, eq=False)
class BatchInfo:
    """One batch, as observers see it; the same object in each of its events, and hashable."""

    items: Sequence[ItemInfo]
    device: torch.device | None
    """Where it runs; None: on an event loop."""
    replica: int | None
    """The index of the pool's replica that runs it."""
    began: float
    """When it was taken, by `time.monotonic`: an item has waited `began - item.arrived`."""
    seconds: float = 0.0
    """At its end: how long it took. On an accelerator that is when its kernels were done."""
    outputs: int = 0
    """At its end: how many items have an output."""
    errors: int = 0
    """At its end: how many have an error. The rest has gone, or is given back to the queue."""


class BatchObserver:
    """Base class for observers of a `Batcher`: override what you want to see.

    An item: `enqueue`, then, exactly once, `completed`. A batch: `start`, for each run of the
    function (more than one only after an error) `compute` and `computed`, then `ended`, and after
    it `completed` of its items. An item is in two batches where a replica failed under the first.

    Each method is called in the thread where the event happens and delays it, so be brief; an
    exception is logged and otherwise ignored.
    """

    def enqueue(self, item: ItemInfo) -> None:
        """Its caller is about to queue it; in the caller's task and context."""

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        """Its caller gets its output, or `error`; in the caller's task and context.

        Which may be that it was refused (`item.rejected` says why), a `DeadlineExceeded`, or the
        cancellation of the caller.
        """

    def start(self, batch: BatchInfo) -> None:
        """A worker has taken it, and is about to compute it; on the worker."""

    def compute(self, batch: BatchInfo, size: int) -> None:
        """The function is about to run for so many of its items; on the worker.

        In the context in which the function runs: what is set here, it sees.
        """

    def computed(self, batch: BatchInfo, error: BaseException | None) -> None:
        """That run is over; on the worker. On an accelerator its kernels may still run."""

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

    def enqueue(self, item: ItemInfo) -> None:
        tell(self.observers, "enqueue", item)

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        tell(self.observers, "completed", item, error)

    def start(self, batch: BatchInfo) -> None:
        tell(self.observers, "start", batch)

    def compute(self, batch: BatchInfo, size: int) -> None:
        tell(self.observers, "compute", batch, size)

    def computed(self, batch: BatchInfo, error: BaseException | None) -> None:
        # The last to come is the first to go, as with context managers.
        tell(self.observers[::-1], "computed", batch, error)

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        tell(self.observers, "ended", batch, error)


class BatchWatch:
    """One batch and the observers that watch it, through all its events."""

    __slots__ = ("_compute", "_info", "_observers")

    def __init__(self, observers: BatchObservers, info: BatchInfo, compute: Compute) -> None:
        self._observers = observers
        self._info = info
        self._compute = compute
        observers.start(info)

    def compute(self, items: list[Any], *, again: bool) -> tuple[Any, bool]:
        """As the `compute` that it was made with."""
        self._observers.compute(self._info, len(items))
        try:
            computed = self._compute(items, again=again)
        except BaseException as error:
            self._observers.computed(self._info, error)
            raise
        self._observers.computed(self._info, None)
        return computed

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


def outcome_of(item: ItemInfo, error: BaseException | None) -> Outcome:
    """What has become of an item that is completed with `error`."""
    if error is None:
        return "completed"
    if item.rejected is not None:
        return "rejected"
    if isinstance(error, DeadlineExceeded):
        return "expired"
    # What else is no Exception says that the caller's task was cancelled or closed.
    if isinstance(error, Exception | SystemExit | KeyboardInterrupt):
        return "failed"
    return "cancelled"
