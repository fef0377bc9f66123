"""`DeviceExecutor`: workers for every device, awaited from one event loop."""

import asyncio
import concurrent.futures
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
    check_callable,
    check_instance,
    check_int,
    listed,
    short_repr,
)
from .._base.devices import Device, default_devices, parse_device, parse_devices
from .._base.thread_state import CallerState
from ..futures._future import Future, thread_hooks
from ..futures._waiting import close_fully, settle
from ..futures._wakeup import in_event_loop, waker_of
from ._call import FutureCall, LoopCall
from ._gang import Gang, GangCall
from ._generators import Iteration
from ._observer import ExecutorObserver
from ._pool import Dispatcher, WorkerPool, least_loaded
from ._worker import Worker, WorkerStats, check_capability, current_worker

T = TypeVar("T")

_get_running_loop = asyncio._get_running_loop


async def run_in_loop(
    call: LoopCall[T], pool: WorkerPool, workers: Sequence[Worker], abandon_on_cancel: bool
) -> T:
    """Queue a call and await it; on asyncio, past any `Future`."""
    loop = _get_running_loop()
    if loop is None:
        return await run_anywhere(call.as_future_call(), pool, workers, abandon_on_cancel)
    call.waker = waker_of(loop)
    waiter: asyncio.Future[T] = asyncio.Future(loop=loop)
    call.waiter = waiter
    thread_hooks.about_to_block()  # first: if it fails, nothing was queued that nobody awaits
    if pool.admission is None:
        pool.put(call, workers)
    else:
        await _admit(call, pool, workers)
    try:
        return await waiter
    except asyncio.CancelledError:
        # Claimed here, it never ran; delivered, this is its own error or it has just ended.
        if call.claim():
            call.drop()
        elif not (call.delivered or abandon_on_cancel):
            await _until_delivered(call, loop)
        raise
    finally:
        # An error's traceback holds this frame, which must not hold the error.
        del call, waiter


# What a warning that it was never awaited says.
run_in_loop.__qualname__ = "DeviceExecutor.run_sync"


async def run_anywhere(
    call: FutureCall[T], pool: WorkerPool, workers: Sequence[Worker], abandon_on_cancel: bool
) -> T:
    """Queue a call and await its future: under trio, or in a worker without a loop."""
    future = call.future
    try:
        if _get_running_loop() is None and in_event_loop():
            # trio's: what is cancelled already does not begin there.
            await anyio.lowlevel.checkpoint_if_cancelled()
        await _admit(call, pool, workers)
    except BaseException:
        call.cancel()  # as in `WorkerPool.admit`
        raise
    try:
        # Cancelled, it drops a call that has not started: nobody else knows of this future.
        return await future
    except BaseException:
        if not (future.done() or abandon_on_cancel):
            await settle([future])
        raise
    finally:
        del call, future


async def _admit(
    call: FutureCall[Any] | LoopCall[Any], pool: WorkerPool, workers: Sequence[Worker]
) -> None:
    """Queue a call, waiting until there is room for it."""
    admission = pool.admission
    # A call made by a call is exempt: if it had to wait for room, so might everybody.
    if admission is None or current_worker() is not None:
        pool.put(call, workers)
        return
    pool.check_open()
    granted = admission.request([workers])
    try:
        [worker] = await granted
    except BaseException:
        if not admission.give_up(granted):  # granted and cancelled at once: nobody takes the room
            admission.leave(granted.value()[0])
        raise
    admission.admit(call, worker)
    pool.put(call, [worker])


async def _until_delivered(call: LoopCall[Any], loop: asyncio.AbstractEventLoop) -> None:
    """Wait for a call whose waiter was cancelled while it ran, and discard the outcome."""
    # Shielded, else anyio would deliver its cancellation again and again while this waits.
    with anyio.CancelScope(shield=True):
        # On the loop's thread, as `deliver` is: it cannot come between the look and the wait.
        while not call.delivered:
            call.waiter = loop.create_future()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([call.waiter])
    if call.waiter.done() and not call.waiter.cancelled():
        call.waiter.exception()  # seen, and discarded


P = ParamSpec("P")
Ts = TypeVarTuple("Ts")

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # Where mypy finds no common type for functions that differ, it is Any; else it would be Never.
    R = TypeVarWithDefault("R", default=Any)
else:
    R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """What the workers of an executor have done and have before them."""

    workers: tuple[WorkerStats, ...]


