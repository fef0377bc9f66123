"""One `await` of one future, in whatever event loop the calling code runs."""

import asyncio
import contextvars
import functools
import os
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import trio

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

from .._base.forking import after_fork_in_child, held_across_fork

if TYPE_CHECKING:
    import trio


T = TypeVar("T")


class Delivery(Protocol):
    """What is posted to a loop."""

    def deliver(self) -> None:
        """Resume whoever waits; called on the loop's thread, outside of any task."""


class Waker:
    """The completions of one event loop, coalesced."""

    __slots__ = ("__weakref__", "_armed", "_posted")

    def __init__(self) -> None:
        self._posted: deque[Delivery] = deque()
        self._armed = False

    def post(self, delivery: Delivery) -> None:
        """Have `delivery.deliver()` called on the loop's thread, soon; from any thread.

        A loop that is closed takes no notice.
        """
        # Append, then look at the flag; `_drain` disarms, then pops. The deque's own lock puts
        # this append and that first pop in an order, also without a GIL: either the append comes
        # first, and that drain sees it, or the pop does, and this look sees the flag disarmed. Two
        # posters may both wake the loop: the second finds it empty.
        self._posted.append(delivery)
        if not self._armed:
            self._armed = True
            self._wake()

    def put_back(self, delivery: Delivery) -> None:
        """Have an interrupted `delivery` delivered again, before what came after it; by itself."""
        # `_drain`, which is interrupted too, wakes the loop again.
        self._posted.appendleft(delivery)

    @property
    def finished(self) -> bool:
        """Whether the loop is closed, as far as it tells: what is posted to it is lost."""
        raise NotImplementedError

    def _wake(self) -> None:
        raise NotImplementedError

    def _drain(self) -> None:
        self._armed = False
        posted = self._posted
        try:
            # Pop before asking for the length, which does not take the deque's lock.
            delivery = posted.popleft()
        except IndexError:
            return
        try:
            delivery.deliver()
            del delivery  # it may hold a result that is nobody's any more
            # What is posted from here on wakes the loop again: a fast worker must not keep it here.
            for _ in range(len(posted)):
                posted.popleft().deliver()
        except BaseException:
            # Ctrl-C: the others are delivered if the loop runs on.
            self._armed = True
            self._wake()
            raise

    def _forget(self) -> None:
        """The loop is closed: nobody waits for what was posted, and nobody would drain it."""
        self._posted.clear()
        self._armed = False


def resume(
    waiter: "asyncio.Future[T]", result: T | None, error: BaseException | None = None
) -> None:
    """Complete what a task awaits, unless it was cancelled, and take that task's next step now.

    Left to itself the future would resume the task by `call_soon`: a handle, and another round of
    the loop with another look at its selector. A delivery comes to the loop's thread outside of
    any task, so that the step may be taken there and then.
    """
    callbacks = waiter._callbacks
    alone = callbacks is not None and len(callbacks) == 1  # else the loop sees to their order
    if alone:
        [(step, context)] = callbacks
        waiter.remove_done_callback(step)
    elif waiter.done():  # cancelled between completion and wake-up
        return
    if error is None:
        waiter.set_result(result)  # type: ignore[arg-type]  # `cast` is a call
    else:
        waiter.set_exception(error)
    if alone:
        try:
            context.run(step, waiter)
        finally:
            # Should the task end with an error, the frames in its traceback lead to those below
            # it, since CPython 3.12: to this one and its callers, which must not hold the error.
            del waiter, result, error, callbacks, step, context


