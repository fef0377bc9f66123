"""How an executor, or a view of one, gives calls to its workers."""

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from typing import Any, NoReturn

import torch

from .._base.devices import (
    CallerStream,
    capture_side_streams,
    capture_streams,
    is_accelerator,
    supported_accelerator,
)
from .._base.forking import Registry, after_fork_in_child
from .._base.operator_threads import CoreShares
from ..errors import ExecutorShutdown
from ._backpressure import Admission, Grant
from ._call import Call
from ._gang import GangCall
from ._observer import ExecutorObserver, Observers
from ._shared_queue import SharedQueue
from ._worker import ThreadWorker, Worker, WorkerFactory, by_load, check_capability, current_worker
from ._worker_thread import current_server


class Drain:
    """Stops workers when what they have taken is done, and all that this has handed in itself.

    A call that was taken may fork, and those calls may fork in turn: a worker with nothing to do
    may still get some. So the workers are gone through in rounds. In a round each of them gets
    through all that it had before, also what waits. If no running call has handed in another
    meanwhile, nobody is left who could, and the workers are stopped.

    Args:
        workers: Those of the pool; the list may grow.
    """

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._again = False
        """Whether another round has to follow."""
        self._over = False
        self._closer: weakref.ref[Call[Any]] | None = None

    def begin(self) -> None:
        """Only calls that run hand in others from now on, and not the one that calls this."""
        call = _current_call()
        self._closer = None if call is None else weakref.ref(call)
        self._go_round()

    def end(self) -> None:
        """From now on running calls hand in no others either; the workers are to be stopped."""
        with self._lock:
            self._over = True

    def joins(self) -> bool:
        """Whether what the calling thread hands in is a part of a call that runs here.

        To be asked (again) when it is queued: who is through may have got it, so that another
        round has to follow. This one lasts until then, as the thread that asks is not through.
        """
        call = _current_call()
        if call is None or current_worker() not in self._workers:
            return False
        if self._closer is not None and self._closer() is call:
            return False
        with self._lock:
            self._again = True
            return not self._over

    def _go_round(self) -> None:
        with self._lock:
            self._again = False
        workers = tuple(self._workers)
        left = deque(range(len(workers)))

        def through() -> None:
            if left.pop() == 0:  # atomic: only the last one finds it
                self._went_round()

        for worker in workers:
            worker.when_through(through)

    def _went_round(self) -> None:
        with self._lock:
            again = self._again and not self._over
        if again:
            self._go_round()
        else:
            self.end()
            for worker in tuple(self._workers):
                worker.stop()


def _current_call() -> Call[Any] | None:
    """The call within which this is; what is called back when one has ended is in none."""
    server = current_server()
    return None if server is None else server.innermost


_pools: "Registry[WorkerPool]" = Registry()
# Apart from their pools: the threads of an executor that nobody closed outlive it.
_workers: Registry[Worker] = Registry()
_exiting = threading.Event()


