"""The workers of an executor: which one gets a call, how the pool grows, drains and ends."""

import atexit
import enum
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from typing import Any, NoReturn, TypeVar

import torch

from .._base.destructors import destructor
from .._base.devices import is_accelerator
from .._base.forking import ReentrantLock, Registry, after_fork_in_child, live_methods
from .._base.operator_threads import CoreShares
from ..errors import ExecutorShutdown
from ..futures._waiting import at_second_ctrl_c
from ..futures._wakeup import ki_protected
from ._backpressure import Admission, Grant
from ._call import Call, CallQueue
from ._gang import GangCall
from ._observer import CallInfo, CallWatch, ExecutorObserver, Observers, all_executors
from ._worker import Worker, current_call, current_worker, least_loaded
from ._worker_thread import ThreadWorker

T = TypeVar("T")

_pools: "Registry[WorkerPool]" = Registry()
# Kept apart from `_pools`: threads of an executor that was never closed outlive its pool.
_workers: Registry[Worker] = Registry()
_exiting = threading.Event()


class _PoolState(enum.IntEnum):
    """The states of a pool. Each state takes fewer calls than the states before it.

    OPEN --> CLOSING --> DRAINED     and, in a forked child, FORKED from each of them
    """

    OPEN = 0
    CLOSING = 1
    """It takes calls from its running calls only; it is drained when all workers are idle."""
    DRAINED = 2
    """It takes no calls, and its workers end."""
    FORKED = 3
    """Its threads stayed in the parent process."""


