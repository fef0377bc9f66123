"""A batch while it runs: its parts, how they end, and the runners that take batches."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

import torch

from .._base.devices import is_device_error
from .._base.thread_state import CallerState
from .._base.tracebacks import stand_in
from ..errors import WorkerLost
from ..executor._executor import DeviceExecutor
from ..executor._generators import END, Steps
from ..executor._loop_tasks import Tasks
from ..executor._observer import Observers
from ..executor._worker import Worker, current_worker
from ._observer import BatchInfo, BatchObserver, BatchWatch
from ._outcomes import Part, deliver_soon, failed_midway
from ._replica import PoolReplica, ReplicaFailed
from ._request import Audience, Request
from ._settings import BatcherSettings, FunctionKind
from ._splitting import Splitting


class Place:
    """Where the parts of batches run: on workers, or on event loops.

    Args:
        fn: The function, or the pool of the replica.
        settings: The options of the batcher.
        kind: The kind of the function.
        executor: The executor whose workers collate the batches.
        caller: The state that the function runs under.
        replica: The replica that runs the batches. None: the function does.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        settings: BatcherSettings,
        kind: FunctionKind,
        executor: DeviceExecutor,
        caller: CallerState,
        replica: PoolReplica | None = None,
    ) -> None:
        self.executor = executor
        self.replica = replica
        self.streams = kind.streams
        self._fn = fn
        self._settings = settings
        self._caller = caller
        keep, unbatch_fn = executor._dispatcher.keep, settings.unbatch_fn
        self._collate_fn = keep(settings.collate_fn)
        self._unbatch_fn = None if unbatch_fn is None else keep(unbatch_fn)

    def begin(self, part: "PartRun") -> None:
        """Run the next part of its batch, soon."""
        raise NotImplementedError

    def cancel(self, part: "PartRun") -> None:
        """Cancel a part, if possible: no caller waits for it. From any thread."""
        raise NotImplementedError


class BatchSource(Protocol):
    """What gives batches to runners; every method may be called from any thread."""

    observers: Observers[BatchObserver]

    def take(self, batch: "BatchRun") -> list[Request]:
        """Set `batch.requests` to the requests of the next batch and return them.

        They are empty if there is no batch.
        """

    def ended(self, batch: "BatchRun", result: "BatchResult") -> None:
        """A batch has ended: start the next one."""

    def delivered(self) -> None:
        """The outcomes of a batch that has ended are on their way to the callers."""

    def not_begun(self, runner: "Runner", error: BaseException | None) -> None:
        """The runner took no batch: none was left, its loop was closed, or it failed."""


@dataclass(slots=True, eq=False)
class BatchResult:
    """How a batch has ended."""

    parts: list[Part]
    """Requests with their outputs or errors."""
    lost: Sequence[Request]
    """Requests that must run again: neither an item nor the function was at fault."""
    error: BaseException | None
    """The error that ended the whole batch."""
    too_large: Sequence[Sequence[Request]]
    """Requests that did not fit into memory together."""
    replica_failed: bool


class Runner:
    """Runs batches in one place, one at a time.

    Args:
        source: The source of the batches.
        place: Where the batches run.
        replica_failed: Takes the place's replica out of service.
    """

    def __init__(
        self,
        source: BatchSource,
        place: Place,
        replica_failed: Callable[[PoolReplica, BaseException], object] | None,
    ) -> None:
        self.place = place
        self.batch: BatchRun | None = None
        """The batch that runs."""
        self._source = source
        self._replica_failed = replica_failed

    @property
    def in_service(self) -> bool:
        """Whether it can run a batch."""
        return self.place.replica is None or self.place.replica.in_service

    @property
    def returning(self) -> bool:
        """Whether it can run a batch soon."""
        return self.place.replica is not None and self.place.replica.returning

    @property
    def load(self) -> float:
        """The load of its replica; 0 without one: any free worker runs the batch."""
        return 0.0 if self.place.replica is None else self.place.replica.load

    def start(self) -> None:
        """Take the next batch and run it, soon."""
        self.batch = BatchRun(self, self._source)
        self.batch.begin_part(None)

    def is_replica_failure(self, error: BaseException) -> bool:
        """Whether `error` means that its replica cannot serve any more."""
        if isinstance(error, ReplicaFailed):
            return True
        return self.place.replica is not None and is_device_error(error)

    def fail(self, error: BaseException) -> None:
        """Take its replica, which has failed, out of service."""
        if self._replica_failed is not None and self.place.replica is not None:
            self._replica_failed(self.place.replica, error)


