"""Observers of a batcher: metrics, tracing, progress."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Literal, Protocol, TypeAlias

import torch

from ..executor._observer import Listeners, ProcessObservers

Outcome: TypeAlias = Literal["answered", "failed", "refused", "expired", "cancelled"]
Refusal: TypeAlias = Literal[
    "queue_full", "max_wait", "max_batch_cost", "invalid_input", "unavailable", "closed"
]


class ItemInfo(Protocol):
    """One item, for observers: a hashable object, the same in each event of the item.

    An item that ends while its batcher opens has the default key, priority and cost.

    Attributes:
        key: The result of `batch_key`; None without one.
        priority: The caller's `priority`; lower goes first.
        cost: The result of `cost`; 1.0 without one.
        arrived: When the item came, by `time.monotonic`.
        refused: Why the item was refused, one of the causes of `BatcherStats.refused`; None if it
            was not refused.
        outcome: How the item has ended, for `BatchObserver.completed`: `answered`, `failed`,
            `refused`, `expired` (its own deadline has passed) or `cancelled` (its caller has left).
    """

    @property
    def key(self) -> Hashable: ...

    priority: int
    cost: float
    arrived: float
    refused: Refusal | None
    outcome: Outcome


@dataclass(slots=True, eq=False)
class BatchInfo:
    """One batch, for observers: a hashable object, the same in each event of the batch.

    The attributes from `seconds` on are set when the batch has ended.

    Attributes:
        items: The items of the batch; for a `ContinuousBatcher`, the items that take one step.
        joined: The items that have waited in the queue until this batch: all items, or the
            newcomers of the step.
        device: Where the batch runs; None if it runs on an event loop.
        replica: The index of the pool's replica that runs the batch; None without a pool.
        began: When the batch was taken from the queue, by `time.monotonic`. An item has waited for
            `began - item.arrived`.
        seconds: How long the batch took; on an accelerator, until its kernels were done. Of a
            `ContinuousBatcher`: how long the step took.
        outputs: How many items got an output; for a step, how many got their result.
        errors: How many items got an error. The callers of the other items have gone, or these
            items are back in the queue, or go on.
        first_parts: The items that got their first part in this step; empty for a `Batcher`.
        between_parts: For each other item that got a part in this step, the seconds since its
            previous part; empty for a `Batcher`.
    """

    items: Sequence[ItemInfo]
    joined: Sequence[ItemInfo]
    device: torch.device | None
    replica: int | None
    began: float
    seconds: float = 0.0
    outputs: int = 0
    errors: int = 0
    first_parts: Sequence[ItemInfo] = ()
    between_parts: Sequence[float] = ()


class BatchObserver:
    """Base class for observers of a batcher: override the methods of the events you need.

    The events of an item are `enqueue`, then `completed`, each exactly once. `completed` is the end
    of the item, whatever its outcome: answered, failed, refused, expired or cancelled. Both events
    come at once for an item that ends before it is queued, because its pool does not open or
    `batch_key` raises.

    The events of a batch are `start`, then `compute` and `computed` for each run of the function,
    then `ended`. The function runs several times only after an error. The batch completes its items
    after `ended`, but a reader of a stream may leave before `ended`. If the replica of a batch
    fails, its items come in a second batch.

    Each step of a `ContinuousBatcher` is a batch, so an item is in many batches. Items that go on
    with the next step are neither outputs nor errors.

    Each method is called in the thread where the event happens and delays this thread, so keep it
    short. Exceptions of a method are logged and otherwise ignored.

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
        """The item is about to be queued. Called in the caller's task and context."""

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        """The item has ended: its caller gets the output or `error`.

        Called in the caller's task and context. The item counts in `stats()` already. The error may
        also be the refusal of the item, a `DeadlineExceeded`, or the cancellation of the caller:
        see `item.outcome`.
        """

    def start(self, batch: BatchInfo) -> None:
        """The batch was taken from the queue. Called where the batch runs."""

    def compute(self, batch: BatchInfo, size: int) -> None:
        """The function is about to run for `size` of the batch's items.

        Called where the function runs and in its context: the function sees context variables that
        are set here. A generator function has one such event, before its first step. All its steps
        see these variables, even if `computed` resets them.
        """

    def computed(self, batch: BatchInfo, error: BaseException | None) -> None:
        """The function has returned or raised. On an accelerator its kernels may still run.

        Called where the function ran.
        """

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        """The outcome of the batch's items is known. Called in any thread.

        Args:
            batch: The batch, now with `seconds`, `outputs` and `errors`.
            error: The error of the whole batch: its replica or a kernel failed.
        """


all_batchers: ProcessObservers[BatchObserver] = ProcessObservers(BatchObserver)


class BatchWatch:
    """Tells observers of one batch."""

    def __init__(self, observers: Listeners[BatchObserver], info: BatchInfo) -> None:
        self._observers, self._info = observers, info
        self.observes_runs = observers.any_for("compute", "computed")
        """Whether an observer is told of the runs of the function."""
        observers.tell("start", info)

    @contextmanager
    def run(self, size: int) -> Iterator[None]:
        """The block runs the function for `size` items."""
        self._observers.tell("compute", self._info, size)
        # Observers are told of the end in reverse order, as context managers exit.
        try:
            yield
        except BaseException as error:
            self._observers.tell_last_first("computed", self._info, error)
            raise
        self._observers.tell_last_first("computed", self._info, None)

    def ended(
        self,
        outputs: int,
        errors: int,
        error: BaseException | None,
        first_parts: Sequence[ItemInfo] = (),
        between_parts: Sequence[float] = (),
    ) -> None:
        """Tell the observers the end of the batch: its outcomes, or its `error` as a whole."""
        info = self._info
        info.seconds = monotonic() - info.began
        info.first_parts, info.between_parts = first_parts, between_parts
        info.outputs, info.errors = outputs, errors
        self._observers.tell("ended", info, error)


def is_failure(error: BaseException | None) -> bool:
    """Whether `error` is a failure, not the cancellation or the end of a task."""
    return isinstance(error, Exception | SystemExit | KeyboardInterrupt)