class WorkerPool:
    """The workers that an executor and its views share: one for each of `devices`.

    A pool that `grows` (the default executor's) adds workers when calls ask for more. See
    `DeviceExecutor` for the other arguments; `make_worker` makes workers of another kind.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        *,
        max_pending: int | None = None,
        num_threads: int | None = None,
        thread_name_prefix: str = "aiopar",
        grows: bool = False,
        make_worker: Callable[..., Worker] = ThreadWorker,
    ) -> None:
        # Views hold these lists, so they see workers that come and go.
        self.workers: list[Worker] = []
        self.default_workers = self.workers
        """The workers of calls that ask for no device: those on `devices`."""
        self._state = _PoolState.OPEN
        self.admission = None if max_pending is None else Admission(max_pending)
        self.observers: Observers[ExecutorObserver] = Observers(all_executors)
        self.thread_name_prefix = thread_name_prefix
        self.by_device: defaultdict[torch.device, list[Worker]] = defaultdict(list)
        """The workers of each device, in the order in which they were added."""
        self._shares = CoreShares(num_threads)
        self._make_worker = partial(make_worker, shares=self._shares)
        # An executor with fixed workers runs its calls on them only. Any worker may help with calls
        # of the default executor. (A token: threads may outlive the pool.)
        self._owner = None if grows else object()
        self._shared: dict[torch.device, CallQueue] = {}
        """The queue that the workers of a device share; a worker of an accelerator shares none."""
        self._common_queue: CallQueue | None = None
        """The queue that all workers share; None if they are not all on one CPU device."""
        # Held while a gang is queued and while the pool grows or closes; not for a single call.
        # Re-entrant: the garbage collector may run meanwhile, and drop a call or close a generator.
        self._lock = ReentrantLock()
        self._gangs: deque[tuple[Sequence[Call[Any]], Sequence[Worker]]] = deque()
        """The gang that is being queued, and those that came meanwhile."""
        self._made = 0
        self.followers: set[weakref.WeakMethod[Callable[[], Awaitable[None]]]] = set()
        """Awaited after workers were added or removed."""
        for device in devices:
            self._add_worker(device)
        if grows:
            self.default_workers = self.workers.copy()
        _pools.add(self)
        # At exit no threads may start, because nothing would end them. This check comes after the
        # registration: an exit that begins later finds this pool.
        if _exiting.is_set():
            self.close(cancel_queued=True)

    def equalize_shares(self) -> None:
        """Let the operators of CPU workers use the same number of threads in every call."""
        self._shares.equalize(sum(not is_accelerator(one.device) for one in self.workers))

    @destructor
    def __del__(self) -> None:
        # No call can be submitted any more: queued calls run, then the threads end.
        if not self.closed:
            for worker in self.workers:
                worker.stop()

    @property
    def closed(self) -> bool:
        """Whether it takes no calls, except from its running calls."""
        return self._state is not _PoolState.OPEN

    def _add_worker(self, device: torch.device) -> None:
        siblings = self.by_device[device]
        name = f"{self.thread_name_prefix}-{device}-{len(siblings)}"
        accelerator = is_accelerator(device)
        queues = [CallQueue(device, self._owner)]
        if not accelerator:  # a worker of an accelerator has a stream of its own
            queues.append(self._shared.setdefault(device, CallQueue(device, self._owner)))
        worker = self._make_worker(device, self._made, name, queues=tuple(queues))
        self._made += 1
        worker.on_idle = self._stop_if_drained if self.closed else None
        if accelerator:
            for other in self.workers:  # perhaps made before torch knew the accelerator
                other.expect_launches()
        only_device = all(one.device == device for one in self.workers)
        self._common_queue = self._shared.get(device) if only_device else None
        self.workers.append(worker)
        defaults = self.default_workers
        if defaults is not self.workers and any(one.device == device for one in defaults):
            defaults.append(worker)
        siblings.append(worker)
        _workers.add(worker)

    def ensure(self, devices: Sequence[torch.device]) -> None:
        """Have as many workers on a device as `devices` names it, if this pool may grow."""
        for device in dict.fromkeys(devices) if self._owner is None else ():
            siblings, wanted = self.by_device[device], devices.count(device)
            if len(siblings) < wanted:
                with self._lock:
                    self.check_open()  # a worker added later would never be stopped
                    while len(siblings) < wanted:
                        self._add_worker(device)

    def add(self, devices: Sequence[torch.device]) -> list[Worker]:
        """Add a worker for each of `devices`, unless the pool is closed."""
        with self._lock:
            self.check_open()
            for device in devices:
                self._add_worker(device)
            return self.workers[len(self.workers) - len(devices) :]

    def remove(self, workers: Sequence[Worker]) -> None:
        """Give `workers` no more calls. The caller stops them when their users have left."""
        with self._lock:
            for worker in workers:
                for held in (self.workers, self.default_workers, self.by_device[worker.device]):
                    if worker in held:
                        held.remove(worker)
                if not self.by_device[worker.device]:
                    self._shared.pop(worker.device, None)  # the last worker empties the queue
        for worker in workers:
            worker.leave()
        if self.admission is not None:
            self.admission.remove(workers)

    async def tell_followers(self) -> None:
        """Wait until every follower has looked at the workers."""
        for follow in live_methods(self.followers):
            await follow()

    # Calls.

    @ki_protected
    def put(self, call: Call[Any], workers: Sequence[Worker]) -> None:
        """Queue a call on the least loaded of `workers`, without regard to `max_pending`.

        If this raises (closed, or no thread can be started), the call was dropped.
        """
        if self._state:
            self._take_back_if_closed(call)
        try:
            self._queue(call, workers)
        except BaseException as error:
            # Another worker may have taken the call from the queue: then the call runs.
            if _take_back(call) or not isinstance(error, RuntimeError):
                raise
        # If the pool was closed meanwhile, the worker may have ended without a look at this call.
        if self._state:
            self._take_back_if_closed(call)

    def _queue(self, call: Call[Any], workers: Sequence[Worker]) -> None:
        chosen: Worker | CallQueue
        if len(workers) == 1:
            chosen = workers[0]
        elif (common := self._common_queue) is not None:  # read once: the pool may grow meanwhile
            chosen = common  # the first worker that is free takes the call
        else:
            worker = least_loaded(workers)
            assert worker is not None  # noqa: S101  # no executor is without workers
            shared = self._shared.get(worker.device)
            call.movable = shared is None
            chosen = worker if shared is None else shared
        observers = self.observers.current
        if observers is not None:
            fn = call.fn  # read once: a member of a gang may be cancelled at any moment
            if fn is not None:
                index = None if isinstance(chosen, CallQueue) else chosen.index
                call.watch = CallWatch(observers, CallInfo(fn, chosen.device, index))
        chosen.put(call)

    @property
    def _bound(self) -> Admission | None:
        """What bounds the calls of the calling code; None: no bound."""
        # A call made by a running call is exempt: otherwise all running calls might wait for room.
        return None if current_worker() is not None else self.admission

    def submit(self, call: Call[Any], workers: Sequence[Worker]) -> None:
        """Queue a call on the least loaded of `workers` that has room, or raise `QueueFull`."""
        admission = self._bound
        if admission is not None:
            try:
                self.check_open()
                workers = [admission.request_now(workers)]
            except BaseException:
                _take_back(call)  # the call and its future are a cycle, which keeps the arguments
                raise
            admission.admit(call, workers[0])
        self.put(call, workers)

    async def put_when_room(self, call: Call[Any], workers: Sequence[Worker]) -> None:
        """Queue a call on the least loaded of `workers` that has room, as soon as one has."""
        admission = self._bound
        if admission is None:
            self.put(call, workers)
            return
        self.check_open()
        grant = admission.request([workers])
        try:
            [worker] = await grant
        except BaseException:
            if not admission.give_up(grant):  # granted and cancelled at once: nobody uses the room
                admission.leave(grant.value()[0])
            raise
        admission.admit(call, worker)
        self.put(call, [worker])

    @ki_protected
    def put_gang(self, calls: Sequence[Call[Any]], groups: Sequence[Sequence[Worker]]) -> None:
        """Queue a gang, each call on a distinct worker of its group, when all calls have room."""
        self.check_open()
        admission = self._bound
        if admission is None:
            chosen: list[Worker] = []
            for group in groups:
                worker = least_loaded(group, without=chosen)
                assert worker is not None  # noqa: S101  # `Dispatcher` has counted them
                chosen.append(worker)
            self._put_together(calls, chosen)
            return

        def put(granted: Grant) -> None:
            for call, worker in zip(calls, granted.value(), strict=True):
                admission.admit(call, worker)
            self._put_together(calls, granted.value())

        def put_late(granted: Grant) -> None:
            # If this fails, the members were cancelled, which tells their waiters.
            with suppress(RuntimeError):
                if not granted.cancelled():
                    put(granted)

        granted = admission.request(groups)
        if granted.done():
            put(granted)
            return
        for call in calls:
            # A gang that is cancelled while it waits for room must not hold up later requests.
            call.on_claimed = partial(admission.give_up, granted)
        granted.add_done_callback(put_late)

    def _put_together(self, calls: Sequence[Call[Any]], workers: Sequence[Worker]) -> None:
        # Under the lock: two gangs have the same order in every queue that they share. So neither
        # gang holds a worker that the other gang waits for.
        with self._lock:
            gang = calls, workers
            self._gangs.append(gang)
            if self._gangs[0] is not gang:  # a destructor has interrupted this thread
                return
            try:
                self._queue_gang(calls, workers)
            finally:
                del self._gangs[0]
                while self._gangs:
                    # If this fails, the members were cancelled, which tells their waiters.
                    with suppress(RuntimeError):
                        self._queue_gang(*self._gangs[0])
                    del self._gangs[0]

    def _queue_gang(self, calls: Sequence[Call[Any]], workers: Sequence[Worker]) -> None:
        try:
            # While the pool closes, gangs that waited for room are queued: they were accepted.
            if self._state >= _PoolState.DRAINED:
                self.check_open()
            for call, worker in zip(calls, workers, strict=True):
                self._queue(call, [worker])
        except BaseException:  # closed, or no thread can be started for one of them
            for call in calls:
                call.cancel()
            raise

    # The end. A pool that closes lets its running calls submit others (`fork`, ...), which may
    # submit others in turn. It stops its workers when all of them are idle.

    @property
    def open(self) -> bool:
        """Whether the calling code may submit calls."""
        in_call = current_call() is not None and current_worker() in self.workers
        return not self.closed or (in_call and self._state is _PoolState.CLOSING)

    def check_open(self) -> None:
        """Raise `ExecutorShutdown` if the calling code may not submit calls any more."""
        if self.closed:
            with self._lock:
                if self._state is _PoolState.FORKED:
                    raise ExecutorShutdown("the executor's threads stayed in the parent process")
                if not self.open:
                    raise ExecutorShutdown("cannot schedule new futures after shutdown")

    def _take_back_if_closed(self, call: Call[Any]) -> None:
        """Drop a call and raise, unless a running call submits it, or it was claimed already."""
        with self._lock:  # see `_stop_if_drained`
            taken = self.open
        if not taken and _take_back(call):
            self.check_open()

    @ki_protected
    def close(self, *, cancel_queued: bool) -> None:
        """Take no more calls, except from running calls; the workers end when all are idle.

        `cancel_queued`: take no calls from running calls either, and cancel queued calls.
        """
        with self._lock:
            # With the lock: no gang is queued, and no worker added, after the workers were stopped.
            first = not self.closed
            wanted = _PoolState.DRAINED if cancel_queued else _PoolState.CLOSING
            self._state = max(self._state, wanted)
        if self._state is _PoolState.FORKED:
            return
        if self.admission is not None:
            self.admission.lift()  # a gang that waits for room was accepted, and is queued now
        if cancel_queued:
            for worker in self.workers:
                worker.stop()
            for worker in self.workers:
                worker.cancel_queued()
        elif first:
            for worker in self.workers:
                worker.on_idle = self._stop_if_drained
            self._stop_if_drained()

    def _stop_if_drained(self) -> None:
        """Stop the workers if no call runs, and none is queued."""
        # A running call takes this lock after it has queued another call (`put`), and before it
        # ends. So this check finds one of the two.
        with self._lock:
            queued = any(shared.calls for shared in self._shared.values())
            if queued or not all(worker.idle for worker in self.workers):
                return
            self._state = _PoolState.DRAINED
        for worker in self.workers:
            worker.on_idle = None
            worker.stop()

    @property
    def _to_await(self) -> Sequence[Worker]:
        """The workers whose end the calling code may await: none inside a call of one of them."""
        # Two calls that waited for the end of each other's worker would wait forever.
        inside = self._state is _PoolState.FORKED or current_worker() in self.workers
        return () if inside else self.workers

    def join(self) -> None:
        """Block until the workers have ended."""
        for worker in self._to_await:
            worker.join()

    async def ended(self) -> None:
        """Wait until the workers have ended."""
        for worker in self._to_await:
            await worker.ended

    @property
    def alive(self) -> bool:
        """Whether threads of the workers run; inside a call of one of them, False."""
        return any(worker.alive for worker in self._to_await)


def _take_back(call: Call[Any]) -> bool:
    """Drop a call before or after it was queued; False if it was claimed already."""
    claimed = call.claim()
    if claimed:
        call.drop()
    return claimed


def _kill_hosts() -> None:
    """Kill the hosts that run calls; drop the queued calls of executors that are being closed."""
    for pool in _pools:
        if pool.closed:
            pool.close(cancel_queued=True)
    for worker in _workers:
        worker.kill()


at_second_ctrl_c.append(_kill_hosts)


@atexit.register
def _close_at_exit() -> None:
    # Queued calls run, as in `concurrent.futures`. All threads are awaited: a thread that is inside
    # an operator when the interpreter ends aborts the process.
    ended: set[WorkerPool] = set()
    try:
        if getattr(sys, "last_type", None) is KeyboardInterrupt:  # it has ended the program
            for worker in _workers:
                worker.kill(left_only=True)
        while pools := {*_pools} - ended:
            # The default executor last: calls of other executors may use it.
            for pool in sorted(pools, key=lambda pool: pool._owner is None):
                pool.close(cancel_queued=False)
                pool.join()
            ended |= pools
        for worker in _workers:
            worker.stop()
            worker.join()
    finally:  # Ctrl-C drops queued calls; running calls of threads are still awaited
        _exiting.set()
        for pool in _pools:
            pool.close(cancel_queued=True)
        for worker in _workers:
            worker.stop()
            worker.cancel_queued()
            worker.kill()
        for worker in _workers:
            worker.join()


@after_fork_in_child
def _forget_after_fork() -> None:
    for pool in _pools:
        pool._state = _PoolState.FORKED
    _pools.clear()
    _workers.clear()


class Dispatcher:
    """The workers that one executor or view uses, and how its calls are queued.

    Without `workers` it has all workers of the pool, also those that the pool adds later.
    """

    __slots__ = ("default_workers", "pool", "synchronize", "workers")

    def __init__(
        self, pool: WorkerPool, workers: Sequence[Worker] | None = None, *, synchronize: bool = True
    ) -> None:
        self.pool = pool
        self.workers: Sequence[Worker] = pool.workers if workers is None else workers
        everything = self.workers is pool.workers
        self.default_workers = pool.default_workers if everything else self.workers
        self.synchronize = synchronize
        if not synchronize:
            self.check_shares_memory("synchronize=False", "its results are always complete")

    def __reduce__(self) -> NoReturn:
        raise TypeError("the threads of an executor can be neither pickled nor copied")

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each worker."""
        return tuple(worker.device for worker in self.workers)

    def workers_on(self, device: torch.device) -> Sequence[Worker]:
        """The workers on `device`; there may be none."""
        if self.workers is self.pool.workers:
            return self.pool.by_device[device]
        mine = [worker for worker in self.workers if worker.device == device]
        # If all match, return the list itself, which grows with the pool.
        return self.workers if len(mine) == len(self.workers) else mine

    def groups_for(self, count: int) -> list[Sequence[Worker]]:
        """The workers that may run each of `count` calls at once; ValueError: too few workers."""
        self.ensure(count)
        self._check_enough(count, self.default_workers)
        return [self.default_workers] * count

    def groups_on(self, devices: Sequence[torch.device]) -> list[Sequence[Worker]]:
        """The workers that may run each of several calls at once, the i-th on the i-th device."""
        self.pool.ensure(devices)
        groups = {device: self.workers_on(device) for device in dict.fromkeys(devices)}
        for device, group in groups.items():
            self._check_enough(devices.count(device), group, device)
        return [groups[device] for device in devices]

    def ensure(self, count: int) -> None:
        """Have `count` workers, on the present devices, if the pool may grow."""
        devices = dict.fromkeys(worker.device for worker in self.default_workers)
        self.pool.ensure([*islice(cycle(devices), count)])

    def _check_enough(
        self, wanted: int, workers: Sequence[Worker], device: torch.device | None = None
    ) -> None:
        count, where = len(workers), "" if device is None else f" on {device}"
        if wanted > count:
            found = f"its workers are on {', '.join(map(str, self.devices))}"
            if not count:
                raise ValueError(f"the executor has no worker{where}: {found}")
            raise ValueError(
                f"{wanted} calls at once{where} need {wanted} workers there, but the executor has "
                f"{count}: {found}"
            )

    @property
    def shares_memory(self) -> bool:
        """Whether calls see the caller's own modules and tensors, not copies on hosts."""
        return all(worker.shares_memory for worker in self.workers)

    def check_shares_memory(self, what: str, instead: str) -> None:
        """Raise `NotImplementedError`, which says what to do `instead`, if calls run on hosts."""
        if not self.shares_memory:
            where = f"worker {self.workers[0].label}"
            raise NotImplementedError(f"{what} cannot run on {where}: {instead}")

    def keep(self, value: T, *, replica: bool = False) -> T:
        """See `Worker.keep`."""
        return self.workers[0].keep(value, replica=replica)

    def prepare(self, call: Call[Any]) -> None:
        """Set the options of the executor on a call."""
        if not self.synchronize:
            call.synchronize = False

    def put(self, call: Call[Any], worker: Worker | None = None) -> None:
        """Queue a call without regard to `max_pending`, on `worker` if that is given."""
        self.prepare(call)
        self.pool.put(call, self.default_workers if worker is None else [worker])

    def submit_gang(
        self, members: Sequence[GangCall[Any]], groups: Sequence[Sequence[Worker]]
    ) -> None:
        """Queue the members of a gang, the i-th on a worker of the i-th group."""
        for member in members:
            self.prepare(member)
        try:
            self.pool.put_gang(members, groups)
        except BaseException:
            # A member and its future are a cycle until the member is cancelled.
            for member in members:
                member.cancel()
            raise
