"""`DeviceExecutor`: workers for every device, awaited from one event loop."""

import asyncio
import concurrent.futures
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel
import torch

from .._base.arguments import (
    as_int,
    as_list,
    check_bound,
    check_callable,
    check_instance,
    check_int,
    check_timeout,
    listed,
    returns_coroutine,
    short_repr,
)
from .._base.devices import Device, default_devices, parse_device, parse_devices
from .._base.thread_state import CallerState
from .._base.tracebacks import awaitable_error
from ..futures._future import Future, thread_hooks
from ..futures._waiting import cancel_scope, close_fully, heeding_ctrl_c, look_for_ctrl_c
from ..futures._wakeup import awaiter_here, in_event_loop, ki_protected
from ._call import AwaitedCall, FutureCall
from ._gang import Gang, GangCall
from ._generators import Iteration
from ._observer import ExecutorObserver
from ._pool import Dispatcher, WorkerPool
from ._worker import Worker, WorkerStats, least_loaded

T = TypeVar("T")


@ki_protected
async def await_call(
    call: AwaitedCall[T], pool: WorkerPool, workers: Sequence[Worker], abandon_on_cancel: bool
) -> T:
    """Queue a call, and await its result."""
    awaiter = awaiter_here()
    if awaiter is None:
        return await _without_loop(call, pool, workers)
    if awaiter.on_trio:
        await anyio.lowlevel.checkpoint_if_cancelled()  # on trio, a cancelled call does not begin
    call.awaiter = awaiter
    try:
        # First: if this fails, no call was queued.
        thread_hooks.about_to_block()
        if pool.admission is None:
            pool.put(call, workers)
        else:
            await pool.put_when_room(call, workers)
        try:
            await awaiter
        except BaseException as error:
            if call.claim():  # it has not started
                call.drop()
            elif not call.delivered:
                call.leave()
                if not (abandon_on_cancel or isinstance(error, GeneratorExit)):
                    await _until_delivered(call)
            raise
        if call.error is not None:
            raise awaitable_error(call.error)
        return call.result  # type: ignore[return-value]  # a call without error has a result
    finally:
        del call, awaiter  # an error's traceback holds this frame, which must not hold the error


# The name in the warning that a coroutine was never awaited.
await_call.__qualname__ = "DeviceExecutor.run_sync"


async def _without_loop(call: AwaitedCall[T], pool: WorkerPool, workers: Sequence[Worker]) -> T:
    """`await_call` in a coroutine that `aiopar.wait` drives: it cannot be cancelled."""
    waited = FutureCall(call.fn, call.args, call.state)
    waited.synchronize, waited.internal = call.synchronize, call.internal
    waited.streams = call.streams
    try:
        await pool.put_when_room(waited, workers)
        return await waited.future
    finally:
        del call, waited  # as above


async def _until_delivered(call: AwaitedCall[Any]) -> None:
    """Wait for a running call whose await was cancelled, and discard its result."""
    # Shielded: anyio and trio would deliver their cancellation at each await.
    with cancel_scope(shield=True):
        # `deliver` runs on this thread too, so it cannot come between the look and the wait.
        while not call.delivered:
            call.awaiter = awaiter_here()  # type: ignore[assignment]  # a loop runs here
            with suppress(asyncio.CancelledError), heeding_ctrl_c():
                await call.awaiter


P = ParamSpec("P")
Ts = TypeVarTuple("Ts")

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # If functions have no common result type, mypy infers Any. Without a default it infers Never.
    R = TypeVarWithDefault("R", default=Any)
else:
    R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """The counts of the workers of an executor.

    Attributes:
        workers: The counts of each worker, in the order of `DeviceExecutor.devices`.
    """

    workers: tuple[WorkerStats, ...]


