"""`BaseBatcher`: how callers use a batcher: put items in, get outcomes, open and close."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Sequence
from functools import partial
from math import isfinite
from time import monotonic
from typing import Any, Generic, Self, TypeAlias
from weakref import WeakMethod

from .._base.arguments import (
    as_int,
    as_number,
    check_instance,
    check_int,
    check_number,
    check_timeout,
    short_repr,
    shown_as,
)
from .._base.devices import CallerStream, capture_streams
from .._base.forking import ReentrantLock
from .._base.thread_state import CallerState, check_no_transform
from ..errors import DeadlineExceeded, ReplicaUnavailable, ServiceClosed
from ..executor._executor import DeviceExecutor
from ..executor._loop_tasks import Repeating, call_later
from ..executor._observer import Observers
from ..futures._future import thread_hooks
from ..futures._waiting import cancel_scope, heeding_ctrl_c
from ..futures._wakeup import awaiter_here, delivered, ki_protected
from ._inferred import In_contra, Out_co
from ._observer import BatchObserver, all_batchers
from ._queue import RequestGroup
from ._replica import PoolReplica
from ._replica_pool import ReplicaPool
from ._request import Request
from ._runner import Runner
from ._scheduler import Scheduler
from ._settings import BatcherSettings, FunctionKind, condition, name_for
from ._stats import BatcherStats
from ._streaming import OutputStream, StreamRequest

_CLOSED = "the batcher was closed before there was a result"

Streams: TypeAlias = tuple[CallerStream, ...]


class BaseBatcher(Generic[In_contra, Out_co]):
    """What `Batcher` and `ContinuousBatcher` have in common: callers, opening and closing.

    Args:
        named: The function, the stepper or the pool, for the default name.
        name: The name in metrics and traces. None: that of `named`.
        pool: The pool that runs the batches, if there is one.
        kind: How the batches run.
        settings: The checked options.
    """

    name: str
    pool: ReplicaPool[Any] | None
    """The pool that runs the batches, if there is one."""
    _replicas: Sequence[PoolReplica] | None = None
    """The replicas of the runners, empty without a pool; None while the batcher is not open."""

    def __init__(
        self,
        named: object,
        name: str | None,
        pool: ReplicaPool[Any] | None,
        kind: FunctionKind,
        settings: BatcherSettings,
    ) -> None:
        self.name = pool.name if pool is not None and name is None else name_for(named, name)
        self.pool = pool
        self._kind = kind
        self._settings = settings
        self._caller = CallerState()
        self._observers: Observers[BatchObserver] = Observers(all_batchers, self.name)
        self._scheduler = self._new_scheduler()
        self._opening = ReentrantLock()

    def _new_scheduler(self) -> Scheduler:
        raise NotImplementedError

    def _make_runners(self, replicas: Sequence[PoolReplica]) -> list[Runner]:
        """Make the runners, for these replicas if there is a pool."""
        raise NotImplementedError

    @property
    def _listener(self) -> WeakMethod[Callable[[], None]]:
        """What the pool calls when replicas come or go, or have new weights."""
        return WeakMethod(self._scheduler.runners_changed)

    def _follow(self, pool: ReplicaPool[Any]) -> None:
        """Listen to the pool until the batcher is closed."""
        listeners, listener = pool._listeners, self._listener
        if listener not in listeners:
            listeners.add(listener)
            self._scheduler.drained.add_done_callback(lambda _: listeners.discard(listener))

    @short_repr
    def __repr__(self) -> str:
        state = condition(self._scheduler.closing, self._opened, self.ready)
        return f"{self.name!r}, {len(self._scheduler)} waiting, {state}"

    def _called(
        self, item: Any, timeout: float | None, priority: int
    ) -> Coroutine[Any, Any, Out_co]:
        """The coroutine of `await batcher(item)`."""
        check_no_transform()
        # Captured now, because a task may begin the coroutine later.
        streams = capture_streams()
        called = self._call(item, timeout, priority, streams)
        return shown_as(called, f"{type(self).__name__}.__call__")

    @ki_protected
    async def _call(
        self,
        item: Any,
        timeout: float | None,  # noqa: ASYNC109  # a deadline, in the queue too
        priority: int,
        streams: Streams,
    ) -> Any:
        timeout, priority = self._checked(timeout, priority)
        awaiter = awaiter_here()
        if awaiter is None:
            # `aiopar.wait` drives this coroutine, in a worker or in a program without a loop.
            if self.pool is not None:
                await self._open()  # raises, because a pool needs a loop that goes on
            return run_in_own_loop(self._call(item, timeout, priority, streams))
        scheduler = self._scheduler
        request = Request(item, awaiter, scheduler.group)
        scheduler.submit(request)
        try:
            if not self._opened:
                scheduler, timeout = await self._open_for(request, timeout)
            self._queue(scheduler, request, timeout, priority, streams)
            # The loop may run inside a call on the worker that the batch needs.
            thread_hooks.about_to_block()
            await awaiter
            output = request.unwrap()
        except GeneratorExit:
            self._leave_soon(request)
            raise
        except BaseException as error:
            self._leave(request, error)
            raise
        else:
            self._leave(request, None)
            return output
        finally:
            # An error's traceback holds this frame; the request and its awaiter may hold the error.
            del request, awaiter

    def _queue(
        self,
        scheduler: Scheduler,
        request: Request,
        timeout: float | None,
        priority: int,
        streams: Streams,
    ) -> None:
        """Queue a request."""
        settings = self._settings
        request.priority = priority
        try:
            # The user's functions are called here, and what they return is checked: the queue
            # compares costs under its lock.
            if settings.batch_key is not None:
                request.group = _group_of(scheduler, settings.batch_key(request.item))
            if settings.cost is not None:
                request.cost = _checked_cost(settings.cost(request.item))
        finally:
            self._tell_observers(request)  # also if the key or the cost failed
        request.streams = streams
        if timeout is None:
            scheduler.put(request)
        else:
            request.deadline = request.arrived + timeout
            scheduler.put(request)
            request.cancel_at_end(call_later(timeout, partial(self._expire, request)))

    def _tell_observers(self, request: Request) -> None:
        observers = self._scheduler.observers.current
        if observers is not None:
            observers.tell("enqueue", request)
            request.at_end = (*request.at_end, partial(observers.tell, "completed", request))

    def _checked(
        self,
        timeout: float | None,
        priority: int,
    ) -> tuple[float | None, int]:
        if priority != 0:
            priority = as_int("priority", priority)
        if timeout is None:
            return self._settings.timeout, priority
        # A negative timeout is allowed, because the caller's own deadline may have passed.
        timeout = as_number("timeout", timeout)
        return 0.0 if timeout < 0 else check_number("timeout", timeout, zero=True), priority

    async def _open_for(
        self,
        request: Request,
        timeout: float | None,  # noqa: ASYNC109
    ) -> tuple[Scheduler, float | None]:
        """Open the batcher, which may take long; return its scheduler and the rest of `timeout`."""
        try:
            with cancel_scope(timeout) as scope:
                scheduler = await self._open()
            if scope.cancelled_caught:
                request.outcome = "expired"
                raise DeadlineExceeded(f"the batcher was not open after {timeout:.3g} s")
        except BaseException as error:
            self._tell_observers(request)
            if isinstance(error, ServiceClosed):
                request.refused = "closed"
            elif isinstance(error, ReplicaUnavailable):
                request.refused = "unavailable"
            raise
        now = monotonic()
        if timeout is not None:
            timeout = max(0.0, timeout - (now - request.arrived))
        request.arrived = now
        if request.group is not scheduler.group:  # closed and opened again meanwhile
            request.group = scheduler.group
            scheduler.submit(request)
        return scheduler, timeout

    def _expire(self, request: Request) -> None:
        # The place in the queue is free before the caller gets the error.
        request.skipped = self._scheduler.discard(request) or request.skipped
        request.expire()

    def _leave_soon(self, request: Request) -> None:
        """End `request`, whose coroutine was closed, perhaps by the garbage collector.

        This thread may hold any lock, so the request leaves the queue later, on its loop.
        """
        request.abandon()
        leave = partial(self._leave, request, GeneratorExit())
        request.awaiter.waker.post(leave)
        if request.awaiter.waker.finished:  # the loop was closed
            leave()

    def _leave(self, request: Request, error: BaseException | None) -> None:
        """End `request`: its caller has the output, or leaves because of `error`."""
        if error is not None or request.streams_outputs:
            request.abandon()
            self._scheduler.discard(request)
        at_end, request.at_end = request.at_end, ()
        for end in at_end:
            end(error)

    def _streamed(
        self, item: Any, timeout: float | None, priority: int, buffer: int
    ) -> OutputStream[Any]:
        """The parts of `item`: what `stream` returns."""
        check_no_transform()
        timeout, priority = self._checked(timeout, priority)
        buffer = check_int("buffer", buffer, at_least=1)
        streams = capture_streams()
        begin = partial(self._begin_stream, item, timeout, priority, buffer, streams)
        return OutputStream(begin, self._leave)

    @ki_protected
    async def _begin_stream(
        self,
        item: Any,
        timeout: float | None,  # noqa: ASYNC109  # a deadline, in the queue too
        priority: int,
        buffer: int,
        streams: Streams,
    ) -> StreamRequest:
        awaiter = awaiter_here()
        if awaiter is None:
            raise RuntimeError("a stream is read in an event loop, and none runs here")
        scheduler = self._scheduler
        request = StreamRequest(item, awaiter, scheduler.group, buffer)
        scheduler.submit(request)
        try:
            if not self._opened:
                scheduler, timeout = await self._open_for(request, timeout)
            self._queue(scheduler, request, timeout, priority, streams)
        except GeneratorExit:
            self._leave_soon(request)
            raise
        except BaseException as error:
            self._leave(request, error)
            raise
        return request

    @property
    def _opened(self) -> bool:
        """Whether the batcher has runners for the present replicas of its pool."""
        replicas, pool = self._replicas, self.pool
        return replicas is not None and (pool is None or replicas is pool._replicas)

    @ki_protected
    async def _open(self) -> Scheduler:
        if self._scheduler.closing:
            raise ServiceClosed("the batcher is closed")
        if self.pool is not None:
            await self.pool._open_for(frozenset(self._settings.batch_sizes or ()))
        with self._opening:  # the first calls may come from several loops, in several threads
            if not self._opened:
                replicas = () if self.pool is None else self.pool._replicas
                self._scheduler.use_runners(self._make_runners(replicas))
                self._replicas = replicas
            return self._scheduler

    @property
    def ready(self) -> bool:
        """Whether the batcher takes items: it is open, not closing, and a replica is in service."""
        return self._opened and self._scheduler.in_service and not self._scheduler.closing

    def stats(self) -> BatcherStats:
        """Return the statistics of this moment."""
        return self._scheduler.stats()

    @property
    def _seconds_busy(self) -> float:
        """The shortest time for which a replica or runner has run its present batch or step."""
        if self.pool is not None:
            return self.pool._seconds_busy
        now, runners = monotonic(), self._scheduler.runners
        began = [batch.began or now for one in runners if (batch := one.batch) is not None]
        return now - max(began, default=now) if len(began) == len(runners) else 0.0

    @property
    def _executors(self) -> list[DeviceExecutor]:
        """The executors of its runners, for metrics."""
        return [runner.executor for runner in self._scheduler.runners]

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called since the batcher was opened."""
        return self._scheduler.closing

    @property
    def alive(self) -> bool:
        """Whether the batcher can ever serve again in this process."""
        return self.pool is None or self.pool.alive

    def add_observer(self, observer: BatchObserver) -> None:
        """Tell `observer` of every item and every batch from now on.

        Raises:
            TypeError: `observer` is not a `BatchObserver`.
        """
        check_instance("observer", observer, BatchObserver)
        self._observers.add(observer)

    def remove_observer(self, observer: BatchObserver) -> None:
        """Stop telling `observer`; nothing happens if it was not added."""
        self._observers.remove(observer)

    @ki_protected
    async def aclose(
        self,
        *,
        drain: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  # the batcher has work after the timeout
    ) -> None:
        """Refuse new items and wait for the items that are there. It may be called again.

        `async with` opens the batcher again.

        Args:
            drain: Run the waiting items, and let streams go on to their end. A stream that nobody
                reads ends after `read_timeout`. False: callers of waiting items and of streams
                get `ServiceClosed`, and so do all callers of a `ContinuousBatcher`.
            timeout: Seconds until all callers that still wait get `ServiceClosed`. Coroutines are
                then cancelled and awaited; a call on a worker (a batch, or a step) runs to its
                end. If `aclose` is cancelled, the same happens at once.
        """
        timeout = check_timeout(timeout)
        scheduler, listener = self._scheduler, self._listener
        if drain:
            scheduler.close()
        else:
            scheduler.close(error=ServiceClosed(_CLOSED), running=self._kind.streams)
        may_wait = self._kind.on_loop  # False in a coroutine that is being closed
        stall_check = Repeating(self._settings.read_timeout, scheduler.end_stalled)
        try:
            with cancel_scope(timeout), heeding_ctrl_c():
                await scheduler.drained
                await delivered()  # posted outcomes reach the callers first
                # The callback of `drained` may still run. Another task may have opened it again.
                if self.pool is not None and self._scheduler is scheduler:
                    self.pool._listeners.discard(listener)
        except GeneratorExit:
            may_wait = False
            raise
        finally:
            stall_check.cancel()
            if not scheduler.drained.done():
                scheduler.close(error=ServiceClosed(_CLOSED), running=True)
                if may_wait:
                    with cancel_scope(shield=True):
                        await scheduler.drained

    async def __aenter__(self) -> Self:
        closed = self._scheduler
        if closed.closing:
            closed.close()  # ends the batches of event loops that were closed meanwhile
            await closed.drained
            with self._opening:
                if self._scheduler is closed:  # else another task has made it new
                    self._replicas = None  # first: a new scheduler is not open yet
                    self._scheduler = self._new_scheduler()
        await self._open()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        await self.aclose(drain=exc_type is None)


def _group_of(scheduler: Scheduler, key: Hashable) -> RequestGroup:
    try:
        hash(key)
    except TypeError:
        raise TypeError(
            f"batch_key must return what can be hashed, not {type(key).__name__}"
        ) from None
    return scheduler.group_of(key)


def _checked_cost(cost: float) -> float:
    try:
        finite = isfinite(cost)
    except TypeError:
        raise TypeError(f"cost must return a number, not {type(cost).__name__}") from None
    if not finite or cost < 0:
        raise ValueError(f"cost must be finite and at least 0, got {cost}")
    return float(cost)


def run_in_own_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run `coroutine` on an event loop made for it; blocks."""
    # With a factory, the thread keeps the loop that `asyncio.set_event_loop` has set for it.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        outcome, error = runner.run(_outcome(coroutine))
    if error is None:
        return outcome
    try:
        raise error
    finally:
        # Its traceback holds this frame.
        del error, coroutine


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, Exception | None]:
    # The error is returned: if it were raised here, its traceback would hold frames of the runner,
    # which hold the task that holds the error.
    try:
        return await coroutine, None
    except Exception as error:  # noqa: BLE001  # the caller gets every error
        return None, error
    finally:
        del coroutine
