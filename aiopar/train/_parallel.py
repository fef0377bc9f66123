"""`Parallel` and `Parallelizable`: units of forward and backward work on a few workers."""

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count, cycle, islice
from typing import Any, Protocol, Self

import torch

from .._base.arguments import (
    AsyncOnly,
    check_bound,
    check_callable,
    check_int,
    listed,
    returns_coroutine,
    short_repr,
    shown_as,
)
from .._base.devices import (
    Device,
    all_accelerators,
    current_stream,
    is_accelerator,
    parse_device,
    parse_devices,
    record_event,
    share_memory,
    slot_stream,
    to_enter,
)
from .._base.tracebacks import add_note_once
from .._base.tree import first_tensor, tensors
from ..errors import ExecutorShutdown
from ..executor._call import FutureCall
from ..executor._executor import DeviceExecutor
from ..futures._future import Future, running_future
from ..futures._semaphore import Semaphore
from ..futures._waiting import settle
from ..futures._wakeup import ki_protected


class Parallelizable(ABC):
    """Base class for the work of `Parallel`; any object with `forward_backward(x)` may serve.

    Mirrors `gluonnlp.utils.parallel.Parallelizable`. Difference: a subclass without the method
    fails when it is created (in gluonnlp, when it is called).

    Example:
        >>> import asyncio, aiopar
        >>> class Doubled(aiopar.Parallelizable):
        ...     def forward_backward(self, x):
        ...         return 2 * x
        >>> async def main():
        ...     async with aiopar.Parallel(2, Doubled()) as parallel:
        ...         await parallel.put(21)
        ...         return await parallel.get()
        >>> asyncio.run(main())
        42
    """

    @abstractmethod
    def forward_backward(self, x: Any) -> Any:
        """Compute one unit, `x` of `Parallel.put`; the result goes to `Parallel.get`.

        A plain function, called on a worker, for several units at once.
        """


class _ForwardBackward(Protocol):
    @property
    def forward_backward(self) -> Callable[[Any], Any]: ...


