"""`StepRun`: the running batch of a continuous batcher, which ticks on one worker."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once, own_traceback
from .._base.tree import tensors
from ..errors import ExecutorShutdown, ReaderTooSlow, ServiceClosed, WorkerLost
from ..executor._call import Call
from ..executor._executor import DeviceExecutor
from ..executor._generators import END
from ..executor._worker import Worker, current_worker
from ..futures._wakeup import Waker
from ._observer import BatchWatch
from ._places import run_user_code
from ._replica import PoolReplica, ReplicaFailed
from ._request import PartOutcome, Request, streams_of
from ._runner import Runner
from ._settings import BatcherSettings
from ._step_batch import Joining, StepBatch, Ticked, tick, tick_on_replica
from ._stepper import AnyStepper
from ._streaming import StreamRequest

if TYPE_CHECKING:
    from ._continuous_scheduler import ContinuousScheduler


class StepRunner(Runner):
    """Runs the steps of one stepper, always on the same worker.

    Args:
        scheduler: Gives the requests.
        make: Makes the stepper, from the module of the replica if there is one.
        settings: The options of the batcher.
        executor: The executor of the worker.
        caller: The caller state (grad mode and so on) that the stepper runs under.
        replica: The replica whose module the stepper uses.
        replica_failed: Takes the replica out of service.
    """

    def __init__(
        self,
        scheduler: "ContinuousScheduler",
        make: Callable[..., AnyStepper],
        settings: BatcherSettings,
        executor: DeviceExecutor,
        caller: CallerState,
        replica: PoolReplica | None = None,
        replica_failed: Callable[[PoolReplica, BaseException], object] | None = None,
    ) -> None:
        super().__init__(executor, caller, replica, replica_failed)
        self.scheduler = scheduler
        self.worker: Worker | None = None if replica is None else replica.worker
        self.limit = settings.max_batch_size
        """The most requests in a batch: fewer after an out-of-memory error."""
        self.module = None if replica is None else replica.module
        """The module of the stepper. When the pool has new weights, another runner follows."""
        self.sends = not executor._dispatcher.workers[0].shares_memory
        """Whether items are sent to a host."""
        options = make, settings.max_batch_size, settings.max_batch_cost, self.sends
        self.steps = executor._dispatcher.keep(StepBatch(*options))

    @property
    def in_service(self) -> bool:
        return super().in_service and (self.replica is None or self.replica.module is self.module)

    @property
    def removed(self) -> bool:
        """Whether the executor has removed the worker of this runner."""
        return self.worker is not None and self.worker not in self.executor._dispatcher.pool.workers

    def start(self) -> None:
        run = self.batch = StepRun(self)
        run.begin()

    def tick(self, caller: CallerState, args: "TickArguments") -> Ticked:
        """One tick of the stepper, on the host of this thread's worker.

        Newcomers that cannot be sent to the host fail alone.
        """
        unsent: list[tuple[int, BaseException]] = []
        try:
            return self._tick(caller, args)
        except Exception as error:
            unsent = [] if isinstance(error, WorkerLost | ReplicaFailed) else self._unsent(args[2])
            if not unsent:
                raise
            known, left, joining, keys = args
            bad = dict(unsent)
            joining = [one for one in joining if one[0] not in bad]
            args = known, left, joining, [key for key in keys if key not in bad]
            ticked = self._tick(caller, args)
            ticked.ended += unsent
            return ticked
        finally:
            del args, unsent  # an error's traceback holds this frame

    def _unsent(self, joining: Sequence[Joining]) -> list[tuple[int, BaseException]]:
        """The newcomers that cannot be sent to the host, with their errors."""
        unsent: list[tuple[int, BaseException]] = []
        for key, *item in joining if self.sends else ():
            try:
                run_user_code(self.caller, _receive, (item,))
            except Exception as error:  # noqa: BLE001  # its caller gets it
                unsent.append((key, own_traceback(error)))
        return unsent

    def _tick(self, caller: CallerState, args: "TickArguments") -> Ticked:
        replica, module = self.replica, self.module
        if replica is None or module is None:
            ticked: Ticked = run_user_code(caller, tick, (self.steps, *args))
        elif replica.state == "closed":
            raise ServiceClosed("the pool was closed")
        else:
            arguments = self.steps, *args
            ticked = replica.run(module, caller, tick_on_replica, arguments, _failure_of)
            del arguments
        del args  # an error's traceback holds this frame
        if ticked.forgotten:
            raise WorkerLost("the worker was lost between two steps")
        return ticked


def _receive(_: object) -> None:
    """Do nothing, on the host."""


def _failure_of(ticked: Ticked) -> BaseException | None:
    return ticked.failure


class RunningRequest:
    """A request in a running batch: it waits for the parts of its own state.

    Args:
        run: The batch.
        key: The key of its state in the `StepBatch`.
        request: The request.
    """

    __slots__ = ("began", "key", "latest", "request", "run", "sent", "stalled")

    def __init__(self, run: "StepRun", key: int, request: Request) -> None:
        self.run = run
        self.key = key
        self.request = request
        produced = getattr(request, "produced", None)
        self.sent = 0 if produced is None else len(produced)
        """How many parts were sent."""
        self.began = monotonic()
        self.latest = 0.0
        """When the latest part was sent; 0.0: none yet."""
        self.stalled: float | None = None
        """The time since which the reader has no room; None: the reader has room."""

    def read(self, _: Request) -> None:
        """Note that the reader has read a part, and may have room again."""
        if self.stalled is not None:
            self.run.kick()

    def leave(self, _: Request) -> None:
        """Leave the batch: the caller does not wait any more."""
        self.run.leave(self)

    def may_step(self, now: float) -> bool:
        """Whether the request takes part in the next step: its reader has room."""
        if self.stalled is None and not self.request.has_room(self.sent):
            # Set before room is looked at again: a read after this line kicks the batch.
            self.stalled = now
        if self.stalled is not None:
            if not self.request.has_room(self.sent):
                return False
            self.stalled = None
        return True

    @property
    def joining(self) -> Joining:
        """What the stepper needs to start the state of this request."""
        return self.key, self.request.item, self.produced or None

    @property
    def can_restart(self) -> bool:
        """Whether the request may run again: from its start, or from the parts it has sent."""
        return not (self.sent and self.request.streams_outputs) or self.produced is not None

    @property
    def produced(self) -> list[Any] | None:
        """The parts so far, if the stepper can go on from these parts."""
        request = self.request
        return request.produced if isinstance(request, StreamRequest) else None


TickArguments: TypeAlias = tuple[int, list[int], list[Joining], list[int]]
"""The arguments of `StepBatch.tick` after the module."""

Delivery: TypeAlias = tuple[Request, Any, int, BaseException | None]
"""A request, its part or result, the number of the part, and None.

