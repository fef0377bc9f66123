"""`Parallel` and `Parallelizable`: units of forward and backward work on a few workers."""

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from itertools import count, cycle, islice
from typing import Any, Generic, Protocol, Self, TypeVar

import torch

from .._base.arguments import check_callable, check_int, listed, short_repr
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
from .._base.tracebacks import add_note_once, awaitable_error
from .._base.tree import first_tensor, tensors
from ..errors import ExecutorShutdown
from ..executor._call import TokenCall
from ..executor._executor import DeviceExecutor
from ..futures._future import Future, running_future
from ..futures._waiting import settle

T = TypeVar("T")


class _Waiter(Generic[T]):
    """A task that waits for a result, or for room."""

    __slots__ = ("result", "served", "woken")

    def __init__(self) -> None:
        self.woken: Future[None] = Future()
        self.served = False
        """Whether it has what it waited for (or will never get it); written with the lock held."""
        self.result: T | None = None

    def serve(self, result: T | None) -> None:
        """Give it what it waits for; with the lock held."""
        self.served = True
        self.result = result

    def wake(self) -> None:
        """Without the lock, which the woken task is about to take."""
        if self.woken.claim():  # else it was cancelled
            self.woken.set_result(None)


class Results(Generic[T]):
    """What calls have come to, in the order of completion, for any number of tasks that fetch it.

    A call counts here from `enter` (room is taken) by `begin` (it is under way) and `end` (it has
    a result) until that is fetched. Who fetches is promised the result of a call that is under
    way: the n-th who waits gets the n-th to come.
    """

    def __init__(self, max_pending: int | None) -> None:
        self._max_pending: float = math.inf if max_pending is None else max_pending
        self._lock = threading.Lock()
        self._pending = 0
        self._under_way = 0
        self.closed = False
        """Whether no more calls are taken."""
        # Never are there both results that nobody has fetched and getters who wait.
        self._ready: deque[T] = deque()
        self._getters: deque[_Waiter[T]] = deque()
        self._putters: deque[_Waiter[T]] = deque()
        self.drained: Future[None] = running_future()
        """Done when it is closed and no call is under way."""

    @property
    def pending(self) -> int:
        """Calls that have entered and whose results were not fetched."""
        return self._pending

    def check_open(self) -> None:
        """Raise if no more calls are taken."""
        if self.closed:
            raise ExecutorShutdown("cannot put after close")

    async def enter(self) -> None:
        """Take room for one more call, waiting until there is some; first come, first served."""
        with self._lock:
            self.check_open()
            if self._pending < self._max_pending:
                self._pending += 1
                return
            putter: _Waiter[T] = _Waiter()
            self._putters.append(putter)
        try:
            await putter.woken
        except BaseException:
            self._give_up_room(putter)
            raise
        # Closed while it waited? `begin` looks.

    def _give_up_room(self, putter: _Waiter[T]) -> None:
        """The wait was cancelled, perhaps in the moment when there was room."""
        with self._lock:
            if not putter.served:
                self._putters.remove(putter)
                return
        self.leave()

    def begin(self) -> None:
        """A call that has entered is under way.

        Raises:
            ExecutorShutdown: It was closed meanwhile; the call has to leave.
        """
        with self._lock:
            self.check_open()
            self._under_way += 1

    def leave(self) -> None:
        """A call that entered counts no more: there is room for another."""
        with self._lock:
            self._pending -= 1
            if not self._putters or self._pending >= self._max_pending:
                return
            putter = self._putters.popleft()
            putter.serve(None)
            self._pending += 1
        putter.wake()

    def end(self, result: T) -> None:
        """A call that was under way has a result."""
        with self._lock:
            self._under_way -= 1
            getter = self._hand_out(result)
        if getter is not None:
            getter.wake()
        self._dismiss()

    def drop(self) -> None:
        """A call that was under way will have no result."""
        with self._lock:
            self._under_way -= 1
        self._dismiss()
        self.leave()

    def _hand_out(self, result: T, *, first: bool = False) -> _Waiter[T] | None:
        """Give `result` to who waits the longest, to be woken; or keep it."""
        if self._getters:
            getter = self._getters.popleft()
            getter.serve(result)
            return getter
        if first:
            self._ready.appendleft(result)
        else:
            self._ready.append(result)
        return None

    async def fetch(self, *, patient: bool) -> T | None:
        """The next result; None if there is none to come (or, for the patient, will ever be).

        Cancelled, it leaves a result that may have come meanwhile to the next.
        """
        result: T | None = None
        getter: _Waiter[T] | None = None
        with self._lock:
            if self._ready:
                result = self._ready.popleft()
            elif len(self._getters) < self._under_way or (patient and not self.closed):
                getter = _Waiter()
                self._getters.append(getter)
        if getter is not None:
            try:
                await getter.woken
            except BaseException:
                self._give_up(getter)
                raise
            result = getter.result
        if result is not None:
            self.leave()
        return result

    def _give_up(self, getter: _Waiter[T]) -> None:
        """The fetch was cancelled, perhaps in the moment when it was served."""
        with self._lock:
            if not getter.served:
                self._getters.remove(getter)
                return
            result, getter.result = getter.result, None
            # Before all others: it has waited the longest.
            following = None if result is None else self._hand_out(result, first=True)
        if following is not None:
            following.wake()

    def close(self) -> None:
        """Take no more calls; those under way can be fetched."""
        with self._lock:
            self.closed = True
            # Who waits for room is let in, and turned away by `begin`.
            self._max_pending = math.inf
            self._pending += len(self._putters)
            woken, self._putters = self._putters, deque()
            for putter in woken:
                putter.serve(None)
        for putter in woken:
            putter.wake()
        self._dismiss()

    def _dismiss(self) -> None:
        """Let those go for whom nothing comes any more: it is closed."""
        woken = []
        with self._lock:
            if not self.closed:
                return
            while len(self._getters) > self._under_way:
                getter = self._getters.pop()
                getter.serve(None)
                woken.append(getter)
            if not self._under_way and self.drained.running():
                self.drained.set_result(None)
        for getter in woken:
            getter.wake()


