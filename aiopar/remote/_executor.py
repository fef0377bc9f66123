"""`HostExecutor`: an executor whose calls run on hosts, and its workers."""

import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any, TypeVar

import torch

from .._base.arguments import check_int, check_timeout
from .._base.devices import is_device_error
from .._base.thread_state import CallerState
from .._base.tracebacks import in_words, logger
from ..errors import ExecutorShutdown, WorkerLost
from ..executor._call import AwaitedCall, Call, FutureCall
from ..executor._executor import DeviceExecutor, await_call
from ..executor._gang import on_host
from ..executor._pool import Dispatcher, WorkerPool
from ..executor._worker import Worker, WorkerStats, current_call
from ..executor._worker_thread import ThreadWorker
from ..futures._semaphore import Semaphore
from ..futures._waiting import cancel_scope
from ._host import Host, Task, check_no_gradients, portable_state
from ._wire import Kept

T = TypeVar("T")


class HostWorker(ThreadWorker):
    """A worker whose thread sends each call to a host, and waits for the result.

    `slot` makes the slot of its host. The host is started at once, in the background. The other
    arguments are those of `ThreadWorker`.
    """

    shares_memory = False

    def __init__(self, *args: Any, slot: "Callable[[HostWorker], HostSlot]", **kwargs: Any) -> None:
        self.slot = slot(self)
        super().__init__(*args, **kwargs)
        # A host may import the program, and so make the program's executor once more. That executor
        # must not start hosts in turn, unless a task calls it.
        if not on_host():
            self.slot.warm_up()

    def open_stream(self) -> torch.Stream | None:
        return None  # streams are the host's

    @property
    def label(self) -> str:
        return f"{self.slot.kind}:{self.slot.number}/{self.device}"

    @property
    def ready(self) -> bool:
        return self.slot.host is not None

    def keep(self, value: T, *, replica: bool = False) -> T:
        if isinstance(value, Kept):
            return value.again()  # type: ignore[return-value]  # a `Kept` stands for a T
        return Kept(value, replica, self.slot.pack)  # type: ignore[return-value]

    def put(self, call: Call[Any]) -> None:
        if self.stopping:
            raise ExecutorShutdown(f"worker {self.label} was removed")
        super().put(call)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        state: CallerState,
    ) -> Any:
        result: Any = None
        try:
            shares = self.shares
            threads = 0 if shares is None else shares.share(shares.sharing)
            check_no_gradients(fn, state)
            task = Task(fn, args, kwargs, portable_state(state), threads)
            succeeded, result = self.slot.call(task)
            if not succeeded:
                raise result
            return result
        finally:
            # An error's traceback holds this frame.
            del fn, args, kwargs, state, result
            task = None  # type: ignore[assignment]

    def kill(self, *, left_only: bool = False) -> None:
        thread = self.thread
        call = None if thread is None else thread.innermost
        if not left_only or (call is not None and call.left):
            self.slot.kill()

    def _all_ended(self) -> None:
        self.cancel_queued()  # calls that came while the worker stopped
        try:
            self.slot.close()
        finally:
            super()._all_ended()

    def stats(self) -> WorkerStats:
        stats, slot = super().stats(), self.slot
        host = slot.host
        info = None if host is None else host.info
        return replace(stats, completed=max(0, stats.completed - slot.starts), host=info)


