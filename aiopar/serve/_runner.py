"""A batch while it runs: its parts, how they end, and the runners that take batches."""

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from time import monotonic
from typing import Any, Protocol, Self

from .._base.devices import is_device_error
from .._base.thread_state import CallerState
from ..errors import ExecutorShutdown, WorkerLost
from ..executor._executor import DeviceExecutor
from ..executor._generators import END
from ..executor._observer import Listeners, Observers
from ..executor._worker import current_worker
from ._observer import BatchInfo, BatchObserver, BatchWatch
from ._replica import PoolReplica, ReplicaFailed
from ._request import Audience, PartOutcome, Request, deliver_soon
from ._settings import BatcherSettings, FunctionKind
from ._splitting import Splitting


class BatchSource(Protocol):
    """What gives batches to runners; every method may be called from any thread."""

    observers: Observers[BatchObserver]

    def take(self, batch: "BatchRun") -> list[Request]:
        """Return the requests of the next batch, if one is due; store them in `batch.requests`."""

    def ended(
        self,
        batch: "BatchRun",
        outcomes: list[PartOutcome],
        lost: Sequence[Request],
        error: BaseException | None,
    ) -> None:
        """A batch has ended: start the next one, and deliver the outcomes.

        Args:
            batch: The batch. It has no requests if the queue had none, or if no worker or loop took
                the batch.
            outcomes: The outcomes of its requests.
            lost: Requests that must run again: neither an item nor the function was at fault.
            error: The error that ended the whole batch.
        """


class RunningBatch(Protocol):
    """A batch while it runs, as its scheduler sees it; every method may come from any thread."""

    @property
    def runner(self) -> "Runner":
        """The runner that runs it."""

    @property
    def requests(self) -> Sequence[Request]:
        """The requests that run."""

    @property
    def began(self) -> float:
        """When the batch began, by `time.monotonic`."""

    @property
    def too_large(self) -> Sequence[Sequence[Request]]:
        """Requests that did not fit into memory together."""

    def cancel(self) -> None:
        """Cancel what can be cancelled: no caller waits any more."""

    def end_stalled(self, seconds: float) -> None:
        """End the streams whose callers have stopped reading for this many seconds."""

    def end_lost(self) -> None:
        """End what ran on an event loop that was closed."""


class Runner:
    """Runs batches, one at a time.

    Args:
        executor: The executor whose workers run the batches, or collate them.
        caller: The state that the user's code runs under.
        replica: The replica that runs the batches, if there is a pool.
        replica_failed: Takes the replica out of service.
    """

    batch: "RunningBatch | None" = None
    """The running batch; None between batches."""

    def __init__(
        self,
        executor: DeviceExecutor,
        caller: CallerState,
        replica: PoolReplica | None = None,
        replica_failed: Callable[[PoolReplica, BaseException], object] | None = None,
    ) -> None:
        self.executor = executor
        self.caller = caller
        self.replica = replica
        self._replica_failed = replica_failed

    @property
    def in_service(self) -> bool:
        """Whether the runner can run a batch."""
        return self.replica is None or self.replica.in_service

    @property
    def returning(self) -> bool:
        """Whether the runner can run a batch soon."""
        return self.replica is not None and self.replica.state == "returning"

    @property
    def load(self) -> float:
        """How many calls run before its batch: on its replica, or on the least loaded worker."""
        if self.replica is not None:
            return self.replica.load
        return min(worker.load for worker in self.executor._dispatcher.default_workers)

    def start(self) -> None:
        """Take the next batch and run it, soon."""
        raise NotImplementedError

    def watch(
        self,
        observers: Listeners[BatchObserver],
        items: Sequence[Request],
        joined: Sequence[Request],
        began: float,
    ) -> BatchWatch:
        """Tell the observers that a batch begins; called where the batch runs."""
        worker, replica = current_worker(), self.replica
        device = None if worker is None else worker.device
        index = None if replica is None else replica.index
        return BatchWatch(observers, BatchInfo(items, joined, device, index, began))

    def is_replica_failure(self, error: BaseException) -> bool:
        """Whether `error` means that the replica cannot serve any more."""
        if isinstance(error, ReplicaFailed):
            return True
        return self.replica is not None and is_device_error(error)

    def fail(self, error: BaseException) -> None:
        """Take the replica, which has failed, out of service."""
        if self._replica_failed is not None and self.replica is not None:
            self._replica_failed(self.replica, error)