class Unit(TokenCall[Any]):
    """One call of `forward_backward`; then what it came to, until that is fetched."""

    number: int
    device: torch.device
    dropped = False

    def __init__(self, fn: Callable[[Any], Any], x: Any, ended: "Callable[[Unit], None]") -> None:
        super().__init__(fn, (x,))
        self._ended = ended

    def finish(self) -> None:
        if self.error is not None:
            self.error = awaitable_error(self.error)
            add_note_once(self.error, f"in unit {self.number} on device {self.device}")
        ended = self._ended
        del self._ended  # who is told holds this unit from now on
        ended(self)

    def cancel(self) -> None:
        if self.claim():
            self.drop()
            self.dropped = True
            self.finish()

    def outcome(self) -> Any:
        """What it returned; raises what it raised."""
        result, error = self.result, self.error
        self.result = self.error = None
        if error is None:
            return result
        try:
            raise error
        finally:
            # The error's traceback holds this frame, which must not hold the error.
            del error


class Parallelizable(ABC):
    """Base class of what `Parallel` runs; any object with a `forward_backward` method will do.

    Mirrors `gluonnlp.utils.parallel.Parallelizable`; there, a subclass without the method fails
    when it is called, here when it is created.

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
        """Compute one unit, `x` being what was put; what it returns is what `get` returns.

        It runs on a worker, as a plain function; units run beside each other.
        """


class _ForwardBackward(Protocol):
    @property
    def forward_backward(self) -> Callable[[Any], Any]: ...


_Refused = tuple[Unit, RuntimeError]


class Parallel:
    """Runs units of forward and backward work on a few workers of its own.

    Mirrors `gluonnlp.utils.parallel.Parallel`: `put` inputs, `get` what
    `parallelizable.forward_backward` returns for them, in the order of completion. A unit runs
    under the state that its caller had when `put` was called (grad mode, autocast, context
    variables, ...). Any number of tasks may put and get, on asyncio and on trio.

    A unit runs on a worker of the device of its first tensor. If it has none, or one on the CPU
    where no worker is, it runs on the next device in turn. Units may add up gradients in the same
    parameters: on the CPU torch does so under a lock, and on an accelerator all units launch on
    one stream, however many workers there are. Results, and gradients on the unit's device, are
    complete there when `get` returns.

    A unit that fails raises its error from its `get`, with a note that names the unit (from 0, in
    the order of `put`) and its device; the others go on.

    `async with` leaves when all units that were put have run. Left by an error or a cancellation,
    it drops those that have not started, waits for those that run, and lets who waits in `get`
    go. What has ended can be fetched after that too.

    Differences from gluonnlp: an error comes out of `get` (there it ends the thread, and `get`
    waits for ever); `get` with nothing to wait for raises; the first units and those of
    `num_workers=0` run on a worker, while `put` returns at once (there `put` runs them in the
    caller's thread); `max_pending`, `devices`, `async for`, an end.

    Args:
        num_workers: How many units run at the same time; one that waits for other calls does not
            count. 0: one, on a worker, so that the event loop stays free.
        parallelizable: A `Parallelizable`, or any object with a `forward_backward` method.
        serial_init: Whether the first `num_workers` units run one after the other, so that what
            they set up (lazy modules, caches) is set up once.
        max_pending: The most units that may be put and not fetched; `put` waits until another
            task has fetched one. None: no bound.
        devices: Where the workers are: worker `k` is on `devices[k % len(devices)]`, with
            `num_workers=0` there is one on each. None: the first `num_workers` accelerators; the
            CPU where there is none.
        parallizable: gluonnlp's spelling of `parallelizable`.

    Raises:
        TypeError: An argument is of a wrong type, `forward_backward` is a coroutine function, or
            `parallelizable` is given twice or not at all.
        ValueError: A number is too small, there is no such device, or there are more devices than
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
        if max_pending is not None:
            max_pending = check_int("max_pending", max_pending, at_least=1)
        self._forward_backward = _forward_backward_of(parallelizable, parallizable)
        self._results: Results[Unit] = Results(max_pending)
        self._executor = DeviceExecutor(
            _worker_devices(num_workers, devices), thread_name_prefix="aiopar-parallel"
        )
        self._dispatcher = self._executor._dispatcher
        workers = self._executor.devices
        self._workers = {device: self._dispatcher.workers_on(device) for device in workers}
        # Where several workers share an accelerator, streams of their own would make gradients
        # wrong: once a unit's graph is freed, the next one adds to the same `.grad` on its own
        # stream, which nothing orders after the kernels of the first.
        self._streams = {
            device: slot_stream(device) if workers.count(device) > 1 else None for device in workers
        }
        self._turns = cycle(workers)
        self._numbers = count()
        self._lock = threading.Lock()
        self._unended: dict[Unit, None] = {}
        self._waiting: deque[Unit] = deque()  # in the end, only while units run alone
        self._serial = math.inf if num_workers == 0 else num_workers * bool(serial_init)
        self._alone: Unit | None = None

    @short_repr
    def __repr__(self) -> str:
        closed = ", closed" * self._results.closed
        return f"on {listed(self._executor.devices)}, {self.pending} pending{closed}"

    @property
    def pending(self) -> int:
        """How many units were put and not fetched."""
        return self._results.pending

    def put(self, x: Any) -> Coroutine[Any, Any, None]:
        """Queue the unit `forward_backward(x)`.

        The state of the caller is captured when this is called; the unit is queued when it is
        awaited, as soon as there is room for it (`max_pending`). If the `await` is cancelled, it
        is not queued.

        Raises:
            ValueError: The first tensor of `x` is on an accelerator without a worker.
            ExecutorShutdown: A `RuntimeError`: it was closed.
        """
        self._results.check_open()
        self._dispatcher.pool.check_open()
        device = self._device_of(x)
        unit = Unit(self._forward_backward, x, self._ended)
        self._dispatcher.prepare(unit)
        return self._put(unit, device)

    async def _put(self, unit: Unit, device: torch.device | None) -> None:
        await self._results.enter()
        try:
            with self._lock:
                self._results.begin()
                unit.device = device or next(self._turns)
                unit.number = next(self._numbers)
                self._unended[unit] = None
                self._waiting.append(unit)
                refused = self._start()
        except ExecutorShutdown:
            self._results.leave()
            raise
        self._refuse(refused, unit)

    def _device_of(self, x: Any) -> torch.device | None:
        tensor = first_tensor(x)
        if tensor is None:
            return None
        device = parse_device(tensor.device)
        if device in self._workers:
            return device
        if is_accelerator(device):
            raise ValueError(
                f"the first tensor is on {device}, but the workers are on "
                f"{', '.join(map(str, self._executor.devices))}"
            )
        return None

    def _start(self) -> list[_Refused]:
        """With the lock held: hand over what may start; all, or one while units run alone.

        Returns those that the executor refused: it is shut down, or can have no more threads.
        """
        refused: list[_Refused] = []
        while self._waiting and self._alone is None:
            unit = self._waiting.popleft()
            if self._serial:
                self._serial -= 1
                self._alone = unit
            stream = self._streams[unit.device]
            if stream is not None:
                unit.fn = partial(_on_stream, stream, unit.fn)
            try:
                self._dispatcher.pool.put(unit, self._workers[unit.device])
            except RuntimeError as error:
                self._forget(unit)
                refused.append((unit, error))
        return refused

    def _forget(self, unit: Unit) -> None:
        del self._unended[unit]
        if self._alone is unit:
            self._alone = None

    def _refuse(self, refused: list[_Refused], own: Unit | None = None) -> None:
        """Raise the error of one's own; those of others are what their `get` raises."""
        for unit, error in refused:
            if unit is own:
                self._results.drop()
                raise error
            unit.error = error
            self._results.end(unit)

    def _ended(self, unit: Unit) -> None:
        # In a worker's thread, or in that of who cancels.
        with self._lock:
            self._forget(unit)
            refused = self._start()
        if unit.dropped:
            self._results.drop()
        else:
            self._results.end(unit)
        self._refuse(refused)

    async def get(self) -> Any:
        """What the next unit returned, in the order of completion; raises what it raised.

        Who waits here is served first come, first served. A cancelled `await` loses no unit.

        Raises:
            RuntimeError: There is nothing to wait for: every unit was fetched, or others wait for
                it; or it was dropped meanwhile.
        """
        unit = await self._results.fetch(patient=False)
        if unit is None:
            raise RuntimeError(
                "there is nothing to wait for: every unit was fetched or dropped, or others wait"
            )
        return unit.outcome()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """As `get`, but waits for units to be put, and ends when it is closed and drained."""
        unit = await self._results.fetch(patient=True)
        if unit is None:
            raise StopAsyncIteration
        try:
            return unit.outcome()
        except StopAsyncIteration as error:
            # Here it would mean that there are no more.
            raise RuntimeError("the unit raised StopAsyncIteration") from error

    def close(self) -> None:
        """Take no more units; those put run, and can be fetched. `put` raises from now on."""
        self._results.close()

    async def aclose(self) -> None:
        """Close, and wait until all units that were put have run and the threads have ended.

        Cancelled, it drops the units that have not started and waits for those that run.
        """
        self.close()
        try:
            await self._results.drained
        except BaseException:
            await self._drop()
            raise
        await self._executor.aclose()

    async def _drop(self) -> None:
        """Cancel what has not started, wait for what runs, and end."""
        self.close()
        with self._lock:
            self._waiting.clear()  # else the next would start when the one before is cancelled
            units = list(self._unended)
        for unit in units:
            unit.cancel()
        await settle([self._results.drained])
        await self._executor.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            await self.aclose()
        else:
            await self._drop()


def _on_stream(stream: torch.Stream, fn: Callable[[Any], Any], x: Any) -> Any:
    """Call `fn` with `stream` in place of the worker's own, as if it were that."""
    own = current_stream(stream.device)
    stream.wait_event(record_event(own))
    share_memory(tensors(x), stream)  # autograd may keep them past the call
    try:
        with to_enter(stream):
            return fn(x)
    finally:
        own.wait_event(record_event(stream))


def _forward_backward_of(
    given: _ForwardBackward | None, misspelt: _ForwardBackward | None
) -> Callable[[Any], Any]:
    if (given is None) == (misspelt is None):
        number = "none" if given is None else "two"
        raise TypeError(
            f"expected one parallelizable, got {number} (`parallizable` is gluonnlp's spelling)"
        )
    parallelizable = misspelt if given is None else given
    fn = getattr(parallelizable, "forward_backward", None)
    if fn is None or isinstance(parallelizable, type):
        raise TypeError(f"expected an object with forward_backward(x), got {parallelizable!r}")
    check_callable(fn)
    return fn  # type: ignore[no-any-return]  # checked


def _worker_devices(num_workers: int, devices: Iterable[Device] | None) -> tuple[torch.device, ...]:
    """The device of each worker."""
    if devices is None:
        chosen = all_accelerators()[: num_workers or None] or (torch.device("cpu"),)
    else:
        chosen = parse_devices(devices)
        if 0 < num_workers < len(chosen):
            raise ValueError(
                f"{num_workers} workers cannot be on {len(chosen)} devices: "
                f"{', '.join(map(str, chosen))}"
            )
    return tuple(islice(cycle(chosen), num_workers)) or tuple(dict.fromkeys(chosen))