Or the request, the traceback of its error before any caller raised the error, 0, and the error.
"""


class StepRun:
    """The batch of a runner while it has requests: one tick after the other.

    A tick is one call on the worker. It stops the states of requests that have left, starts those
    of newcomers, and takes a step. The next tick is queued before the parts of this one are
    delivered. If a tick had nothing to do, the batch rests until a *kick*: a read that makes room,
    a request that leaves, or a newcomer. A kick leads to at most one tick, so that a newcomer
    without room does not keep the worker busy::

        made -- begin --> ticking -- nothing to do --> resting -- kick --> ticking
                          ticking -- no requests, or an error of the worker --> ended

    Only ticks change the batch, one at a time; they change the requests under the scheduler's lock.
    Any thread and the garbage collector may call `kick` and `leave`, so these take no lock.
    """

    too_large: Sequence[Sequence[Request]] = ()

    def __init__(self, runner: StepRunner) -> None:
        self.runner: StepRunner = runner
        self.scheduler = runner.scheduler
        self.running: dict[int, RunningRequest] = {}
        """The requests by their keys, the oldest first."""
        self.began = 0.0
        """When the present step began; 0.0 between steps."""
        self.held = 0.0
        """What the states hold."""
        self.full = False
        """Whether the batch has no room for the request that is next."""
        self._fresh = True
        self._left: deque[int] = deque()
        """The keys of requests that have left; some have ended since."""
        self._token: list[None] = []
        """Holds one element while the batch rests. The thread that pops it queues the next tick."""
        self._kicked = False
        self._cancelled = False
        self._broken: BaseException | None = None
        """A late error of a tick: the next tick raises it."""
        self._call: StepCall | None = None

    @property
    def requests(self) -> list[Request]:
        """The requests that run."""
        return [one.request for one in self.running.copy().values()]

    # From any thread.

    def begin(self) -> None:
        """Queue the first tick."""
        if self.runner.replica is not None:
            # A pool that lets go of the replica waits for the end of the batch.
            self.runner.replica.in_flight.try_acquire()
        self._put()

    def kick(self) -> None:
        """Let the batch look for work once more."""
        self._kicked = True  # before the token: `_rest` puts the token back, then reads this flag
        try:
            self._token.pop()
        except IndexError:
            return  # a tick is queued or runs
        self._put()

    def leave(self, one: RunningRequest) -> None:
        """Note that a caller does not wait any more."""
        if self.running.get(one.key) is not one:
            return  # its state has ended
        self._left.append(one.key)
        call = self._call
        others = [request for request in self.requests if request is not one.request]
        if call is not None and all(request.done for request in others):
            call.leave()  # `kill_after` may end a step on a host
        self.kick()

    def cancel(self) -> None:
        """Stop all states: no caller waits any more."""
        self._cancelled = True
        self.kick()

    def end_stalled(self, seconds: float) -> None:
        """Fail the streams whose readers have had no room for `seconds`."""
        if not (self.full or len(self.running) >= self.runner.limit or self.scheduler.closing):
            return  # the items that wait are about to join
        now = monotonic()
        for one in self.running.copy().values():
            if one.stalled is None or now - one.stalled < seconds:
                continue
            waker = one.request.awaiter.waker
            why = f"the caller has not read for {seconds:g} s, and its place is needed"
            waker.post(partial(one.request.fail_at_once, ReaderTooSlow(why)))
            if waker.finished:  # the loop was closed
                self.leave(one)

    def end_lost(self) -> None:
        """Do nothing: no part of the batch runs on an event loop."""

    def _put(self) -> None:
        call = self._call = StepCall(self)
        try:
            self.runner.executor._dispatcher.put(call, self.runner.worker)
        except RuntimeError as error:  # shut down, or no thread can start
            self.ended(False, (), WorkerLost(str(error)) if self.runner.removed else error)

    # On the worker.

    def tick(self, call: "StepCall") -> Sequence[Delivery]:
        """Take one step. Returns what the callers get."""
        try:
            # In a copy of the context, so that only the stepper sees what observers set there.
            self.runner.caller.context().run(self._tick, call)
            return call.deliveries
        finally:
            del self, call  # an error's traceback holds this frame

    def _tick(self, call: "StepCall") -> None:
        if self._broken is not None:
            raise self._broken
        self._kicked = call.left = False
        known = len(self.running)
        left, joined = self.scheduler.change(self, self._gone())
        now = monotonic()
        steps = [one for one in self.running.values() if one.may_step(now)]
        if not (left or joined or steps):
            return
        worker = self.runner.worker = current_worker()
        assert worker is not None  # noqa: S101  # ticks run on workers
        if worker.launches is not None:
            # On the device: the newcomers' work, then this step, then the callers' later work.
            call.streams = tuple(streams_of(self.requests))
            worker.launches.order(call.streams, tensors([one.request.item for one in joined]))
        arguments = known, left, [one.joining for one in joined], [one.key for one in steps]
        self._fresh = False
        watch = self._watch(steps, joined, now) if steps else None
        changed, size, self.began = bool(left or joined), len(steps), now
        del joined, steps  # an error's traceback holds this frame
        try:
            ticked = self._run(watch, size, arguments)
        except BaseException as error:
            if watch is not None:
                watch.ended(0, 0, error)
            raise
        finally:
            self.began = 0.0
            del arguments
        call.deliveries = self._handle(ticked, now, watch)
        if self.running and (changed or ticked.size or ticked.ended):
            call.goes_on = True
            self._put()
        ticked.clear()
        watch = None

    def _gone(self) -> list[RunningRequest]:
        """The requests that have left."""
        gone = [*self.running.values()] if self._cancelled else []
        while self._left:
            if (one := self.running.get(self._left.popleft())) is not None:
                gone.append(one)
        return gone

    def _watch(
        self,
        steps: Sequence[RunningRequest],
        joined: Sequence[RunningRequest],
        now: float,
    ) -> BatchWatch | None:
        observers = self.scheduler.observers.current
        if observers is None:
            return None
        items = [one.request for one in steps]
        newcomers = [one.request for one in joined]
        return self.runner.watch(observers, items, newcomers, now)

    def _run(self, watch: BatchWatch | None, size: int, arguments: TickArguments) -> Ticked:
        caller, observed = self.runner.caller, watch is not None and watch.observes_runs
        try:
            with watch.run(size) if watch is not None and observed else nullcontext():
                if observed:
                    caller = caller.with_context(copy_context())
                return self.runner.tick(caller, arguments)
        finally:
            del self, arguments

    def _handle(self, ticked: Ticked, began: float, watch: BatchWatch | None) -> list[Delivery]:
        """Note the result of a tick. Returns what the callers get."""
        now, deliveries, replica = monotonic(), list[Delivery](), self.runner.replica
        first_parts, gaps = self._time_parts(ticked, now)
        for key, part in ticked.parts:
            one = self.running[key]
            if one.request.streams_outputs:
                self._send(one, part, ticked.keeps_parts, deliveries)
        ended = [self.running[key] for key, _ in ticked.ended]
        for one, (_, end) in zip(ended, ticked.ended, strict=True):
            if isinstance(end, BaseException):
                if replica is not None:
                    add_note_once(end, f"in {replica.where}")
                deliveries.append((one.request, end.__traceback__, 0, end))
            elif not one.request.streams_outputs:
                deliveries.append((one.request, end.result, 0, None))
            else:
                if end.part is not None:
                    self._send(one, end.part, False, deliveries)
                deliveries.append((one.request, END, one.sent, None))
        refused = [(self.running[key], need) for key, need in ticked.refused]
        times = now - began, [now - request.arrived for request in first_parts], gaps
        self.scheduler.stepped(self, ended, refused, ticked, times)
        if watch is not None:
            errors = sum(isinstance(end, BaseException) for _, end in ticked.ended)
            watch.ended(len(ended) - errors, errors, None, first_parts, gaps)
        return deliveries

    def _time_parts(self, ticked: Ticked, now: float) -> tuple[list[Request], list[float]]:
        """The requests with their first part; for other requests, the seconds since their last."""
        first_parts, gaps = list[Request](), list[float]()
        for key in ticked.with_parts:
            one = self.running[key]
            if one.latest:
                gaps.append(now - one.latest)
            else:
                first_parts.append(one.request)
            one.latest = now
        return first_parts, gaps

    def _send(self, one: RunningRequest, part: Any, keep: bool, deliveries: list[Delivery]) -> None:
        request = one.request
        deliveries.append((request, part, one.sent, None))
        one.sent += 1
        if keep and isinstance(request, StreamRequest):
            if request.produced is None:
                request.produced = []
            request.produced.append(part)

    # At the end of a tick; from any thread.

    def ended(
        self, goes_on: bool, deliveries: Sequence[Delivery], error: BaseException | None
    ) -> None:
        """Deliver the parts of a tick, which are complete on the device.

        Args:
            goes_on: Whether the next tick is queued.
            deliveries: What the callers get.
            error: The error of the worker or of the device.
        """
        if error is None:
            error = self._broken  # a kernel of an earlier tick has failed
        if error is not None:
            deliveries = [(request, error.__traceback__, 0, error) for request, *_ in deliveries]
        deliver_parts(deliveries)
        if error is not None and goes_on:
            self._broken = error
        elif error is not None:
            self._fail(error)
        elif not goes_on:
            self._rest()

    def _rest(self) -> None:
        if not self.running:
            self._end([], [], None)
            return
        self._token.append(None)
        if self._kicked:
            self.kick()

    def _fail(self, error: BaseException) -> None:
        """End the batch: its worker, replica or device has failed."""
        running = [*self.running.values()]
        again = isinstance(error, WorkerLost) or self.runner.is_replica_failure(error)
        lost = [one.request for one in running if again and one.can_restart]
        rest = [one.request for one in running if not (again and one.can_restart)]
        shown = error
        if isinstance(error, ReplicaFailed):
            shown = error.__cause__ or WorkerLost("its replica was taken out of service")
        if again and self.runner.replica is None:
            self.runner.worker = None  # the next batch may run on any worker
        late = not (running or self._fresh or self.runner.is_replica_failure(error))
        # Its requests ended before this late error of the last step: it must not fail the queue.
        self._end([PartOutcome(rest, error=shown)], lost, None if late else error)
        self.running.clear()  # the requests refer to this batch

    def _end(
        self, outcomes: list[PartOutcome], lost: list[Request], error: BaseException | None
    ) -> None:
        if self.runner.replica is not None:
            self.runner.replica.in_flight.release()
        self.scheduler.ended(self, outcomes, lost, error)


class StepCall(Call[Any]):
    """A tick of a batch, as a call on a worker."""

    helpable = False
    internal = True
    goes_on = False
    """Whether the next tick is queued."""
    deliveries: Sequence[Delivery] = ()
    """What the callers get when the step is complete on the device."""

    def __init__(self, run: StepRun) -> None:
        super().__init__(run.tick, (self,), run.runner.caller)
        self._run: StepRun | None = run

    def finish(self) -> None:
        error, self.error, self.result = self.error, None, None
        self._ended(error)

    def cancel(self) -> None:
        if self.claim():
            self.drop()
            self._ended(ExecutorShutdown("the executor was shut down"))

    def _ended(self, error: BaseException | None) -> None:
        run, self._run = self._run, None  # the batch refers to its call
        deliveries, self.deliveries = self.deliveries, ()
        if run is not None:
            run.ended(self.goes_on, deliveries, error)


def deliver_parts(deliveries: Sequence[Delivery]) -> None:
    """Deliver parts and results to the callers, on their event loops; from any thread."""
    for waker in {request.awaiter.waker for request, *_ in deliveries}:
        waker.post(partial(_deliver, deliveries, waker))


def _deliver(deliveries: Sequence[Delivery], waker: Waker) -> None:
    """Deliver to the callers on the loop of `waker`; again if Ctrl-C interrupts it."""
    for request, part, step, error in deliveries:
        if request.awaiter.waker is not waker:
            continue
        if error is None:
            request.resolve(part, step)
        else:
            request.fail(error, part)