class Parallel(AsyncOnly):
    """Runs units of forward and backward work on workers of its own.

    Mirrors `gluonnlp.utils.parallel.Parallel`: `put` queues a unit, and `get` returns the result of
    `parallelizable.forward_backward` for the next unit that ends. A unit runs under the state that
    its caller had when it called `put` (grad mode, autocast, context variables and the like). Any
    number of tasks may call `put` and `get`, on asyncio and on trio.

    A unit runs on a worker of the device of its first tensor. Without a tensor, or with a CPU
    tensor and no CPU worker, the devices take turns. Units may add gradients to the same
    parameters: on the CPU torch takes locks, and on an accelerator all units launch on one stream.
    When `get` returns, the result and the gradients are complete on the device of the unit.

    If a unit fails, its `get` raises the error, with a note that names the unit and its device.
    Units are numbered from 0 in the order of `put`. Other units go on.

    `async with` waits at its end until all units have run. After an error or a cancellation the
    block drops the units that have not started, waits for running units, and ends every waiting
    `get`. Results can still be fetched then.

    Differences from gluonnlp: `get` raises the error of a unit (in gluonnlp the thread ends, and
    `get` hangs); `get` raises if there is nothing to wait for; `put` never runs a unit in the
    caller's thread, not even with `num_workers=0` or `serial_init`; `max_pending`, `devices`,
    `async for` and `close` are new.

    Args:
        num_workers: The number of units that run at the same time. A unit that waits for other
            calls does not count. 0: one unit at a time, on a worker.
        parallelizable: A `Parallelizable`, or any object with a `forward_backward` method.
        serial_init: Whether the first `num_workers` units run one after the other, so that lazy
            modules and caches are set up once.
        max_pending: The maximum number of units that were put and not fetched; at the maximum,
            `put` waits. None: no limit.
        devices: The devices of the workers: worker `k` is on `devices[k % len(devices)]`. With
            `num_workers=0` each device has one worker. None: the first `num_workers` accelerators,
            or else the CPU.
        parallizable: gluonnlp's spelling of `parallelizable`.

    Raises:
        TypeError: An argument has a wrong type, `forward_backward` is a coroutine function or a
            generator function, or `parallelizable` is given twice or not at all.
        ValueError: A number is too small, a device does not exist, or there are more devices than
            workers.

    Example:
        >>> import asyncio, aiopar, torch
        >>> class Squares(aiopar.Parallelizable):
        ...     weight = torch.zeros(2, requires_grad=True)
        ...     def forward_backward(self, x):
        ...         loss = (self.weight - x).square().sum()
        ...         loss.backward()
        ...         return loss.item()
        >>> async def main():
        ...     async with aiopar.Parallel(2, Squares()) as parallel:
        ...         for n in range(4):
        ...             await parallel.put(torch.full((2,), float(n)))
        ...         parallel.close()
        ...         return sorted([loss async for loss in parallel])
        >>> asyncio.run(main())
        [0.0, 2.0, 8.0, 18.0]
        >>> Squares.weight.grad
        tensor([-12., -12.])
    """

    def __init__(
        self,
        num_workers: int,
        parallelizable: _ForwardBackward | None = None,
        serial_init: bool = True,
        *,
        max_pending: int | None = None,
        devices: Iterable[Device] | None = None,
        parallizable: _ForwardBackward | None = None,
    ) -> None:
        num_workers = check_int("num_workers", num_workers, at_least=0)
        max_pending = check_bound("max_pending", max_pending)
        self._forward_backward = _forward_backward_of(parallelizable, parallizable)
        self._executor = DeviceExecutor(
            _worker_devices(num_workers, devices), thread_name_prefix="aiopar-parallel"
        )
        workers = self._executor.devices
        # Workers that share an accelerator launch on one stream. With streams of their own,
        # nothing would order the kernels of two units that add to the same `.grad` in turn.
        self._streams = {
            device: slot_stream(device) if workers.count(device) > 1 else None for device in workers
        }
        self._next_devices = cycle(workers)
        self._numbers = count()
        # A unit holds room from `put` to `get`.
        self._room = Semaphore(math.inf if max_pending is None else max_pending)
        # Re-entrant: the garbage collector may close a waiting `get`, or drop a unit, meanwhile.
        self._lock = threading.RLock()
        # Units that were put and have not ended; then units that have ended and were not fetched.
        self._running: set[Future[Any]] = set()
        self._results: deque[Future[Any]] = deque()
        # Waiting tasks, oldest first. Each gets a unit that has ended, or None if no unit will end.
        self._getters: deque[Future[Future[Any] | None]] = deque()
        # How many of the next units run alone: each starts when the one before has ended.
        self._serial = math.inf if num_workers == 0 else num_workers * bool(serial_init)
        self._alone: Future[Any] | None = None
        self._waiting: deque[tuple[FutureCall[Any], torch.device]] = deque()
        self._closed = False
        self._drained: Future[None] = running_future()  # done when closed and all units ended

    @short_repr
    def __repr__(self) -> str:
        closed = ", closed" * self._closed
        return f"on {listed(self._executor.devices)}, {self.pending} pending{closed}"

    @property
    def pending(self) -> int:
        """The number of units that were put and not fetched."""
        return self._room.held

    @returns_coroutine
    def put(self, x: Any) -> Coroutine[Any, Any, None]:
        """Queue the unit `forward_backward(x)`.

        The call captures the caller's state. The `await` first waits until fewer than `max_pending`
        units are pending, and then queues the unit. A cancelled `put` queues nothing.

        Raises:
            ValueError: The first tensor of `x` is on an accelerator without a worker.
            ExecutorShutdown: A `RuntimeError`: this object is closed.
        """
        self._check_open()
        device = self._device_for(x)
        stream = self._streams[device]
        fn = self._forward_backward
        call = FutureCall(fn if stream is None else partial(_on_stream, stream, fn), (x,))
        return shown_as(self._put(call, device), "Parallel.put")

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutorShutdown("cannot put after close")

    def _device_for(self, x: Any) -> torch.device:
        tensor = first_tensor(x)
        device = None if tensor is None else parse_device(tensor.device)
        if device in self._streams:
            return device
        if device is not None and is_accelerator(device):
            workers = ", ".join(map(str, self._executor.devices))
            raise ValueError(f"the first tensor is on {device}, but the workers are on {workers}")
        return next(self._next_devices)

    @ki_protected
    async def _put(self, call: FutureCall[Any], device: torch.device) -> None:
        await self._room.acquire()
        try:
            with self._lock:
                self._check_open()  # it may have been closed during the wait
                self._running.add(call.future)
                self._waiting.append((call, device))
                number = next(self._numbers)
        except ExecutorShutdown:
            self._room.release()
            raise
        call.future.add_done_callback(partial(self._ended, f"{number} on device {device}"))
        self._start()

    def _start(self) -> None:
        """Give the workers all units that may start; while one must run alone, only that one."""
        while True:
            with self._lock:
                if self._alone is not None or not self._waiting:
                    return
                call, device = self._waiting.popleft()
                if self._serial:
                    self._serial -= 1
                    self._alone = call.future
            dispatcher = self._executor._dispatcher
            try:
                dispatcher.pool.put(call, dispatcher.workers_on(device))
            except RuntimeError as error:  # no thread can start, say; `get` raises it
                call.future.set_exception(error)

    def _ended(self, where: str, unit: Future[Any]) -> None:
        """Record a unit that has ended or was dropped; called by the thread that ended the unit."""
        dropped = unit.cancelled()
        if not dropped and (error := unit.exception()) is not None:
            add_note_once(error, "in unit ", where)
            del error
        with self._lock:
            self._running.remove(unit)
            if self._alone is unit:
                self._alone = None
            if not dropped and not self._serve(unit):
                self._results.append(unit)
        if dropped:
            self._room.release()
        self._start()
        self._end_if_drained()

    @ki_protected
    async def get(self) -> Any:
        """Return the result of the next unit that ends, or raise the error of the unit.

        Waiting tasks are served in the order in which they came. A cancelled `get` loses no unit.

        Raises:
            RuntimeError: There is nothing to wait for: every unit was fetched, was dropped, or is
                awaited by another task.
        """
        unit = await self._fetch(wait_for_put=False)
        try:
            if unit is None:
                raise RuntimeError(
                    "there is nothing to wait for: every unit was fetched, was dropped, or is "
                    "awaited by another task"
                )
            return unit.value()
        finally:
            del unit  # it holds the error, whose traceback holds this frame

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """As `get`, but also wait for the next `put`; end after `close` and the last unit."""
        unit = await self._fetch(wait_for_put=True)
        if unit is None:
            raise StopAsyncIteration
        try:
            return unit.value()
        except StopAsyncIteration as error:  # the same error would end the iteration
            raise RuntimeError("the unit raised StopAsyncIteration") from error
        finally:
            del unit  # as in `get`

    async def _fetch(self, *, wait_for_put: bool) -> Future[Any] | None:
        """Wait for the next unit that ends; return None if no unit will end."""
        with self._lock:
            unit: Future[Any] | None = None
            getter: Future[Future[Any] | None] | None = None
            if self._results:
                unit = self._results.popleft()
            elif len(self._getters) < len(self._running) or (wait_for_put and not self._closed):
                getter = Future()
                self._getters.append(getter)
        if getter is not None:
            try:
                unit = await getter
            except BaseException:
                self._leave(getter)
                raise
        if unit is not None:
            self._room.release()
        return unit

    def _leave(self, getter: Future[Future[Any] | None]) -> None:
        """Remove a cancelled task; if it has got a unit already, the next task gets that unit."""
        with self._lock:
            if getter.cancel():
                with suppress(ValueError):  # this call has interrupted `_serve`
                    self._getters.remove(getter)
            elif (unit := getter.value()) is not None and not self._serve(unit):
                self._results.appendleft(unit)

    def _serve(self, unit: Future[Any] | None) -> bool:
        """Give `unit` to the oldest waiting task; False if no task waits. With the lock held."""
        while self._getters:
            with suppress(InvalidStateError):  # cancelled
                self._getters.popleft().set_result(unit)
                return True
        return False

    def close(self) -> None:
        """Accept no more units: `put` raises. Units that were put still run, and can be fetched."""
        with self._lock:
            self._closed = True
        self._room.lift()  # tasks that wait in `put` go on, and raise
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        with self._lock:
            if self._running or not self._closed or self._drained.done():
                return
            self._drained.set_result(None)
            while self._serve(None):
                pass

    async def aclose(self) -> None:
        """Close, and wait until all units have run and the threads have ended.

        A cancellation drops the units that have not started, and waits for running units.
        """
        self.close()
        try:
            await self._drained
        except GeneratorExit:  # a closed coroutine must not wait
            self._drop_waiting()
            self._executor.shutdown(wait=False)
            raise
        except BaseException:
            await self._drop()
            raise
        await self._executor.aclose()

    def _drop_waiting(self) -> None:
        """Drop the units that have not started."""
        self.close()
        with self._lock:
            self._waiting.clear()  # the end of a unit must not start the next one
            units = list(self._running)
        for unit in units:
            unit.cancel()

    async def _drop(self) -> None:
        """Drop the units that have not started, wait for running units, and end the threads."""
        self._drop_waiting()
        await settle([self._drained])
        await self._executor.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        await (self.aclose() if exc_type is None else self._drop())


