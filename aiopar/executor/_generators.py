"""A synchronous generator, stepped on a worker and read from an event loop."""

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Generic, NoReturn, Self, TypeVar

import anyio

from .._base.arguments import check_int, name_of, short_repr
from .._base.thread_state import (
    FRESH_STATE,
    CallerState,
    Modes,
    TorchState,
    applied,
    autocast_nesting,
    capture_torch_state,
    fresh,
    put_back,
    set_autocast_nesting,
    take_modes,
)
from .._base.tracebacks import log_failure
from ..errors import ExecutorShutdown
from ..futures._future import Future, running_future
from ..futures._waiting import close_fully, collect_all
from ..futures._wakeup import in_event_loop

T = TypeVar("T")

END: Any = object()
"""What comes in the place of an item, when there is none any more."""


class CarriedState:
    """torch's state as a generator has it: what it has entered and not left, its caller's below.

    Each step is run `with` it; what the step leaves behind is a part of it from then on.
    """

    def __init__(self, state: TorchState | None) -> None:
        self._state = state or FRESH_STATE
        self._modes: Modes | None = None
        self._autocast_nesting = 0

    @classmethod
    def taken_off(cls, callers: TorchState | None) -> "CarriedState":
        """What a step has left on this thread, to which `callers` was applied, and is again."""
        modes = take_modes()
        carried = cls(capture_torch_state(own=True))
        carried._modes = modes
        nesting = nesting_under(callers)
        carried._autocast_nesting = autocast_nesting() - nesting
        set_autocast_nesting(nesting)
        put_back(callers)
        return carried

    def __enter__(self) -> None:
        self._below = (fresh(), applied(self._state))
        for entered in self._below:
            entered.__enter__()
        self._outside = autocast_nesting()
        set_autocast_nesting(self._outside + self._autocast_nesting)
        if self._modes is not None:
            self._modes.put()

    def __exit__(self, *error: object) -> None:
        self._modes = take_modes()
        self._state = capture_torch_state(own=True) or FRESH_STATE
        self._autocast_nesting = autocast_nesting() - self._outside
        set_autocast_nesting(self._outside)
        for entered in reversed(self._below):
            entered.__exit__(*error)


def nesting_under(callers: TorchState | None) -> int:
    """How many autocast blocks a worker's thread is in that runs a call under `callers`."""
    return 0 if callers is None else 1  # by `applied`


class Steps(Generic[T]):
    """A generator and the state that it carries from step to step; run on a worker.

    Args:
        make: Makes it.
        context: Its context variables, which are its own from then on.
        torch_state: What it begins with.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[T]],
        context: contextvars.Context,
        torch_state: TorchState | None,
    ) -> None:
        self._make: Callable[[], Iterable[T]] | None = make
        self._iterator: Any = None
        self._context = context
        self._carried = CarriedState(torch_state)
        self.ended = False
        """Whether there is nothing left to step; set before the last step's future is done."""

    @property
    def suspended(self) -> bool:
        """Whether it has begun and not ended: it may be inside of `with` and `try` blocks."""
        return self._iterator is not None and not self.ended

    def step(self) -> T:
        """The next item, or `END`."""
        with self._carried:
            return self._context.run(self._advance)

    def close(self) -> None:
        """Leave the generator's `with` and `finally` blocks; nothing if it never began."""
        self.ended = True
        self._make = None
        close = getattr(self._iterator, "close", None)
        if close is not None:
            with self._carried:
                self._context.run(close)

    def _advance(self) -> T:
        try:
            make, self._make = self._make, None
            if make is not None:
                self._iterator = iter(make())
            # A default, for a StopIteration could not pass through a future.
            item: T = next(self._iterator, END)
        except BaseException:
            self.ended = True
            raise
        if item is END:
            self.ended = True
        return item


