"""How completions reach event loops: one queue per loop, and one wake-up for many completions."""

import asyncio
import contextvars
import functools
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from .._base.forking import after_fork_in_child, held_across_fork

if TYPE_CHECKING:
    import trio


F = TypeVar("F", bound=Callable[..., Any])

_unprotected: dict[Any, None] = {}


def ki_protected(fn: F) -> F:
    """Let trio raise no KeyboardInterrupt inside `fn`, but at the next checkpoint of its main task.

    For functions on the loop's thread whose steps belong together. They must not block the thread.
    """
    _unprotected[fn] = None
    return fn


class Waker:
    """The queue of callbacks of one event loop; subclasses know how to wake the loop."""

    __slots__ = ("__weakref__", "_armed", "_posted")

    def __init__(self) -> None:
        self._posted: deque[Callable[[], object]] = deque()
        self._armed = False

    def post(self, deliver: Callable[[], object]) -> None:
        """Call `deliver` soon on the loop's thread, outside any task; from any thread.

        A closed loop ignores it. If Ctrl-C interrupts `deliver`, it is called again.
        """
        # Append, then look at the flag; `_drain` disarms, then pops. The deque's own lock orders
        # this append and that first pop, also without a GIL: either the drain finds the callback,
        # or this thread finds the flag disarmed. A second wake-up finds an empty queue.
        try:
            self._posted.append(deliver)
            if not self._armed:
                self._armed = True
                self._wake()
        except BaseException:  # Ctrl-C between two of these steps
            self._wake_again()
            raise

    @property
    def finished(self) -> bool:
        """Whether the loop is known to be closed: it ignores what is posted."""
        raise NotImplementedError

    def _wake(self) -> None:
        raise NotImplementedError

    def _wake_again(self) -> None:
        """Wake the loop after an interruption: callbacks may wait in the queue."""
        self._armed = True
        self._wake()

    def _woken(self) -> None:
        """Note that the loop has seen the wake-up."""

    def _drain(self) -> None:
        try:
            self._woken()
            self._armed = False
            # First a `popleft`, which takes the deque's lock (see `post`); `len` does not take it.
            if self._deliver_oldest():
                # A later post wakes the loop again, so that a fast worker does not hold the loop.
                for _ in range(len(self._posted)):
                    self._deliver_oldest()
        except BaseException:  # Ctrl-C: if the loop goes on, it delivers the rest
            self._wake_again()
            raise

    def _deliver_oldest(self) -> bool:
        """Deliver what was posted first; False if there is nothing."""
        posted = self._posted
        try:
            # `popleft` would lose its result if Ctrl-C came when it returns.
            deliver = posted[0]
        except IndexError:
            return False
        try:
            del posted[0]
            deliver()
        except Exception:
            raise
        except BaseException:  # Ctrl-C
            posted.appendleft(deliver)
            raise
        return True

    def _forget(self) -> None:
        """Drop what was posted: the loop is closed."""
        self._posted.clear()
        self._armed = False


# An eventfd is never closed, but used again by a later loop. A worker that still runs for a closed
# loop may write at any time: the number of a closed descriptor may belong to another file by then,
# while a late write to an eventfd only wakes a loop for nothing.
_spare_eventfds: list[int] = []