class WorkerPool:
    """A fixed or growing set of workers; an executor and its views share one."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        *,
        max_pending: int | None,
        num_threads: int | None,
        thread_name_prefix: str,
        grows: bool,
        make_worker: WorkerFactory = ThreadWorker,
    ) -> None:
        self._make_worker = make_worker
        # These lists are only appended to, so that who holds one sees the pool grow.
        self.workers: list[Worker] = []
        self.default_workers: list[Worker] = []
        """Those for calls that ask for no device: not what a pool has grown on other devices."""
        self._devices = frozenset(devices)
        self._by_device: dict[torch.device, list[Worker]] = {}
        self.capture: Callable[[], tuple[CallerStream, ...]] | None = (
            capture_side_streams if supported_accelerator() is not None else None
        )
        """Captures the streams on which callers launch what its calls are to come after, if any."""
        self.closed = False
        self._drain = Drain(self.workers)
        self.admission = None if max_pending is None else Admission(max_pending)
        self._grows = grows
        # An executor that was given its workers runs its calls on those alone: never more of them
        # at once. Nobody counts those of the default one. (A token: threads outlive the pool.)
        self._owner = None if grows else object()
        self._forked = False
        self.thread_name_prefix = thread_name_prefix
        self._shares = CoreShares(num_threads)
        self._shared: dict[torch.device, SharedQueue] = {}
        self._only_queue: SharedQueue | None = None
        """The one that all workers share, if they do."""
        # Held while a gang is queued and while the pool grows or closes; never for a single call.
        self._lock = threading.Lock()
        self._observers: tuple[ExecutorObserver, ...] = ()
        for device in devices:
            self._add_worker(device)
        _pools.add(self)
        # One that is made so late could start no threads, or would leave them without an end.
        # Looked at only now: if the exit begins after that, it finds this pool.
        if _exiting.is_set():
            self.close(cancel_queued=True)

    def __del__(self) -> None:
        # Nobody can hand in calls any more: what is queued runs, then the threads end.
        if not self.closed:
            for worker in self.workers:
                worker.stop()

    def _add_worker(self, device: torch.device) -> None:
        repeat = len(self.workers_of(device))
        name = f"{self.thread_name_prefix}-{device}-{repeat}"
        alone = is_accelerator(device)
        shared = SharedQueue(device, self._owner) if alone else self._shared_queue(device)
        worker = self._make_worker(device, len(self.workers), name, self._shares, shared)
        worker.observer = self._observer()
        if alone:  # before a call may come to it
            self.capture = capture_streams
            for other in self.workers:  # made before torch knew of accelerators, perhaps
                other.expect_launches()
        one_queue = not alone and all(one.device == device for one in self.workers)
        # Its one worker runs whatever is in the shared queue, and no other will ever: a pool that
        # grows may have others by the time when a call is taken.
        self._one_worker = one_queue and not self.workers and not self._grows
        self._only_queue = shared if one_queue else None
        if one_queue:
            shared.only_worker = 0 if self._one_worker else None
        self.workers.append(worker)
        if device in self._devices:
            self.default_workers.append(worker)
        self.workers_of(device).append(worker)
        _workers.add(worker)

    def _shared_queue(self, device: torch.device) -> SharedQueue:
        if device not in self._shared:
            self._shared[device] = SharedQueue(device, self._owner)
            self._shared[device].observer = self._observer()
        return self._shared[device]

    def workers_of(self, device: torch.device) -> list[Worker]:
        """The workers of one device, in the order of their repeats."""
        return self._by_device.setdefault(device, [])

    def ensure(self, devices: Sequence[torch.device]) -> None:
        """Have a worker for every `(device, k-th repeat)`, if this pool may grow."""
        if not self._grows:
            return
        for device in dict.fromkeys(devices):
            wanted = devices.count(device)
            if len(self.workers_of(device)) < wanted:
                with self._lock:
                    self.check_open()  # one that came so late might never be stopped
                    while len(self.workers_of(device)) < wanted:
                        self._add_worker(device)

    def check_open(self) -> None:
        """Raise if no more calls are taken from who calls this."""
        if self._forked:
            raise ExecutorShutdown("the executor's threads stayed in the parent of this process")
        if self.closed and not self._drain.joins():
            raise ExecutorShutdown("cannot schedule new futures after shutdown")

    def put(self, call: Call[Any], workers: Sequence[Worker]) -> None:
        """Queue a call on the least loaded of `workers`; where that is one, on no other.

        Raises:
            ExecutorShutdown: The pool is closed.
            RuntimeError: No thread can be started for it. Whatever this raises, the call was
                dropped and will not run.
        """
        if self.closed:
            self._check_joins(call)
        queue = self._only_queue  # read once: the pool may grow meanwhile
        try:
            if queue is not None and (self._one_worker or len(workers) > 1):
                queue.put(call)  # whoever is free first takes it
            elif len(workers) == 1:
                workers[0].put(call)
            else:
                least_loaded(workers).offer(call)
        except BaseException as error:
            # Another worker may have found it in the queue, and runs it: then all is well.
            if _take_back(call) or not isinstance(error, RuntimeError):
                raise
        # Closed meanwhile? Then the worker may have read its last call before this one. Whoever
        # claims it first decides: the worker runs it, or it is taken back here.
        if self.closed:
            self._check_joins(call)

    def _put_for(self, call: Call[Any], worker: Worker) -> None:
        """Queue a call for one worker."""
        if self._one_worker:
            # One queue keeps the order of calls of all kinds, and to hand in a call there while the
            # worker is busy is no more than an append.
            worker.offer(call)
        else:
            worker.put(call)

    def _check_joins(self, call: Call[Any]) -> None:
        """Drop a call and raise, unless it is a part of one that runs here (or was claimed)."""
        if not self._drain.joins() and _take_back(call):
            self.check_open()

    def admit(self, call: Call[Any], workers: Sequence[Worker], admission: Admission) -> None:
        """Queue a call on the least loaded of `workers`, if this pool's `admission` has room.

        Raises:
            ExecutorShutdown: The pool is closed.
            QueueFull: No worker has room for another call.
        """
        # A call made by a call is exempt: if it had to wait for room, so might everybody.
        if current_worker() is not None:
            self.put(call, workers)
            return
        try:
            self.check_open()
            worker = admission.request_now(workers)
        except BaseException:
            _take_back(call)  # refused, it and its future would be a cycle that keeps its arguments
            raise
        admission.admit(call, worker)
        self.put(call, [worker])

    def admit_gang(self, calls: Sequence[Call[Any]], groups: Sequence[Sequence[Worker]]) -> None:
        """Queue calls that run at the same time, each on a distinct worker of its group.

        They are queued together, at once or as soon as there is room for all of them.
        """
        self.check_open()
        admission = self.admission
        if admission is None or current_worker() is not None:
            self._put_gang(calls, _distinct(groups))
            return

        def put(granted: Grant) -> None:
            for call, worker in zip(calls, granted.value(), strict=True):
                admission.admit(call, worker)
            self._put_gang(calls, granted.value())

        def put_late(granted: Grant) -> None:
            # Its members are cancelled if that fails, which is how who awaits them is told.
            with suppress(RuntimeError):
                if not granted.cancelled():
                    put(granted)

        granted = admission.request(groups)
        if granted.done():
            put(granted)
            return
        for call in calls:
            # Cancelled while it waits for room, the gang must not hold up those behind it.
            call.on_claimed = partial(admission.give_up, granted)
        granted.add_done_callback(put_late)

    def _put_gang(self, calls: Sequence[Call[Any]], workers: Sequence[Worker]) -> None:
        # Two gangs are queued in one order on all the workers that they share, so that neither
        # holds a worker that the other waits for.
        try:
            with self._lock:
                self.check_open()
                for call, worker in zip(calls, workers, strict=True):
                    self._put_for(call, worker)
                if self.closed:
                    self._drain.joins()  # again, now that they are queued
        except BaseException:  # closed, or no thread can be started for one of them
            for call in calls:
                call.cancel()
            raise

    def add_observer(self, observer: ExecutorObserver) -> None:
        """Tell `observer` of every call queued from now on."""
        with self._lock:
            self._observers += (observer,)
            self._tell_workers()

    def remove_observer(self, observer: ExecutorObserver) -> None:
        """Tell `observer` no more."""
        with self._lock:
            self._observers = tuple(seen for seen in self._observers if seen is not observer)
            self._tell_workers()

    @property
    def observed(self) -> bool:
        """Whether there are observers."""
        return bool(self._observers)

    def _tell_workers(self) -> None:
        for shared in self._shared.values():
            shared.observer = self._observer()
        for worker in self.workers:
            worker.observer = self._observer()

    def _observer(self) -> ExecutorObserver | None:
        return Observers(self._observers) if self._observers else None

    def close(self, *, cancel_queued: bool) -> None:
        """Take no more calls; workers end when what they have taken is done."""
        if self.admission is not None and not self._forked:
            self.admission.lift()  # a gang that waits for room was taken: it goes in
        with self._lock:
            first, self.closed = not self.closed, True
            if cancel_queued:
                # Under the lock, so that no gang comes in behind the workers' end, and the pool
                # grows by none that nobody stops.
                self._drain.end()
        if self._forked:
            return
        if cancel_queued:
            for worker in self.workers:
                worker.stop()
            for worker in self.workers:
                worker.cancel_queued()
        elif first:
            self._drain.begin()

    def join(self) -> None:
        """Wait until every worker has ended; called from inside of one, wait for none."""
        # Two calls that each waited for the other's worker to end would wait for ever.
        if not self._forked and current_worker() not in self.workers:
            for worker in self.workers:
                worker.join()

    async def ended(self) -> None:
        """Wait until every worker has ended; called from inside of one, wait for none."""
        if not self._forked and current_worker() not in self.workers:
            for worker in self.workers:
                await worker.ended

    @property
    def alive(self) -> bool:
        """Whether threads are there; called from inside of a worker, false."""
        return (
            not self._forked
            and current_worker() not in self.workers
            and any(worker.alive for worker in self.workers)
        )

    def forget_after_fork(self) -> None:
        """In a child process: the threads stayed in the parent."""
        self._lock = threading.Lock()
        self._forked = self.closed = True


def _take_back(call: Call[Any]) -> bool:
    """Drop a call that was or is to be queued; False if somebody has claimed it."""
    claimed = call.claim()
    if claimed:
        call.drop()
    return claimed


def least_loaded(workers: Sequence[Worker]) -> Worker:
    """The worker with the fewest calls queued and running; the calling one wins a tie."""
    best = workers[0]
    lowest = best.load
    if not lowest:
        return best
    for worker in workers[1:]:
        load = worker.load
        # A call made by a call is mostly waited for by it: on its own worker, the waiter itself
        # can run it, which spares a switch of threads.
        if load < lowest or (load == lowest and worker is current_worker()):
            if not load:
                return worker
            best, lowest = worker, load
    return best


def _distinct(groups: Sequence[Sequence[Worker]]) -> list[Worker]:
    """The least loaded worker of each group that no group before it has."""
    chosen: list[Worker] = []
    ranked: dict[int, Iterator[Worker]] = {}  # mostly all of them are one group: sorted once
    for group in groups:
        key = id(group)
        if key not in ranked:
            ranked[key] = iter(by_load(group))
        for worker in ranked[key]:
            if worker not in chosen:
                chosen.append(worker)
                break
    return chosen


def _close_at_exit() -> None:
    # A thread inside an operator when the interpreter goes down aborts the process: what is
    # queued is dropped, what runs is waited for.
    _exiting.set()
    for pool in _pools:
        pool.close(cancel_queued=True)
    workers = tuple(_workers)
    for worker in workers:
        worker.stop()
        worker.cancel_queued()
    for worker in workers:
        worker.join()


@after_fork_in_child
def _forget_after_fork() -> None:
    for pool in _pools:
        pool.forget_after_fork()
    _pools.clear()
    _workers.clear()


atexit.register(_close_at_exit)


class Dispatcher:
    """Some workers of a pool, or all of them, and what their executor wants of each call.

    Args:
        pool: Shared by an executor and its views.
        workers: Those that it has; None: all, also those that the pool grows by.
        synchronize: Whether a call has ended only when its result is complete on its accelerator.
    """

    __slots__ = ("default_workers", "pool", "synchronize", "workers")

    def __init__(
        self, pool: WorkerPool, workers: Sequence[Worker] | None = None, *, synchronize: bool
    ) -> None:
        self.pool = pool
        self.workers: Sequence[Worker] = pool.workers if workers is None else workers
        self.default_workers = (
            pool.default_workers if self.workers is pool.workers else self.workers
        )
        """Those that a call may run on which asks for no device."""
        self.synchronize = synchronize

    def __reduce__(self) -> NoReturn:
        raise TypeError("the threads of an executor can be neither pickled nor copied")

    @property
    def observed(self) -> bool:
        """Whether somebody is told of its calls."""
        return self.pool.observed

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each worker."""
        return tuple(worker.device for worker in self.workers)

    # Views.

    def on_device(self, device: torch.device) -> "Dispatcher":
        """One for the workers on `device`.

        Raises:
            ValueError: There are none.
        """
        self.pool.ensure([device])
        workers = self.workers_on(device)
        self._check_enough(1, workers, device)
        return Dispatcher(self.pool, workers, synchronize=self.synchronize)

    def on_worker(self, worker: Worker) -> "Dispatcher":
        """One for `worker` alone, which is one of these."""
        return Dispatcher(self.pool, (worker,), synchronize=self.synchronize)

    def with_synchronize(self, synchronize: bool) -> "Dispatcher":
        """One for the same workers."""
        return Dispatcher(self.pool, self.workers, synchronize=synchronize)

    def workers_on(self, device: torch.device) -> Sequence[Worker]:
        """Those on `device`, there may be none."""
        if self.workers is self.pool.workers:
            return self.pool.workers_of(device)
        mine = [worker for worker in self.workers if worker.device == device]
        # A view on a device grows with its pool.
        return self.workers if len(mine) == len(self.workers) else mine

    def groups_for(self, count: int) -> list[Sequence[Worker]]:
        """The workers that each of `count` calls at once may run on.

        Raises:
            ValueError: There are too few.
        """
        self.ensure(count)
        self._check_enough(count, self.default_workers)
        return [self.default_workers] * count

    def groups_on(self, devices: Sequence[torch.device]) -> list[Sequence[Worker]]:
        """The workers that each of some calls at once may run on, the i-th on the i-th device.

        Raises:
            ValueError: There are too few on a device.
        """
        self.pool.ensure(devices)
        groups = {device: self.workers_on(device) for device in dict.fromkeys(devices)}
        for device, group in groups.items():
            self._check_enough(devices.count(device), group, device)
        return [groups[device] for device in devices]

    def ensure(self, count: int) -> None:
        """Have so many workers, on the devices that there are, if the pool may grow."""
        devices = dict.fromkeys(worker.device for worker in self.default_workers)
        self.pool.ensure([*islice(cycle(devices), count)])

    def _check_enough(
        self, wanted: int, workers: Sequence[Worker], device: torch.device | None = None
    ) -> None:
        if wanted <= len(workers):
            return
        where = "" if device is None else f" on {device}"
        found = f"its workers are on {', '.join(map(str, self.devices))}"
        if not workers:
            raise ValueError(f"the executor has no worker{where}: {found}")
        raise ValueError(
            f"{wanted} calls at once{where} need {wanted} workers there, but the executor has "
            f"{len(workers)}: {found}"
        )

    # Calls.

    def prepare(self, call: Call[Any]) -> None:
        """Give a call what the executor wants of it."""
        if not self.synchronize:
            call.synchronize = False

    def put(self, call: Call[Any], worker: Worker | None = None) -> None:
        """Queue a call that has its caller's state, past `max_pending`; for `worker` alone."""
        if not self.synchronize:
            call.synchronize = False
        self.pool.put(call, self.default_workers if worker is None else [worker])

    def submit_gang(
        self, members: Sequence[GangCall[Any]], groups: Sequence[Sequence[Worker]]
    ) -> None:
        """Queue the members of a gang, the i-th on a worker of the i-th group."""
        if len(members) > 1:
            for group in groups:
                check_capability(group, "meetings", "calls that run at the same time")
        for member in members:
            self.prepare(member)
        try:
            self.pool.admit_gang(members, groups)
        except BaseException:
            # Not queued, they would hold their arguments in the cycle that a queued call is.
            for member in members:
                member.cancel()
            raise

    def follow(self, call: Call[Any]) -> bool:
        """Run such a call next on this thread's worker, whose call is ending; whether it will be.

        It will not where others wait there, nor on an accelerator, where calls end on a thread of
        their own: then it is to be queued.
        """
        worker = current_worker()
        if worker is None or worker not in self.workers or self.pool.closed:
            return False
        return worker.follow(call)