class BatchRun:
    """One batch while it runs.

    A batch runs as one part. If that part fails, its halves run as parts, one after the other. A
    stream goes on after its first output while the next part runs. The batch ends with its last
    part.
    """

    def __init__(self, runner: Runner, source: BatchSource) -> None:
        self.runner = runner
        self.requests: Sequence[Request] = ()
        self.began = 0.0
        """When the runner took it, by `time.monotonic`."""
        self._source = source
        self._splitting: Splitting | None = None
        self._watch: BatchWatch | None = None
        self._lock = threading.RLock()  # the garbage collector may run meanwhile, and end a part
        self._running: set[PartRun] = set()
        self._parts: list[Part] = []
        self._too_large: list[Sequence[Request]] = []
        self.failure: BaseException | None = None
        """The error that ends the whole batch, as one of the device: no further part begins."""
        self._failed: list[Request] = []
        """The requests of the parts that `failure` ended."""
        self._interrupted = False
        """Whether another party cancelled a task of the batch."""
        self._cancelled = False

    @property
    def taken(self) -> bool:
        """Whether it has its requests."""
        return self._splitting is not None

    def begin_part(self, after: "PartRun | None") -> None:
        """Run the next part, on the worker of the part `after`."""
        part = PartRun(self, None if after is None else after.worker)
        with self._lock:
            self._running.add(part)
        self.runner.place.begin(part)

    def next_requests(self) -> list[Request]:
        """The requests of the next part; empty if there is none. The first call takes the batch."""
        if self._splitting is None:
            requests = self._source.take(self)
            self.began = monotonic()
            observers = self._source.observers.current
            if observers is not None and requests:
                worker, replica = current_worker(), self.runner.place.replica
                device = None if worker is None else worker.device
                index = None if replica is None else replica.index
                info = BatchInfo(requests, device, index, self.began)
                self._watch = BatchWatch(observers, info)
            self._splitting = Splitting(requests)
        return self._splitting.next_part()

    @property
    def observed(self) -> bool:
        """Whether observers are told of the runs of its function."""
        return self._watch is not None and self._watch.observes_runs

    def watched(self, count: int) -> AbstractContextManager[None]:
        """A context manager that tells the observers that the function runs for `count` items."""
        watch = self._watch
        return nullcontext() if watch is None or not self.observed else watch.run(count)

    def part_succeeded(self, part: "PartRun") -> None:
        """A part has its first output: begin the next one."""
        part.begun = True
        self.go_on(part)

    def part_failed(self, part: "PartRun", error: BaseException) -> None:
        """A part has failed before its first output: run its halves."""
        if self._splitting is not None:
            self._splitting.failed(part.requests, error)

    def go_on(self, part: "PartRun") -> None:
        """Begin the part after `part`, once."""
        splitting = self._splitting
        if splitting is None or part.went_on:
            return
        part.went_on = True
        if splitting.waiting and self.failure is None:
            self.begin_part(part)

    def stop(self, part: "PartRun", error: BaseException, *, interrupted: bool) -> None:
        """End the batch as a whole because of `error`."""
        if self.failure is None:
            self.failure, self._interrupted = error, interrupted
        self._failed += part.requests

    def part_ended(self, part: "PartRun", outcome: Part | None) -> None:
        """A part has ended; from any thread."""
        with self._lock:
            if part not in self._running:
                return  # its loop was lost
            self._running.remove(part)
            last = not self._running
            parts = [] if outcome is None else [outcome]
            if self._splitting is not None:
                parts += self._splitting.failed_parts()
            self._parts += parts
            if part.too_large:
                self._too_large.append(part.requests)
        if last:
            self._end()
        elif self.runner.place.streams:
            deliver_soon(parts)  # the callers need not wait for the other parts

    def end_stalled(self, seconds: float) -> None:
        """End the parts whose callers have all stopped reading for this many seconds."""
        for part in tuple(self._running):
            if part.audience is not None:
                part.audience.end_stalled(seconds)

    def cancel(self) -> None:
        """Cancel the parts that can be cancelled: no caller waits any more."""
        self._cancelled = True
        for part in tuple(self._running):
            self.runner.place.cancel(part)

    @property
    def loop_lost(self) -> bool:
        """Whether it runs on a loop that was closed."""
        return any(part.tasks is not None and part.tasks.finished for part in tuple(self._running))

    def lose(self) -> None:
        """End the batch: its loop was closed."""
        with self._lock:
            lost = [*self._running]
            self._running.clear()
        for part in lost if self.taken else ():
            self.stop(part, cancellation(None), interrupted=not self.runner.place.streams)
        if lost:
            self._end()

    def _end(self) -> None:
        splitting, self._splitting = self._splitting, None
        # The error's traceback holds frames that hold this.
        error, self.failure = self.failure, None
        if splitting is None:
            self._source.not_begun(self.runner, error)
            return
        parts = [*self._parts, *splitting.failed_parts()]
        rest = [*self._failed, *splitting.waiting]
        replica_failed = error is not None and self.runner.is_replica_failure(error)
        lost: list[Request] = []
        interrupted = self._interrupted and not self._cancelled
        again = replica_failed or isinstance(error, WorkerLost) or interrupted
        if error is not None and again:
            lost = rest
        elif error is not None:
            parts.append(Part(rest, error=error))
        too_large = [*splitting.too_large, *self._too_large]
        if self._watch is not None:
            # Before the callers get their outcomes: the metrics must count them by then.
            self._watch.ended(parts, error)
        result = BatchResult(parts, lost, error, too_large, replica_failed)
        # Before the delivery, so that the worker takes its next batch: waking a loop takes longer.
        self._source.ended(self, result)
        try:
            deliver_soon(parts)
        finally:
            self._source.delivered()