class Iteration(Generic[T]):
    """An async iterator over what a sync generator yields; made by `DeviceExecutor.iterate`.

    Each step is a call of its own on one worker, which is free between steps. `async with` closes
    the generator on leaving; a plain `async for` that is broken off closes it when the iterator
    is collected, also on its worker. An error of the generator is raised where its item would have
    come, and ends the iteration. One task reads at a time; a read that is cancelled loses no item.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        make: Callable[[], Iterable[T]],
        caller: CallerState,
        buffer: int,
    ) -> None:
        self._closed = True  # until there is something to close
        self._ended: Future[Any] = running_future()
        buffer = check_int("buffer", buffer, at_least=0)
        self._submit = submit
        self._name = name_of(make)
        self._steps = Steps(make, caller.context(), caller.torch_state)
        self._buffer = buffer
        self._lock = threading.Lock()
        # Steps whose items nobody has read. Only the last can be unfinished, for a generator
        # cannot be entered twice.
        self._ahead: deque[Future[T]] = deque()
        self._reading = False
        self._closed = False

    def __reduce__(self) -> NoReturn:
        # As a generator itself: a copy would close it when it is collected.
        raise TypeError(f"a {type(self).__name__} can be neither pickled nor copied")

    @short_repr
    def __repr__(self) -> str:
        return f"of {self._name}, {'closed' if self._closed else f'{len(self._ahead)} ahead'}"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._reading:
            raise RuntimeError("this iteration is read by another task already")
        self._reading = True
        try:
            item = await self._next()
        except StopAsyncIteration as error:
            # It would end the loop of who reads, and nobody would know that something failed.
            raise RuntimeError("the generator raised StopAsyncIteration") from error
        finally:
            self._reading = False
        if item is END:
            raise StopAsyncIteration
        return item

    async def _next(self) -> T:
        step = self._step_ahead(max(1, self._buffer))
        if step is None:
            return END  # type: ignore[no-any-return]
        # Not the step itself: a cancelled read leaves it, and its item, for the next read.
        if not step.done():
            await collect_all([step])
        with self._lock:
            if self._closed:  # meanwhile, by another task
                return END  # type: ignore[no-any-return]
            self._ahead.popleft()
        with suppress(ExecutorShutdown):  # the next read says so; this one has its item
            self._step_ahead(self._buffer)
        try:
            return step.value()
        finally:
            del step  # it holds the error, whose traceback holds this frame

    def _step_ahead(self, limit: int) -> Future[T] | None:
        """Begin the next step, unless there are `limit` ahead; the first of those ahead."""
        begun = None
        with self._lock:
            under_way = bool(self._ahead) and not self._ahead[-1].done()
            idle = not (under_way or self._closed or self._steps.ended)
            if idle and len(self._ahead) < limit:
                begun = self._submit(self._steps.step)
                self._ahead.append(begun)
            first = self._ahead[0] if self._ahead else None
        if begun is not None:
            begun.add_done_callback(self._stepped)
        return first

    def _stepped(self, _: Future[T]) -> None:
        # In the worker's thread; while the buffer is full the worker is free for others.
        with suppress(ExecutorShutdown):  # the next read says so
            self._step_ahead(self._buffer)

    async def aclose(self) -> None:
        """Close the generator on its worker, after the step that runs; may be called twice.

        Raises, once, what the generator raises when it is closed.
        """
        try:
            await self._close()
        except BaseException:
            # After Ctrl-C, or a cancellation of asyncio's own, which no scope holds off: the wait
            # alone ends.
            if not self._ended.done():
                self._ended.add_done_callback(partial(log_failure, "a generator"))
            raise

    async def _close(self) -> None:
        ended = self._begin_close()
        # Without a loop it is driven by `aiopar.wait`, which nobody cancels.
        shield = anyio.CancelScope(shield=True) if in_event_loop() else nullcontext()
        with shield:
            await collect_all([ended])
        self._ended = collect_all(())  # the traceback of what is raised now leads here
        try:
            ended.value()
        finally:
            del ended

    def _begin_close(self) -> Future[Any]:
        """Have the generator closed after the steps under way; once begun, it goes on by itself."""
        with self._lock:
            begun, self._closed = self._closed, True
            under_way = list(self._ahead)
            self._ahead.clear()
        if not begun:
            collect_all(under_way).add_done_callback(self._close_steps)
        return self._ended

    def _close_steps(self, _: object) -> None:
        if not self._steps.suspended:
            self._ended.set_result(None)
            return
        try:
            self._submit(self._steps.close).add_done_callback(self._steps_closed)
        except ExecutorShutdown:
            self._close_aside()

    def _steps_closed(self, closed: Future[Any]) -> None:
        if closed.cancelled():  # by a shutdown
            self._close_aside()
        elif (error := closed.exception()) is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
            del error

    def _close_aside(self) -> None:
        # No worker is left. A thread all the same, for on this one may be a loop, or its state that
        # of anybody.
        try:
            threading.Thread(target=self._close_here, name="aiopar-iterate").start()
        except RuntimeError:  # there can be no more, as at the interpreter's end
            self._close_here()

    def _close_here(self) -> None:
        try:
            self._steps.close()
        except BaseException as error:  # noqa: BLE001  # whatever it is, who closes gets it
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await close_fully(self._close)

    def __del__(self) -> None:
        if not self._closed:
            self._begin_close().add_done_callback(partial(log_failure, "a generator"))