class _AsyncioWaker(Waker):
    """Wakes an asyncio loop by an eventfd, which is much faster than the loop's own method."""

    __slots__ = ("_fd", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = weakref.ref(loop)
        self._fd: int | None = None
        """None if the system has no eventfd, or the loop watches no file descriptors."""
        if not hasattr(os, "eventfd"):
            return
        try:
            self._fd = _spare_eventfds.pop()
        except IndexError:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            # In an empty context: the loop keeps the context in which a reader is added.
            contextvars.Context().run(loop.add_reader, self._fd, self._drain)
        except BaseException as error:
            self.release()
            if not isinstance(error, NotImplementedError):
                raise

    @property
    def finished(self) -> bool:
        loop = self._loop()
        return loop is None or loop.is_closed()

    def release(self, running: asyncio.AbstractEventLoop | None = None) -> None:
        """Give back the eventfd; `running` is the loop of the waker if that runs."""
        if self._fd is not None:
            if running is not None:
                running.remove_reader(self._fd)
            _spare_eventfds.append(self._fd)
            self._fd = None

    def _wake(self) -> None:
        fd, loop = self._fd, self._loop()  # read once: another thread may release the eventfd
        try:
            if fd is not None:
                os.eventfd_write(fd, 1)
            elif loop is not None:
                loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            if not self.finished:
                raise
        if self.finished:  # with work in flight
            self._forget()

    def _woken(self) -> None:
        if self._fd is not None:
            with suppress(BlockingIOError):  # an earlier read took this wake-up too
                os.eventfd_read(self._fd)


class _TrioWaker(Waker):
    """Wakes a trio run."""

    __slots__ = ("_finished", "_run_finished", "_token")

    def __init__(self, token: "trio.lowlevel.TrioToken") -> None:
        super().__init__()
        self._token = token
        self._finished = False
        # Destructors may post at the interpreter's exit, when the module is gone.
        self._run_finished: type[BaseException] = sys.modules["trio"].RunFinishedError

    @property
    def finished(self) -> bool:
        return self._finished  # only a failed wake-up shows that a run has ended

    def _wake(self) -> None:
        try:
            self._token.run_sync_soon(self._drain)
        except self._run_finished:  # with work in flight
            self._finished = True
            self._forget()


_wakers: dict[int, _AsyncioWaker] = {}
"""The waker of each asyncio loop, by the loop's `id`."""
_lock = held_across_fork()


def in_event_loop() -> bool:
    """Whether the calling thread runs an event loop, where nothing may block."""
    if asyncio._get_running_loop() is not None:
        return True
    # While another thread imports trio, the module may lack the function; no trio run exists then.
    in_trio_run = getattr(sys.modules.get("trio.lowlevel"), "in_trio_run", None)
    return in_trio_run is not None and bool(in_trio_run())


def waker_of(loop: asyncio.AbstractEventLoop) -> Waker:
    """The waker of a running asyncio loop; called on its thread."""
    waker = _wakers.get(id(loop))
    if waker is None or waker._loop() is not loop:
        with _lock:
            _release_finished()
            made = _AsyncioWaker(loop)
            # The garbage collector may have closed a coroutine meanwhile, which made a waker.
            waker = _wakers.setdefault(id(loop), made)
            if waker is not made:
                made.release(loop)
    return waker


def _release_finished() -> None:
    # A loop tells nobody that it closes, so the next loop cleans up.
    for key, waker in list(_wakers.items()):
        # The garbage collector may have run meanwhile, and have registered a loop with this `id`.
        if waker.finished and key in _wakers and _wakers[key] is waker:
            del _wakers[key]
            waker._forget()  # what was posted after the loop's last turn
            waker.release()


@functools.cache
def _trio_variable() -> "trio.lowlevel.RunVar[_TrioWaker]":
    return sys.modules["trio"].lowlevel.RunVar("aiopar_waker")  # type: ignore[no-any-return]


def trio_waker() -> Waker:
    """The waker of the trio run of the calling thread."""
    for fn in _unprotected.copy():
        # trio keeps a table of protected functions.
        sys.modules["trio"].lowlevel.enable_ki_protection(fn)
        _unprotected.pop(fn, None)
    variable = _trio_variable()  # kept by the run, and gone with it
    try:
        return variable.get()
    except LookupError:
        waker = _TrioWaker(sys.modules["trio"].lowlevel.current_trio_token())
        variable.set(waker)
        return waker


def waker_here() -> Waker | None:
    """The waker of the event loop that the calling thread runs; None if it runs none."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        return waker_of(loop)
    return trio_waker() if in_event_loop() else None


@after_fork_in_child
def _forget_after_fork() -> None:
    # The child shares the parent's eventfds: reading one would swallow the parent's wake-ups.
    _wakers.clear()
    _spare_eventfds.clear()


class Awaiter:
    """One wait of one task."""

    __slots__ = ("waker",)

    waker: Waker
    on_trio = False

    def __await__(self) -> Generator[Any, Any, object]:
        """Wait, once; the task's loop may cancel the wait."""
        raise NotImplementedError

    def deliver(self) -> None:
        """End the wait, unless it has ended; on the loop's thread."""
        raise NotImplementedError

    def wake(self) -> None:
        """End the wait soon, unless it has ended; from any thread."""
        self.waker.post(self.deliver)


class _AsyncioAwaiter(Awaiter):
    __slots__ = ("_resumed",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waker = waker_of(loop)
        self._resumed: asyncio.Future[None] = asyncio.Future(loop=loop)

    def __await__(self) -> Generator[Any, Any, object]:
        return self._resumed.__await__()

    def deliver(self) -> None:
        try:
            if not self._resumed.done():
                self._resumed.set_result(None)
        except asyncio.InvalidStateError:
            return  # a Ctrl-C between `done` and `set_result` has cancelled the main task


class _TrioAwaiter(Awaiter):
    __slots__ = ("_resumed",)

    on_trio = True

    def __init__(self) -> None:
        self.waker = trio_waker()
        self._resumed: trio.Event = sys.modules["trio"].Event()

    def __await__(self) -> Generator[Any, Any, object]:
        return self._resumed.wait().__await__()

    def deliver(self) -> None:
        self._resumed.set()


def awaiter_here() -> Awaiter | None:
    """An awaiter for the running task; None if the calling thread runs no event loop."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        return _AsyncioAwaiter(loop)
    return _TrioAwaiter() if in_event_loop() else None


async def delivered() -> None:
    """Wait until the running loop has delivered all that was posted to it so far."""
    awaiter = awaiter_here()
    if awaiter is not None:
        awaiter.wake()
        await awaiter