class _CallSoonWaker(Waker):
    """Wakes asyncio by its public way, where there is no eventfd."""

    __slots__ = ("_loop",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = weakref.ref(loop)

    @property
    def finished(self) -> bool:
        loop = self._loop()
        return loop is None or loop.is_closed()

    def release(self) -> None:
        """Give back what the waker holds of the system; its loop is closed."""

    def _wake(self) -> None:
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            if not self.finished:
                raise
        if self.finished:  # with work in flight
            self._forget()


# An eventfd is never closed but used again for a later loop: a worker that still runs for a
# closed loop may write to it at any time, and a closed descriptor's number may by then belong to a
# stranger's file. A late write here only wakes a loop once for nothing.
_spare_eventfds: list[int] = []


class _EventfdWaker(_CallSoonWaker):
    """Wakes asyncio through an eventfd: less than half the cost of the loop's self-pipe."""

    __slots__ = ("_fd",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        try:
            self._fd = _spare_eventfds.pop()
        except IndexError:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            # In an empty context: the reader would keep that of the task which comes here first.
            contextvars.Context().run(loop.add_reader, self._fd, self._read)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        _spare_eventfds.append(self._fd)

    def _wake(self) -> None:
        os.eventfd_write(self._fd, 1)
        if self.finished:  # with work in flight
            self._forget()

    def _read(self) -> None:
        try:  # noqa: SIM105  # `suppress` costs more than the rest
            os.eventfd_read(self._fd)
        except BlockingIOError:  # woken twice for one
            pass
        self._drain()


class _TrioWaker(Waker):
    """Wakes a trio run."""

    __slots__ = ("_finished", "_run_finished", "_token")

    def __init__(self, token: "trio.lowlevel.TrioToken") -> None:
        super().__init__()
        self._token = token
        self._finished = False
        # At the interpreter's end, when the last destructors post, the module is gone.
        self._run_finished: type[BaseException] = sys.modules["trio"].RunFinishedError

    @property
    def finished(self) -> bool:
        return self._finished  # a run tells nobody that it has ended but who wakes it

    def _wake(self) -> None:
        try:
            self._token.run_sync_soon(self._drain)
        except self._run_finished:  # with work in flight
            self._finished = True
            self._forget()


class _Cached(threading.local):
    """The waker that this thread used last; it knows its loop by weak reference only."""

    waker: _CallSoonWaker | None = None


_cached = _Cached()
_wakers: dict[int, _CallSoonWaker] = {}
_lock = held_across_fork()


def in_event_loop() -> bool:
    """Whether the calling thread runs an event loop, where nothing may block."""
    if asyncio._get_running_loop() is not None:
        return True
    # Another thread may be importing trio just now: a loop that runs has all of it.
    in_trio_run = getattr(sys.modules.get("trio.lowlevel"), "in_trio_run", None)
    return in_trio_run is not None and bool(in_trio_run())


def waker_of(loop: asyncio.AbstractEventLoop) -> Waker:
    """The waker of a running asyncio loop; called on its thread."""
    waker = _cached.waker
    if waker is not None and waker._loop() is loop:
        return waker
    with _lock:
        waker = _wakers.get(id(loop))
        if waker is None or waker._loop() is not loop:
            _release_finished()
            waker = _wakers[id(loop)] = _new_waker(loop)
    _cached.waker = waker
    return waker


def _new_waker(loop: asyncio.AbstractEventLoop) -> _CallSoonWaker:
    if hasattr(os, "eventfd"):
        with suppress(NotImplementedError):  # a loop that watches no file descriptors
            return _EventfdWaker(loop)
    return _CallSoonWaker(loop)


def _release_finished() -> None:
    # A loop tells nobody that it closes: who opens the next one cleans up after the last.
    for key, waker in list(_wakers.items()):
        if waker.finished:
            del _wakers[key]
            waker._forget()  # what was posted after the loop's last turn
            waker.release()


@functools.cache
def _trio_waker() -> "trio.lowlevel.RunVar[_TrioWaker]":
    return sys.modules["trio"].lowlevel.RunVar("aiopar_waker")  # type: ignore[no-any-return]


def trio_waker() -> Waker:
    """The waker of the trio run of the calling thread; called on its thread."""
    # Kept by the run itself, so that it goes with the run.
    variable = _trio_waker()
    try:
        return variable.get()
    except LookupError:
        waker = _TrioWaker(sys.modules["trio"].lowlevel.current_trio_token())
        variable.set(waker)
        return waker


@after_fork_in_child
def _forget_after_fork() -> None:
    # The child shares the parent's eventfds: reading one would swallow the parent's wake-ups.
    _cached.waker = None  # of the forking thread; there is no other
    _wakers.clear()
    _spare_eventfds.clear()


_get_running_loop = asyncio._get_running_loop


class Awaiter(Protocol):
    """A task that waits to be woken."""

    waker: Waker
    """That of the task's loop."""

    @property
    def resumed(self) -> Iterable[Any]:
        """Yielded from, once, it waits; cancelled by the means of the task's loop."""

    def __await__(self) -> Generator[Any, Any, object]:
        """Wait."""

    def wake(self) -> None:
        """End the wait; from any thread, whether or not it still goes on."""

    def deliver(self) -> None:
        """End the wait; on the loop's thread, outside of any task."""


class _LoopAwaiter:
    """An `await` on an asyncio loop."""

    __slots__ = ("resumed", "waker")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waker: Waker = waker_of(loop)
        self.resumed: asyncio.Future[None] = asyncio.Future(loop=loop)

    def __await__(self) -> Generator[Any, Any, object]:
        return self.resumed.__await__()

    def wake(self) -> None:
        self.waker.post(self)

    def deliver(self) -> None:
        resume(self.resumed, None)


class _TrioAwaiter:
    """An `await` in a trio run."""

    __slots__ = ("_event", "waker")

    def __init__(self) -> None:
        self.waker: Waker = trio_waker()
        self._event: trio.Event = sys.modules["trio"].Event()

    @property
    def resumed(self) -> Generator[Any, Any, object]:
        return self._event.wait().__await__()

    def __await__(self) -> Generator[Any, Any, object]:
        return self.resumed

    def wake(self) -> None:
        self.waker.post(self)

    def deliver(self) -> None:
        self._event.set()


def awaiter_here() -> Awaiter | None:
    """An awaiter for the running task; None where the calling thread runs no event loop."""
    loop = _get_running_loop()
    if loop is not None:
        return _LoopAwaiter(loop)
    return _TrioAwaiter() if in_event_loop() else None


async def delivered() -> None:
    """Wait until all that was posted to this task's loop before has been delivered there."""
    awaiter = awaiter_here()
    if awaiter is not None:
        awaiter.wake()  # comes behind it
        await awaiter