def _on_stream(stream: torch.Stream, fn: Callable[[Any], Any], x: Any) -> Any:
    """Call `fn` on `stream`, in the order of the worker's own stream."""
    own = current_stream(stream.device)
    stream.wait_event(record_event(own))
    share_memory(tensors(x), stream)  # autograd may keep the tensors after the call
    try:
        with to_enter(stream):
            return fn(x)
    finally:
        own.wait_event(record_event(stream))


def _forward_backward_of(
    parallelizable: _ForwardBackward | None, parallizable: _ForwardBackward | None
) -> Callable[[Any], Any]:
    if (parallelizable is None) == (parallizable is None):
        number = "none" if parallelizable is None else "two"
        raise TypeError(
            f"expected one parallelizable, got {number} (`parallizable` is gluonnlp's spelling)"
        )
    given = parallizable if parallelizable is None else parallelizable
    fn = getattr(given, "forward_backward", None)
    if fn is None or isinstance(given, type):
        raise TypeError(f"expected an object with forward_backward(x), got {given!r}")
    check_callable(fn)
    return fn  # type: ignore[no-any-return]  # checked


def _worker_devices(num_workers: int, devices: Iterable[Device] | None) -> tuple[torch.device, ...]:
    if devices is None:
        chosen = all_accelerators()[: num_workers or None] or (torch.device("cpu"),)
    else:
        chosen = parse_devices(devices)
        if 0 < num_workers < len(chosen):
            names = ", ".join(map(str, chosen))
            raise ValueError(f"{num_workers} workers cannot be on {len(chosen)} devices: {names}")
    return tuple(islice(cycle(chosen), num_workers)) or tuple(dict.fromkeys(chosen))