class PartRun:
    """A part of a batch while it runs: one call of the function."""

    def __init__(self, batch: BatchRun, worker: Worker | None) -> None:
        self.batch = batch
        self.requests: list[Request] = []
        self.begun = False
        """Whether it has its first output."""
        self.went_on = False
        """Whether the next part was begun."""
        self.too_large = False
        """Whether it ran out of memory after its first output."""
        self.audience: Audience | None = None
        """Its callers, if the part is a stream, or can be cancelled or killed."""
        self.worker = worker
        """The worker that runs its steps."""
        self.steps: Steps[Any] | None = None
        """Its generator, on a worker."""
        self.tasks: Tasks | None = None
        """Its task, on an event loop."""
        self.started = False
        """Whether its task has begun: a task may be cancelled before that."""
        self.error: BaseException | None = None
        self.interrupted = False
        """Whether another party cancelled its task."""
        self.result: Part | None = None
        """The outputs, if it does not stream."""
        self._sent = 0
        """How many steps were delivered."""

    def send(self, outputs: Any, *, unbatched: bool) -> None:
        """Deliver the outputs of one step."""
        if self.audience is not None:
            self.audience.send()
        deliver_soon([Part(self.requests, outputs, unbatched, self._sent)])
        self._sent += 1

    def end(self) -> None:
        """End the part, with `error` or with all outputs."""
        # The error's traceback holds frames that hold this.
        error, self.error = self.error, None
        result, self.result = self.result, None
        streams = self.batch.runner.place.streams
        outcome: Part | None = None
        if self.tasks is not None and self.audience is not None and self.audience.gone:
            error = (
                None  # the task was cancelled because all callers left: no fault of the function
            )
        if error is None:
            outcome = result
            if streams and self.begun:
                outcome = Part(self.requests, [END] * len(self.requests), unbatched=True)
        elif streams and self.begun:
            failed_midway(error, len(self.requests))
            self.too_large = isinstance(error, torch.OutOfMemoryError)
            outcome = Part(self.requests, error=error)
        else:
            self.batch.stop(self, error, interrupted=self.interrupted)
        if self.audience is not None:
            self.audience.end()
        self.batch.go_on(self)
        self.batch.part_ended(self, outcome)


def cancellation(error: BaseException | None) -> RuntimeError:
    """The error for the callers if another party cancelled the task of their batch."""
    # The cancellation itself would look as if the callers were cancelled.
    return stand_in("a task that ran the batch was cancelled from outside", error)