class DeviceExecutor(concurrent.futures.Executor):
    """One persistent worker for every entry of `devices`, fed and awaited from an event loop.

    Every worker is a thread with its device and stream already set; a call runs on the least
    loaded one, under the caller's grad mode, inference mode, autocast, default device,
    saved-tensor hooks and context variables as they were *when the call was made*. It is also a
    plain `concurrent.futures.Executor`.

    Args:
        devices: One worker an entry; repeats are allowed, ints are accelerator indices. None:
            every accelerator, or, where there is none, as many CPU workers as cores (at least 2).
        max_pending: The most calls that may wait in one worker's queue. `run_sync` then waits for
            room and `submit` raises `QueueFull`; calls made from inside a worker are exempt. None:
            no bound.
        num_threads: How many threads an operator may use in each CPU worker. None: the cores
            divided by the number of workers that have calls, at least one each.
        synchronize: Whether the result of a call is complete on its accelerator when its `await`
            returns. False: it is only ordered after, on the stream that was the caller's.
        thread_name_prefix: Threads are named `{prefix}-{device}-{k}`.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: A device that this machine does not have, no device at all, or a bound below 1.

    Example:
        >>> import asyncio, aiopar, torch
        >>> async def main():
        ...     async with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
        ...         x = await executor.run_sync(torch.ones, 3)
        ...         return await executor.submit(torch.add, x, 1, alpha=2)
        >>> asyncio.run(main())
        tensor([3., 3., 3.])
    """

    def __init__(
        self,
        devices: Iterable[Device] | None = None,
        *,
        max_pending: int | None = None,
        num_threads: int | None = None,
        synchronize: bool = True,
        thread_name_prefix: str = "aiopar",
    ) -> None:
        if max_pending is not None:
            max_pending = check_int("max_pending", max_pending, at_least=1)
        if num_threads is not None:
            num_threads = check_int("num_threads", num_threads, at_least=1)
        pool = WorkerPool(
            default_devices() if devices is None else parse_devices(devices),
            max_pending=max_pending,
            num_threads=num_threads,
            thread_name_prefix=thread_name_prefix,
            grows=False,
        )
        if not synchronize:
            check_capability(pool.workers, "streams", "synchronize=False")
        self._dispatcher = Dispatcher(pool, synchronize=synchronize)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each worker."""
        return self._dispatcher.devices

    @short_repr
    def __repr__(self) -> str:
        return f"on {listed(self.devices)}{', shut down' * self._dispatcher.pool.closed}"

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `fn(*args, **kwargs)` on the least loaded worker.

        Raises:
            TypeError: `fn` is not callable, or is a coroutine function.
            QueueFull: Every worker has `max_pending` calls waiting.
            ExecutorShutdown: A `RuntimeError`: the executor is shut down.
        """
        check_callable(fn)
        call = FutureCall(fn, args)
        if kwargs:
            call.kwargs = kwargs
        dispatcher = self._dispatcher
        pool = dispatcher.pool
        admission = pool.admission
        if not dispatcher.synchronize:
            call.synchronize = False
        if admission is None:
            pool.put(call, dispatcher.default_workers)
        else:
            pool.admit(call, dispatcher.default_workers, admission)
        return call.future

    def submit_all(
        self, calls: Iterable[Callable[[], R] | tuple[Callable[..., R], *tuple[Any, ...]]], /
    ) -> list[Future[R]]:
        """Run calls at the same time, each on a worker of its own (a gang).

        They are queued together, so that gangs submitted at once from anywhere cannot deadlock by
        each holding a worker that the other needs. If one fails, those that have not started are
        cancelled and those that meet through `current_replica` are released.

        Args:
            calls: Functions without arguments, or tuples `(fn, *args)`.

        Returns:
            The future of each call, in order.

        Raises:
            TypeError: `calls` is no iterable; or a call is not callable, is a coroutine function,
                or an empty tuple.
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
        members: list[GangCall[R]] = [gang.add(fn, tuple(args)) for fn, *args in fns]
        self._dispatcher.submit_gang(members, groups)
        return [member.future for member in members]

    def on(
        self,
        device: Device | None = None,
        *,
        worker: int | None = None,
        synchronize: bool | None = None,
    ) -> "DeviceExecutor":
        """A view on the workers of one device, on one worker, or on all with another `synchronize`.

        It is an executor like this one; shutting it down does nothing.

        Args:
            device: The view has the workers on this device.
            worker: The view has this worker alone.
            synchronize: As for the executor, of the calls made through the view; None: as here.

        Raises:
            TypeError: `device` is no device, or `worker` is no int.
            ValueError: There is no such worker, both were given, or nothing at all.
        """
        both = device is not None and worker is not None
        nothing = device is None and worker is None and synchronize is None
        if both or nothing:
            raise ValueError(
                f"expected a device or a worker, or synchronize, got {device=} and {worker=}"
            )
        dispatcher = self._dispatcher
        if device is not None:
            dispatcher = dispatcher.on_device(parse_device(device))
        elif worker is not None:
            dispatcher = dispatcher.on_worker(self._worker(worker))
        if synchronize is not None:
            if not synchronize:
                check_capability(dispatcher.workers, "streams", "synchronize=False")
            dispatcher = dispatcher.with_synchronize(synchronize)
        return _View(dispatcher)

    def _worker(self, index: int) -> Worker:
        index, workers = as_int("worker", index), self._dispatcher.workers
        if not 0 <= index < len(workers):
            raise ValueError(f"worker {index} is out of range: expected one in [0, {len(workers)})")
        return workers[index]

    def run_sync(
        self,
        fn: Callable[[*Ts], T],
        /,
        *args: *Ts,
        abandon_on_cancel: bool = False,
    ) -> Coroutine[Any, Any, T]:
        """Await `fn(*args)` on the least loaded worker: the cheapest way there and back.

        The caller's state is captured here; the call is queued when the coroutine is awaited. If
        the `await` is cancelled, a call that has not started is dropped; one that runs is awaited
        first, and its outcome discarded.

        Args:
            fn: A function; keyword arguments go in by `functools.partial`.
            args: Its arguments.
            abandon_on_cancel: On cancellation do not wait for a call that runs; its worker is
                busy until it ends.

        Raises:
            TypeError: `fn` is not callable, or is a coroutine function.
            ExecutorShutdown: A `RuntimeError`: the executor is shut down.
        """
        check_callable(fn)
        # Which loop awaits it is asked once, where it is awaited: a system call on CPython 3.11.
        call = LoopCall(fn, args)
        dispatcher = self._dispatcher
        if not dispatcher.synchronize:
            call.synchronize = False
        return run_in_loop(call, dispatcher.pool, dispatcher.default_workers, abandon_on_cancel)

    def iterate(
        self, fn: Callable[[*Ts], Iterable[T]], /, *args: *Ts, buffer: int = 1
    ) -> Iteration[T]:
        """An async iterator over the items of the sync generator `fn(*args)`.

        Each `next` is a call of its own on one worker, which is free between them. The generator
        keeps its own grad mode, autocast, context variables, ... from step to step; nothing else
        on that worker sees them.

        Args:
            fn: A generator function, or any function that returns an iterable.
            args: Its arguments.
            buffer: How many items may be ready before they are read.

        Returns:
            To be read by `async for`; `async with` closes the generator on leaving.

        Raises:
            TypeError: `fn` is not callable, or is a coroutine function; or `buffer` is no int.
            ValueError: `buffer` is negative.
            ExecutorShutdown: A `RuntimeError`, when read: the executor is shut down.

        Example:
            >>> import asyncio, aiopar
            >>> async def main():
            ...     executor = aiopar.get_executor()
            ...     async with executor.iterate(range, 3) as numbers:
            ...         return [number async for number in numbers]
            >>> asyncio.run(main())
            [0, 1, 2]
        """
        check_callable(fn)
        buffer = check_int("buffer", buffer, at_least=0)
        check_capability(self._dispatcher.default_workers, "iterate", "iterate()")
        caller = CallerState()
        worker = least_loaded(self._dispatcher.default_workers)
        step = partial(_step, self._dispatcher.on_worker(worker), caller)
        return Iteration(step, partial(fn, *args), caller, buffer)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and (`wait`) block until those queued have run.

        What those hand in themselves runs too, unless `cancel_futures` (`concurrent.futures` would
        refuse it). Called more than once, from any thread, it does no harm; called by a call of
        this executor, it waits for nobody.
        """
        self._dispatcher.pool.close(cancel_queued=cancel_futures)
        if wait:
            self._dispatcher.pool.join()

    async def aclose(self) -> None:
        """Drain: take no more calls, run those queued, and wait until all threads have ended.

        What the queued calls hand in themselves (`fork`, ...) is taken, and runs too.
        """
        await self._close(cancel_queued=False)

    async def _close(self, *, cancel_queued: bool) -> None:
        self._dispatcher.pool.close(cancel_queued=cancel_queued)
        if not in_event_loop():  # driven by `aiopar.wait`
            await self._dispatcher.pool.ended()
            self._dispatcher.pool.join()
            return
        with anyio.CancelScope(shield=True):
            await self._dispatcher.pool.ended()
            # They have a few steps to go, for which nothing could wake this: who counts threads
            # after it finds none.
            while self._dispatcher.pool.alive:
                await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        await close_fully(partial(self._close, cancel_queued=exc_type is not None))

    def stats(self) -> ExecutorStats:
        """What every worker has done and has before it, now."""
        return ExecutorStats(tuple(worker.stats() for worker in self._dispatcher.workers))

    def add_observer(self, observer: ExecutorObserver) -> None:
        """Tell `observer` of every call queued from now on; also a view's, of all workers.

        Raises:
            TypeError: It is no `ExecutorObserver`.
        """
        check_instance("observer", observer, ExecutorObserver)
        self._dispatcher.pool.add_observer(observer)

    def remove_observer(self, observer: ExecutorObserver) -> None:
        """Tell it no more."""
        self._dispatcher.pool.remove_observer(observer)


class _View(DeviceExecutor):
    """Some of the workers of another executor."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    @short_repr
    def __repr__(self) -> str:
        return f"on {listed(self.devices)}, a view"

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: the workers belong to the executor that this is a view on."""

    async def _close(self, *, cancel_queued: bool) -> None:
        pass


def check_executor(executor: DeviceExecutor | None) -> DeviceExecutor | None:
    """`executor`, if it is None or a `DeviceExecutor`.

    Raises:
        TypeError: It is something else.
    """
    if executor is not None:
        check_instance("executor", executor, DeviceExecutor)
    return executor


def _step(dispatcher: Dispatcher, caller: CallerState, fn: Callable[[], T]) -> Future[T]:
    call = FutureCall(fn, (), caller)
    dispatcher.put(call)
    return call.future