class DeviceExecutor(concurrent.futures.Executor):
    """One persistent worker for each entry of `devices`, used and awaited from an event loop.

    A worker is a thread whose device and stream are set. A call runs on the least loaded worker,
    under the state of its caller *when the call was made*: grad mode, inference mode, autocast,
    default device, saved-tensor hooks and context variables. The executor is also a plain
    `concurrent.futures.Executor`. While it drains, its running calls may submit others. At
    interpreter exit every executor drains. Ctrl-C drops the calls that have not started, and kills
    processes and actors that run a call.

    Args:
        devices: One worker for each entry; repeats are allowed, ints are accelerator indices. None:
            every accelerator, or, if there is none, as many CPU workers as cores (at least 2).
        max_pending: The maximum number of calls that wait in one worker's queue. At the maximum,
            `run_sync` waits for room and `submit` raises `QueueFull`. Calls made inside a worker
            are exempt. None: no bound.
        num_threads: How many threads an operator may use in each CPU worker. None: the cores that
            CPU affinity and cgroup grant, divided by the number of workers that have calls.
        synchronize: Whether the result of a call is complete on its accelerator when its `await`
            returns. False: the caller's stream is only ordered after the result.
        thread_name_prefix: The threads are named `{prefix}-{device}-{k}`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A device does not exist, `devices` is empty, or a bound is below 1.

    Example:
        >>> import asyncio, aiopar, torch
        >>> async def main():
        ...     async with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
        ...         x = await executor.run_sync(torch.ones, 3)
        ...         return await executor.submit(torch.add, x, 1, alpha=2)
        >>> asyncio.run(main())
        tensor([3., 3., 3.])
    """

    _dispatcher: Dispatcher
    _is_view = False
    """Whether the workers belong to another executor, which closes them."""

    def __init__(
        self,
        devices: Iterable[Device] | None = None,
        *,
        max_pending: int | None = None,
        num_threads: int | None = None,
        synchronize: bool = True,
        thread_name_prefix: str = "aiopar",
    ) -> None:
        pool = WorkerPool(
            default_devices() if devices is None else parse_devices(devices),
            max_pending=check_bound("max_pending", max_pending),
            num_threads=check_bound("num_threads", num_threads),
            thread_name_prefix=thread_name_prefix,
        )
        self._dispatcher = Dispatcher(pool, synchronize=synchronize)

    @staticmethod
    def _of(dispatcher: Dispatcher, *, is_view: bool = False) -> "DeviceExecutor":
        """An executor of existing workers."""
        executor = DeviceExecutor.__new__(DeviceExecutor)
        executor._dispatcher = dispatcher
        executor._is_view = is_view
        return executor

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each worker."""
        return self._dispatcher.devices

    @short_repr
    def __repr__(self) -> str:
        state = ", shut down" * self._dispatcher.pool.closed
        return f"on {listed(self.devices)}{', a view' if self._is_view else state}"

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `fn(*args, **kwargs)` on the least loaded worker.

        Raises:
            TypeError: `fn` is not callable, or is a coroutine function or a generator function. The
                future raises it if `fn` returns a coroutine or a generator.
            QueueFull: Every worker has `max_pending` calls waiting.
            ExecutorShutdown: A `RuntimeError`: the executor is shut down.
        """
        check_callable(fn)
        call = FutureCall(fn, args)
        if kwargs:
            call.kwargs = kwargs
        dispatcher = self._dispatcher
        if not dispatcher.synchronize:
            call.synchronize = False
        if dispatcher.pool.admission is None:
            dispatcher.pool.put(call, dispatcher.default_workers)
        else:
            dispatcher.pool.submit(call, dispatcher.default_workers)
        return call.future

    def submit_all(
        self, calls: Iterable[Callable[[], R] | tuple[Callable[..., R], *tuple[Any, ...]]], /
    ) -> list[Future[R]]:
        """Run calls at the same time, each on a worker of its own (a gang).

        The calls are queued together, so that two gangs never wait for each other. If a call fails,
        the calls that have not started are dropped, and their futures have the same error. Calls
        that wait in a meeting (`current_replica`) are released.

        Args:
            calls: Functions without arguments, or tuples `(fn, *args)`.

        Returns:
            The future of each call, in order.

        Raises:
            TypeError: `calls` is no iterable; or a call is an empty tuple, or a function that
                `submit` refuses.
            ValueError: There are more calls than workers.
            ExecutorShutdown: A `RuntimeError`: the executor is shut down.
        """
        fns: list[tuple[Any, ...]] = []
        for call in as_list("calls", calls, "functions or tuples (fn, *args)"):
            fn_and_args = call if isinstance(call, tuple) else (call,)
            if not fn_and_args:
                raise TypeError("expected a function or a tuple (fn, *args), got ()")
            check_callable(fn_and_args[0])
            fns.append(fn_and_args)
        groups = self._dispatcher.groups_for(len(fns))
        gang = Gang()
        members: list[GangCall[R]] = [GangCall(gang, fn, tuple(args)) for fn, *args in fns]
        self._dispatcher.submit_gang(members, groups)
        return [member.future for member in members]

    def on(
        self,
        device: Device | None = None,
        *,
        worker: int | None = None,
        synchronize: bool | None = None,
    ) -> "DeviceExecutor":
        """A view: an executor of the workers of one device, of one worker, or of all workers.

        Shutting a view down does nothing.

        Args:
            device: The view has the workers of this device.
            worker: The view has the worker of this index only.
            synchronize: As for the executor, but for calls made through the view. None: as here.

        Raises:
            TypeError: `device` is no device, or `worker` is no int.
            ValueError: There is no such worker; both are given; or no argument is given.
        """
        given = (device is not None) + (worker is not None)
        if given == 2 or (given == 0 and synchronize is None):
            raise ValueError(
                f"expected a device or a worker, or synchronize, got {device=} and {worker=}"
            )
        workers = self._dispatcher.workers
        if device is not None:
            [workers] = self._dispatcher.groups_on([parse_device(device)])
        elif worker is not None:
            index = as_int("worker", worker)
            if not 0 <= index < len(workers):
                expected = f"expected one in [0, {len(workers)})"
                raise ValueError(f"worker {index} is out of range: {expected}")
            workers = (workers[index],)
        return self._view(workers, synchronize)

    def _one_for_each(
        self, devices: Sequence[torch.device], taken: Sequence[Worker] = ()
    ) -> list[Worker]:
        """Choose a distinct worker on each of `devices`, one that is least often in `taken`."""
        chosen: list[Worker] = []
        for group in self._dispatcher.groups_on(devices):
            chosen.append(min((w for w in group if w not in chosen), key=taken.count))
        return chosen

    def _on_worker(self, worker: Worker) -> "DeviceExecutor":
        return self._view((worker,))

    def _view(self, workers: Sequence[Worker], synchronize: bool | None = None) -> "DeviceExecutor":
        dispatcher = self._dispatcher
        if synchronize is None:
            synchronize = dispatcher.synchronize
        view = Dispatcher(dispatcher.pool, workers, synchronize=synchronize)
        return self._of(view, is_view=True)

    @returns_coroutine
    def run_sync(
        self,
        fn: Callable[[*Ts], T],
        /,
        *args: *Ts,
        abandon_on_cancel: bool = False,
    ) -> Coroutine[Any, Any, T]:
        """Await `fn(*args)` on the least loaded worker, with less overhead than `submit`.

        The caller's state is captured here; the call is queued when the coroutine is awaited. If
        the `await` is cancelled, a call that has not started is dropped. A running call is awaited
        first, and its result is discarded.

        Args:
            fn: A function; use `functools.partial` for keyword arguments.
            args: Its arguments.
            abandon_on_cancel: Whether a cancelled `await` leaves a running call instead of waiting
                for it. The worker is busy until the call ends.

        Raises:
            TypeError: `fn` is not callable, or is a coroutine function or a generator function.
                When awaited: `fn` returned a coroutine or a generator.
            ExecutorShutdown: A `RuntimeError`: the executor is shut down.
        """
        check_callable(fn)
        call = AwaitedCall(fn, args)
        dispatcher = self._dispatcher
        if not dispatcher.synchronize:
            call.synchronize = False
        return await_call(call, dispatcher.pool, dispatcher.default_workers, abandon_on_cancel)

    def iterate(
        self, fn: Callable[[*Ts], Iterable[T]], /, *args: *Ts, buffer: int = 1
    ) -> Iteration[T]:
        """An async iterator over the items of the sync generator `fn(*args)`.

        Each `next` is a call of its own on one worker, which is free between the steps. The
        generator keeps its own grad mode, autocast, context variables, ... from step to step; no
        other call on that worker sees them.

        Args:
            fn: A generator function, or any function that returns an iterable.
            args: Its arguments.
            buffer: The maximum number of items that are ready before they are read.

        Returns:
            The iterator, for `async for`. The end of an `async with` closes the generator.

        Raises:
            TypeError: `fn` is not callable, or is a coroutine function; or `buffer` is no int.
            ValueError: `buffer` is negative.
            ExecutorShutdown: A `RuntimeError`, from the iterator: the executor is shut down.

        Example:
            >>> import asyncio, aiopar
            >>> async def main():
            ...     executor = aiopar.get_executor()
            ...     async with executor.iterate(range, 3) as numbers:
            ...         return [number async for number in numbers]
            >>> asyncio.run(main())
            [0, 1, 2]
        """
        check_callable(fn, generators=True)
        buffer = check_int("buffer", buffer, at_least=0)
        self._dispatcher.check_shares_memory("iterate()", "use a DeviceExecutor, or return a list")
        caller = CallerState()
        worker = least_loaded(self._dispatcher.default_workers)
        assert worker is not None  # noqa: S101  # no executor is without workers
        dispatcher = self._dispatcher

        def step(fn: Callable[[], Any]) -> Future[Any]:
            call = FutureCall(fn, (), caller)
            dispatcher.put(call, worker)
            return call.future

        return Iteration(step, partial(fn, *args), caller, buffer)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and (`wait`) block until the queued calls have run.

        Running calls may still submit calls, which run too (`concurrent.futures` refuses them),
        unless `cancel_futures` is set. `shutdown` may be called more than once, from any thread.
        Inside a call of this executor it does not wait.

        With `cancel_futures`, processes and actors that run a call are killed: the call raises
        `WorkerLost` (`concurrent.futures` waits for the call). Running calls of threads run on.
        """
        if self._is_view:
            return
        pool = self._dispatcher.pool
        pool.close(cancel_queued=cancel_futures)
        for worker in pool.workers if cancel_futures else ():
            worker.kill()
        if wait:
            with heeding_ctrl_c():
                pool.join()

    @property
    def ready(self) -> bool:
        """Whether the executor takes calls."""
        return not self.closed

    @property
    def closed(self) -> bool:
        """Whether the executor was closed."""
        return self._dispatcher.pool.closed

    @property
    def alive(self) -> bool:
        """Always True. `aiopar.asgi.lifespan` asks every resource for this."""
        return True

    @property
    def _seconds_busy(self) -> float:
        """The shortest time that a worker has spent in its present call."""
        return min((one.seconds_in_call for one in self._dispatcher.workers), default=0.0)

    async def aclose(
        self,
        *,
        drain: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  # the queued calls are dropped after it
    ) -> None:
        """Drain: take no more calls, run the queued ones, and wait until all threads have ended.

        Args:
            drain: Whether to run the queued calls, and those that running calls submit. If False,
                queued calls are cancelled.
            timeout: After so many seconds the queued calls are cancelled, and running calls are not
                awaited: no thread can be interrupted. None: wait for all calls.
        """
        await self._close(cancel_queued=not drain, timeout=check_timeout(timeout))

    @ki_protected
    async def _close(self, *, cancel_queued: bool, timeout: float | None = None) -> None:  # noqa: ASYNC109
        if self._is_view:
            return
        pool = self._dispatcher.pool
        pool.close(cancel_queued=cancel_queued)
        if not in_event_loop():  # driven by `aiopar.wait`
            await pool.ended()
            pool.join()
            return
        if isinstance(sys.exception(), asyncio.CancelledError):
            look_for_ctrl_c()
        with cancel_scope(timeout, shield=True) as scope, heeding_ctrl_c():
            await pool.ended()
            # The threads have a few steps left, and nothing wakes this task after them.
            while pool.alive:
                await anyio.lowlevel.checkpoint()
        if scope.cancelled_caught:
            pool.close(cancel_queued=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        await close_fully(partial(self._close, cancel_queued=exc_type is not None))

    def stats(self) -> ExecutorStats:
        """The counts of every worker, at this moment."""
        return ExecutorStats(tuple(worker.stats() for worker in self._dispatcher.workers))

    def add_observer(self, observer: ExecutorObserver) -> None:
        """Call `observer` for every later call, on all workers, even if it is added to a view.

        Raises:
            TypeError: `observer` is no `ExecutorObserver`.
        """
        check_instance("observer", observer, ExecutorObserver)
        self._dispatcher.pool.observers.add(observer)

    def remove_observer(self, observer: ExecutorObserver) -> None:
        """Stop calling `observer` for calls queued from now on."""
        self._dispatcher.pool.observers.remove(observer)


def check_executor(executor: DeviceExecutor | None) -> DeviceExecutor | None:
    """Return `executor`; TypeError if it is neither None nor a `DeviceExecutor`."""
    if executor is not None:
        check_instance("executor", executor, DeviceExecutor)
    return executor