class BatchRunner(Runner):
    """Runs the batches of a `Batcher`: on workers, or on event loops.

    Args:
        source: The source of the batches.
        make_part: The subclass of `BatchPart` for the parts of the batches.
        fn: The function, or the pool of the replica.
        settings: The options of the batcher.
        kind: The kind of `fn`.
        executor: The executor whose workers collate the batches.
        caller: The state that the function runs under.
        replica: The replica that runs the batches. None: `fn` is a function and runs them.
        replica_failed: Takes the replica out of service.
    """

    def __init__(
        self,
        source: BatchSource,
        make_part: "type[BatchPart]",
        fn: Callable[[Any], Any],
        settings: BatcherSettings,
        kind: FunctionKind,
        executor: DeviceExecutor,
        caller: CallerState,
        replica: PoolReplica | None = None,
        replica_failed: Callable[[PoolReplica, BaseException], object] | None = None,
    ) -> None:
        super().__init__(executor, caller, replica, replica_failed)
        self.source = source
        self.make_part = make_part
        self.fn = fn
        keep, unbatch_fn = executor._dispatcher.keep, settings.unbatch_fn
        self.collate_fn = keep(settings.collate_fn)
        self.unbatch_fn = None if unbatch_fn is None else keep(unbatch_fn)
        self.batch_sizes = settings.batch_sizes
        self.streams = kind.streams

    def start(self) -> None:
        batch = self.batch = BatchRun(self)
        batch.add_part(None).begin()


class Fault(Enum):
    """The reason why a part has failed, and what happens to its batch."""

    ITEM = "an item may be bad: the halves of the part run"
    BATCH = "no item is bad: the whole batch ends"
    TASK = "another party cancelled the task: the whole batch ends, and its requests run again"


def fault_of(error: BaseException) -> Fault:
    """The fault that an error of the function or its worker shows."""
    if isinstance(error, Exception | SystemExit) and not (
        isinstance(error, ReplicaFailed | WorkerLost | ExecutorShutdown) or is_device_error(error)
    ):
        return Fault.ITEM
    return Fault.BATCH


class BatchRun:
    """One batch while it runs: one part after the other.

        starting -- a worker or loop takes the requests --> running -- the last part ends --> ended
        starting -- no request is left, or no worker or loop runs the batch --> not begun

    The first part is the whole batch. If a part fails, its halves wait to run as parts. The next
    part begins when a part ends. It also begins when a stream has its first output, and then runs
    beside the stream. Each part ends once, by `part_ended`.
    """

    def __init__(self, runner: BatchRunner) -> None:
        self.runner = runner
        self.requests: Sequence[Request] = ()
        self.began = 0.0
        """When the runner took the batch, by `time.monotonic`."""
        self.error: BaseException | None = None
        """The error that ends the whole batch; no further part begins then."""
        self._unfinished: list[Request] = []
        """The requests of the parts that `error` ended."""
        self._interrupted = False
        """Whether another party cancelled a task of the batch."""
        self._cancelled = False
        self._outcomes: list[PartOutcome] = []
        self._splitting: Splitting | None = None
        """Set by the first failure."""
        self._watch: BatchWatch | None = None
        # Re-entrant: the garbage collector may end a part while this thread holds the lock.
        self._lock = threading.RLock()
        self._running: set[BatchPart] = set()

    @property
    def waiting(self) -> list[Request]:
        """The requests of the parts that wait to run."""
        return [] if self._splitting is None else self._splitting.waiting

    @property
    def too_large(self) -> list[list[Request]]:
        """Requests that did not fit into memory together."""
        return [] if self._splitting is None else self._splitting.too_large

    def add_part(self, after: "BatchPart | None") -> "BatchPart":
        """Make the next part, after the part `after`; the caller calls `begin`."""
        part = self.runner.make_part(self, after)
        with self._lock:
            self._running.add(part)
        return part

    @property
    def goes_on(self) -> bool:
        """Whether another part must run."""
        return self.error is None and bool(self.waiting) and not self._cancelled

    def next_requests(self) -> list[Request]:
        """The requests of the next part; empty if there is none. The first call takes the batch."""
        if self._splitting is not None:
            return self._splitting.next_part()
        source = self.runner.source
        requests = source.take(self)
        self.began = monotonic()
        observers = source.observers.current
        if observers is not None and requests:
            self._watch = self.runner.watch(observers, requests, requests, self.began)
        return requests

    @property
    def observed(self) -> bool:
        """Whether observers are told of each run of the function."""
        return self._watch is not None and self._watch.observes_runs

    def watched(self, count: int) -> AbstractContextManager[None]:
        """A context manager that tells the observers that the function runs for `count` items."""
        watch = self._watch
        return nullcontext() if watch is None or not self.observed else watch.run(count)

    def part_ended(
        self,
        part: "BatchPart",
        outcome: PartOutcome | None,
        error: BaseException | None,
        fault: Fault,
    ) -> None:
        """A part has ended, with its outcome or an error; from any thread."""
        with self._lock:
            if part not in self._running:
                return  # ended by `end_lost`
            if error is not None:
                outcome = self._failed(part, error, fault)
            if outcome is not None:
                self._outcomes.append(outcome)
            next_part = self.add_part(part) if self.goes_on and not part.begun else None
            self._running.remove(part)
            last = not self._running
        if next_part is not None:
            next_part.begin()
        if last:
            self._end()
        elif self.runner.streams and outcome is not None:
            deliver_soon([outcome])  # the callers need not wait for the other parts

    def _failed(self, part: "BatchPart", error: BaseException, fault: Fault) -> PartOutcome | None:
        """Handle the error of a part. Returns the outcome, or None if that comes later."""
        if self._splitting is None:
            self._splitting = Splitting(self.requests)
        if part.begun:
            return self._splitting.failed_midway(part.requests, error)
        if fault is Fault.ITEM:
            return self._splitting.failed(part.requests, error)
        if self.error is None:
            self.error, self._interrupted = error, fault is Fault.TASK
        self._unfinished += part.requests
        return None

    def end_stalled(self, seconds: float) -> None:
        """End the parts whose callers have all stopped reading for this many seconds."""
        for part in self._running.copy():
            if part.audience is not None:
                part.audience.end_stalled(seconds)

    def end_lost(self) -> None:
        """End the parts whose event loop was closed."""
        for part in self._running.copy():
            part.end_if_lost()

    def cancel(self) -> None:
        """Cancel the parts that can be cancelled: no caller waits any more."""
        self._cancelled = True
        for part in self._running.copy():
            part.cancel()

    def _end(self) -> None:
        # The error's traceback holds frames that hold this batch.
        error, self.error = self.error, None
        outcomes, lost = self._outcomes, list[Request]()
        if error is not None:
            rest = [*self._unfinished, *self.waiting]
            again = isinstance(error, WorkerLost) or self.runner.is_replica_failure(error)
            if again or (self._interrupted and not self._cancelled):
                lost = rest
            else:
                outcomes.append(PartOutcome(rest, error=error))
        if self._watch is not None:
            # Before the callers get their outcomes: the metrics must count them by then.
            outputs = sum(len(one.requests) for one in outcomes if one.error is None)
            errors = sum(len(one.requests) for one in outcomes if one.error is not None)
            self._watch.ended(outputs, errors, error)
        self.runner.source.ended(self, outcomes, lost, error)


