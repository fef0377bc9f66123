"""Where batches run, one at a time: a worker that takes the next batch by itself."""

from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import Any, TypeAlias

from .._call import TokenCall
from .._caller import CallerState
from .._devices import is_device_error
from .._error_handling import own_traceback
from .._errors import ExecutorShutdown, ReplicaFailed
from .._executor import DeviceExecutor
from .._server import launches_here
from .._tree import tensors
from .._worker import Worker, current_worker
from ._compute import Compute
from ._observer import BatchInfo, BatchObservers, BatchWatch, watched_run
from ._part import Part, deliver_soon
from ._replica import PoolReplica
from ._request import Request, streams_of
from ._schedule import Schedule
from ._splitting import Splitting

_BRIEF = 0.001
"""Seconds that a batch may take to make, for the outcomes of the one before to wait for it."""


class WorkerRunner:
    """One place where batches run: a function on any worker, or one replica on its own.

    The worker itself takes a batch when it comes to it, as late as can be: what is urgent by then
    is in it, and who has gone is not. When it has run, the next is asked for at once; the event
    loop has no part in it.

    Args:
        schedule: Gives it batches.
        executor: On whose workers, or worker, it runs.
        compute: Runs the items of a batch.
        caller: The state it runs them under.
        replica: The one it is for, if any.
        replica_failed: Takes that one out of service.
    """

    def __init__(
        self,
        schedule: Schedule,
        executor: DeviceExecutor,
        compute: Compute,
        caller: CallerState,
        replica: PoolReplica | None = None,
        replica_failed: Callable[[PoolReplica, BaseException], object] | None = None,
    ) -> None:
        self.replica = replica
        self._replica_failed = replica_failed
        self.began = 0.0
        """When its last batch began, by `time.monotonic`."""
        self._schedule = schedule
        self.executor = executor
        self._dispatcher = executor._dispatcher
        self._compute = compute
        self._caller = caller
        self.batch: Sequence[Request] = ()
        """What it has taken and not ended."""
        self._watch: BatchWatch | None = None
        self._held: list[Part] = []
        """What the batch before has come to, and nobody has been told yet."""
        self._brief = False
        """Whether the next batch is made so soon that this can wait for it."""
        self._took = False
        """Whether its run came so far as to take a batch."""

    @property
    def in_service(self) -> bool:
        """Whether it can run a batch."""
        return self.replica is None or self.replica.in_service

    def fail(self, error: BaseException) -> None:
        """Its replica has failed: take it out of service."""
        if self._replica_failed is not None and self.replica is not None:
            self._replica_failed(self.replica, error)

    def cancel(self) -> None:
        """Nothing: what runs on a worker cannot be interrupted."""

    def start(self) -> None:
        """Run the next batch, on a worker that is free."""
        self._took = False
        self.put(self.run, self.ended, self.refused)

    def put(
        self, fn: "Work", ended: "Ended", refused: "Refused", worker: Worker | None = None
    ) -> None:
        """Have a `Run` made of these on a worker, on that one if it is given."""
        self._put(Run(fn, self._caller, ended, refused), worker)

    def _put(self, run: "Run", worker: Worker | None) -> None:
        try:
            self._dispatcher.put(run, worker)
        except RuntimeError as error:  # shut down, or there can be no more threads for now
            run.refused(error)

    def refused(self, error: RuntimeError) -> None:
        """The executor was shut down before the run began, or has no thread for it."""
        self._schedule.refused(self, error)

    def run(self, call: "Run") -> list[Part]:
        """On the worker: take a batch, and compute it."""
        self._took = True  # first: what fails from here on is no other batch's
        batch = self._schedule.take(self)
        self.began = monotonic()
        if not batch:
            return []
        splitting = Splitting(batch)
        part: Sequence[Request] = ()
        try:
            call.take_streams(batch)
            observers = self._schedule.observers
            if observers is not None:
                self._deliver_held()  # they may take long
                self._watch = self._observed(observers, batch)
            for part in splitting:
                self._run_part(part, splitting)
            for part in splitting.too_large:
                self._schedule.out_of_memory(part)
            return splitting.parts
        finally:
            # Whoever keeps an error keeps the frames in which it was raised, and those below them:
            # there must be nothing there of the others in the batch.
            del batch, splitting, part

    def _observed(self, observers: BatchObservers, batch: list[Request]) -> BatchWatch:
        worker = current_worker()
        device = None if worker is None else worker.device
        replica = None if self.replica is None else self.replica.index
        return BatchWatch(observers, BatchInfo(batch, device, replica, self.began))

    def _run_part(self, part: list[Request], splitting: Splitting) -> None:
        try:
            with watched_run(self._watch, len(part)):
                outputs, unbatched = self._compute(
                    self._collated([request.item for request in part]),
                    len(part),
                    again=splitting.again,
                )
        except Exception as error:
            if isinstance(error, ReplicaFailed) or is_device_error(error):
                raise  # no item's fault, and nothing more can be computed here
            splitting.failed(part, own_traceback(error))
        else:
            splitting.succeeded(part, outputs, unbatched=unbatched)
        finally:
            del part, splitting

    def _collated(self, items: list[Any]) -> Any:
        began = perf_counter()
        try:
            return self._compute.collate(items)
        finally:
            self._brief = self._compute.builtin_collate and perf_counter() - began < _BRIEF
            self._deliver_held()
            del items

    def ended(self, parts: list[Part] | None, error: BaseException | None) -> None:
        """What was computed is complete on the device; from any thread."""
        self._deliver_held()  # by no means is it kept for longer than one batch
        if error is not None and not self._took:
            # The device's, say, before it began. It is that of the batch which was to come: left in
            # the queue, that would have the next run fail likewise, and so on without an end.
            self._schedule.take(self)
        batch, self.batch = self.batch, ()
        watch, self._watch = self._watch, None
        lost: BaseException | None = None
        if error is not None:
            if isinstance(error, ReplicaFailed) or (self.replica and is_device_error(error)):
                lost = error
            else:
                # A kernel's, which came late, or one that only ends threads: everybody's.
                parts = [Part(batch, error=error)]
        if watch is not None:
            # Before anybody gets an outcome, so that who has one finds it in the metrics.
            watch.ended(parts or [], error)
        if lost is not None:
            self._schedule.lost(self, batch, lost)
            return
        # First of all, so that a worker goes on: to wake the loop takes longer.
        if self._schedule.ended(self, batch, parts or []):
            self._go_on(parts or [])
            return
        try:
            deliver_soon(parts or [])
        finally:
            self._schedule.told()

    def _go_on(self, parts: list[Part]) -> None:
        """Run the next batch, which is to deliver what this one has come to.

        A loop that is woken now takes the interpreter from this worker, and keeps it until all of
        the batch, and all that its callers ask next, is seen to: about as long as it takes to make
        the next batch, for which the interpreter is needed. So that comes first, and the loop has
        its turn while the function computes, which needs it less.

        Not where code of the user's makes the batch, which might take long, or wait for what is to
        be delivered; nor where it took long the last time: the items are large then.
        """
        run = Run(self.run, self._caller, self.ended, self.refused)
        self._took = False
        # Both before: if an observer blocks this thread, another may have run the batch by then.
        held = self._brief
        if held:
            self._held = parts
        follows = self._dispatcher.follow(run)
        if follows and held:
            return
        if not follows:
            self._held = []
        try:
            # Before another worker may run the next, which may be the last of all.
            deliver_soon(parts)
        finally:
            if not follows:
                self._put(run, None)

    def _deliver_held(self) -> None:
        held, self._held = self._held, []
        if held:
            deliver_soon(held)