class HostSlot:
    """The host of one worker. A host that is lost is started again.

    Args:
        worker: The worker.
        start: Starts the host of a slot, or connects to it; blocks.
        pack: See `Kept`.
        kill_after: A running call whose caller has left may go on for so many seconds. Then its
            host is killed and replaced. None: the call may go on for ever.
        per_host: How many workers share a host: so many calls are on their way to it at once.
    """

    # State     host  _killed
    # cold      None  False    the next call, or the queued warm-up, starts a host
    # starting  new   False    `Host.open` waits
    # running   open  False    if the host or its device is lost: cold again
    # killed    any   True     calls raise `WorkerLost`; no other host is started

    kind = "process"
    """The first word of the worker's label."""

    def __init__(
        self,
        worker: HostWorker,
        *,
        start: "Callable[[Any], Host]",
        pack: Callable[[Any], tuple[str, Any]],
        kill_after: float | None,
        per_host: int,
    ) -> None:
        self.worker = worker
        self.pack = pack
        self.per_host = per_host
        self.host: Host | None = None
        self.starts = 0  # how many calls of the worker only started the host
        self._start_host = start
        self._kill_after = kill_after
        # Held while the host is started, used or ended. The worker may have two threads that run
        # calls: the first waits for other calls.
        self._lock = threading.Lock()
        self._killed = False

    @property
    def number(self) -> int:
        """The number of the host in its executor."""
        return self.worker.index // self.per_host

    @property
    def seed(self) -> int:
        """The seed of the host, its own; after `torch.manual_seed` it is the same in all runs."""
        return (torch.initial_seed() + self.number) % 2**63

    @property
    def closing(self) -> bool:
        """Whether the executor is being closed, or the worker was removed."""
        return self.worker.stopping or self.worker.on_idle is not None

    def warm_up(self) -> None:
        """Start the host in the background, if there is none."""
        call = FutureCall(self._try_to_start, ())  # nobody waits for it
        call.helpable, call.internal = False, True
        with suppress(ExecutorShutdown):
            self.worker.put(call)

    def _try_to_start(self) -> None:
        try:
            self.start()
        except WorkerLost:
            pass  # the next call starts it
        except Exception as error:  # noqa: BLE001  # the next call raises it
            logger.error("worker %s cannot start: %s", self.worker.label, in_words(error))

    def start(self) -> None:
        """Start the host, if there is none; on a thread of the worker."""
        self.starts += 1
        with self._lock:
            self._running_host()

    def _running_host(self) -> Host:
        if self._killed:
            raise WorkerLost(f"worker {self.worker.label} was stopped", may_have_run=False)
        if self.host is None:
            host = self.host = self._start_host(self)
            try:
                if self._killed:  # since the check above; `kill` has found no host
                    host.kill()
                host.open()
            except BaseException:
                self._end(host)
                raise
        return self.host

    def call(self, task: Task) -> tuple[bool, Any]:
        """What `Host.call` returns. If the host was lost before, a new host runs the task."""
        call = current_call()
        try:
            with self._lock:
                try:
                    return self._call_once(task, call)
                except WorkerLost as error:
                    if error.may_have_run or self._killed or (call is not None and call.left):
                        raise
                    return self._call_once(task, call)
        finally:
            del task, call  # an error's traceback holds this frame

    def _call_once(self, task: Task, call: Call[Any] | None) -> tuple[bool, Any]:
        host, seconds = self._running_host(), self._kill_after
        try:
            if call is None or seconds is None:
                succeeded, result = host.call(task)
            else:
                with _bounded(host, call, seconds, self.worker.label):
                    succeeded, result = host.call(task)
            if succeeded or not is_device_error(result):
                return succeeded, result
            # A process cannot get a lost device back, but a new process can.
            message = f"worker {self.worker.label} has lost its device; its call may have run"
            raise WorkerLost(message) from result
        except WorkerLost:
            self._end(host)
            if not self._killed:
                self.warm_up()
            raise
        finally:
            del task, call  # an error's traceback holds this frame

    def _end(self, host: Host) -> None:
        self.host = None
        host.kill()
        host.close()

    def kill(self) -> None:
        """Kill the host if a call runs there; without replacement if the executor is closing."""
        # Set before `host` is read: else a host that starts meanwhile would live on.
        self._killed = self._killed or self.closing
        host = self.host  # read once: the worker's thread may be replacing it
        if host is not None and self._lock.locked():  # else it is idle
            host.kill()

    def close(self) -> None:
        """End the host, after the last call."""
        with self._lock:
            host, self.host, self._killed = self.host, None, True
        if host is not None:
            host.close()