class BatchPart:
    """A part of a batch while it runs: one call of the function.

        made -- `begin` --> starting -- takes its requests --> running -- `end` --> ended
                 a stream:  running -- first output --> begun -- `end` --> ended

    It is made after the part `after`; None for the first part.
    """

    def __init__(self, batch: BatchRun, after: Self | None) -> None:
        self.batch = batch
        self.runner = batch.runner
        self.requests: list[Request] = []
        self.audience: Audience | None = None
        """The callers of a stream, or of a part that can be cancelled."""
        self.error: BaseException | None = None
        self.fault = Fault.BATCH
        """The reason of `error`."""
        self.sent = 0
        """How many outputs of a stream were delivered."""

    @property
    def begun(self) -> bool:
        """Whether the part is a stream and has an output."""
        return self.sent > 0

    @property
    def size(self) -> int:
        """How many items the function gets: one per request, or the next of `batch_sizes`."""
        count, sizes = len(self.requests), self.runner.batch_sizes
        return count if sizes is None else sizes[bisect_left(sizes, count)]

    @property
    def items(self) -> list[Any]:
        """The items of its requests; the last one is repeated up to `size`."""
        items = [request.item for request in self.requests]
        if self.runner.batch_sizes is not None:
            items += items[-1:] * (self.size - len(items))
        return items

    def begin(self) -> None:
        """Take the requests and run them, soon."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel the part, if possible, because no caller waits for it. From any thread."""
        raise NotImplementedError

    def end_if_lost(self) -> None:
        """End the part if its event loop was closed."""

    def send(self, outputs: Any, unbatched: bool) -> None:
        """Deliver the outputs of one step of a stream."""
        if self.audience is not None:
            self.audience.send()
        step, self.sent = self.sent, self.sent + 1
        if step == 0 and self.batch.goes_on:
            self.batch.add_part(self).begin()
        deliver_soon([PartOutcome(self.requests, outputs, unbatched, step, size=self.size)])

    def end(self, outcome: PartOutcome | None = None) -> None:
        """End the part with `error`, or else with `outcome`; a stream gets its `END` here."""
        # The error's traceback holds frames that hold this part.
        error, self.error = self.error, None
        left = self.audience is not None and self.audience.gone and not self.begun
        if error is None and self.runner.streams and self.requests and not left:
            outcome = PartOutcome(self.requests, [END] * len(self.requests), unbatched=True)
        if self.audience is not None:
            self.audience.end()
        self.batch.part_ended(self, outcome, error, self.fault)