class Run(TokenCall[list[Part]]):
    """Work of a runner, as a call on a worker.

    Args:
        fn: The work, called with this run.
        caller: The state it is done under.
        ended: Called with what came of it, or with None and its error, when that is complete on
            the device.
        refused: Called instead when the executor was shut down before it began.
    """

    helpable = False

    def __init__(self, fn: "Work", caller: CallerState, ended: "Ended", refused: "Refused") -> None:
        super().__init__(fn, (self,), caller)
        self._ended = ended
        self.refused = refused

    def take_streams(self, batch: Sequence[Request]) -> None:
        """Order what follows after what the callers had launched, and before what they launch."""
        launches = launches_here()
        try:
            if launches is not None:
                self.streams = tuple(streams_of(batch))
                launches.order(self.streams, tensors([request.item for request in batch]))
        finally:
            del batch  # as in `WorkerRunner.run`

    def finish(self) -> None:
        parts, self.result = self.result, None
        error, self.error = self.error, None
        self._ended(parts, error)

    def cancel(self) -> None:
        if self.claim():
            self.drop()
            self.refused(ExecutorShutdown("the executor was shut down"))


Work: TypeAlias = Callable[[Run], list[Part]]
Ended: TypeAlias = Callable[[list[Part] | None, BaseException | None], object]
Refused: TypeAlias = Callable[[RuntimeError], object]