@contextmanager
def _bounded(host: Host, call: Call[Any], seconds: float, label: str) -> Iterator[None]:
    """In the block, kill `host` when the caller of `call` has left for so many seconds."""
    running = [host]  # `pop` is atomic: either the call ends, or its host is killed
    ended = threading.Event()

    def start_clock() -> None:
        # The garbage collector may call this when it closes the caller's coroutine. So this must
        # take no locks. (`Thread.start` does.)
        start_new_thread(kill_late, ())

    def kill_late() -> None:
        if not ended.wait(min(seconds, threading.TIMEOUT_MAX)):
            with suppress(IndexError):
                late = running.pop()
                logger.warning(
                    "worker %s: a call is ended, %g s after its caller has left", label, seconds
                )
                late.kill_call()

    call.on_left = start_clock
    try:
        if call.left:
            start_clock()
        yield
    finally:
        call.on_left = None
        running.clear()
        ended.set()
        del call  # it holds the error, whose traceback holds this frame


class HostExecutor(DeviceExecutor):
    """What `ProcessExecutor` and `RayExecutor` share: one worker for each of `devices`.

    `slot` makes the slot of a worker. `options` are those of `DeviceExecutor`.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        slot: Callable[..., HostSlot],
        *,
        worker: type[HostWorker] = HostWorker,
        per_host: int = 1,
        kill_after: float | None,
        **options: Any,
    ) -> None:
        kill_after = check_timeout(kill_after, "kill_after")
        slot = partial(slot, kill_after=kill_after, per_host=per_host)
        pool = WorkerPool(devices, make_worker=partial(worker, slot=slot), **options)
        self._dispatcher = Dispatcher(pool, synchronize=True)
        self._devices = devices
        self._per_host = per_host
        self._resizing = Semaphore(1)

    async def resize(self, count: int) -> None:
        """Have `count` processes or actors: start some more, or end some; calls go on meanwhile.

        No call is lost: a worker that goes runs the calls that are queued for it alone, and the
        other workers run the rest. A `ReplicaPool` that was made without `devices` gets a replica
        on each new worker; every pool lets go of the replicas on workers that go.

        Raises:
            TypeError: `count` is no int.
            ValueError: It is below 1.
            ExecutorShutdown: A `RuntimeError`: the executor is shut down.
            Exception: A process or actor could not be started; then none was added.
        """
        count = check_int("count", count, at_least=1) * self._per_host
        pool = self._dispatcher.pool
        async with self._resizing:
            extra = max(0, count - len(pool.workers))
            devices = [*islice(cycle(self._devices), len(pool.workers), len(pool.workers) + extra)]
            added, going = pool.add(devices), pool.workers[count:]
            try:
                for worker in added:
                    assert isinstance(worker, HostWorker)  # noqa: S101  # the pool makes no others
                    call = AwaitedCall(worker.slot.start, ())
                    call.internal = True
                    await await_call(call, pool, [worker], abandon_on_cancel=False)
                if added:
                    await pool.tell_followers()
            except BaseException:
                await self._let_go(added)
                raise
            if going:
                await self._let_go(going)

    async def _let_go(self, workers: Sequence[Worker]) -> None:
        """Remove workers: their replicas leave their pools, then they run their queued calls."""
        pool = self._dispatcher.pool
        pool.remove(workers)
        with cancel_scope(shield=True):
            await pool.tell_followers()
            for worker in workers:
                worker.stop()
            for worker in workers:
                await worker.ended

    async def aclose(
        self,
        *,
        drain: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  # the hosts are killed after it
    ) -> None:
        """Drain: take no more calls, run the queued ones, and wait until all hosts have ended.

        Args:
            drain: Whether to run the queued calls. If False, they are cancelled.
            timeout: After so many seconds the hosts are killed: calls that still run raise
                `WorkerLost`. None: never.
        """
        timeout, pool = check_timeout(timeout), self._dispatcher.pool

        def kill() -> None:
            for worker in pool.workers:
                worker.kill()

        timer = threading.Timer(timeout or 0, kill)
        timer.daemon = True
        pool.close(cancel_queued=not drain)  # first: then no killed host is replaced
        if timeout is not None:
            timer.start()
        try:
            await super().aclose(drain=drain)
        finally:
            timer.cancel()
