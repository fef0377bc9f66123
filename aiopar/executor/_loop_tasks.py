"""Tasks of either kind of event loop: which one runs, and whether one has ended."""

import asyncio
import functools
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from .._base.thread_state import CallerState
from .._base.tracebacks import logger
from ..futures._wakeup import Waker, in_event_loop, trio_waker, waker_of

if TYPE_CHECKING:
    import trio

import contextvars
from collections.abc import Awaitable
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trio

import weakref

_Body: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class Tasks:
    """Tasks on the event loop that runs in the thread where this is made."""

    def __init__(self, caller: CallerState) -> None:
        self._caller = caller
        self._loop = asyncio._get_running_loop()
        self._waker: Waker = trio_waker() if self._loop is None else waker_of(self._loop)
        # Also keeps asyncio's tasks alive: the loop itself refers to them weakly.
        self._cancels: set[Callable[[], object]] = set()
        self._shielded: set[Callable[[], object]] = set()
        self._inner_scopes: dict[trio.lowlevel.Task, trio.CancelScope] = {}
        """Of trio's: each within the one by which its task is cancelled."""

    @property
    def finished(self) -> bool:
        """Whether the loop is closed, as far as it tells: those that had not ended never will."""
        return self._waker.finished

    def soon(self, fn: Callable[[], object]) -> None:
        """Call `fn` on the loop's thread; from any thread. A closed loop takes no notice."""
        self._waker.post(_Posted(fn))

    def spawn(
        self, fn: _Body, ended: Callable[[], object], caller: CallerState | None = None
    ) -> None:
        """Run a coroutine that raises nothing; from any thread.

        Args:
            fn: The coroutine function; the caller's state is put on for each of its steps.
            ended: Called when it has ended, also if it was cancelled before it began.
            caller: Whose state that is, if not that of who made this.
        """
        caller = caller or self._caller
        if not self._runs_here():
            self.soon(functools.partial(self.spawn, fn, ended, caller))
        elif self._loop is None:
            self._spawn_in_trio(fn, ended, caller)
        else:
            self._spawn_in_asyncio(self._loop, fn, ended, caller)

    def _runs_here(self) -> bool:
        """Whether the loop runs in the calling thread, which may run another one by now."""
        running = asyncio._get_running_loop()
        if running is not None or self._loop is not None:
            return running is self._loop
        return in_event_loop() and trio_waker() is self._waker

    def _spawn_in_asyncio(
        self,
        loop: asyncio.AbstractEventLoop,
        fn: _Body,
        ended: Callable[[], object],
        caller: CallerState,
    ) -> None:
        task = loop.create_task(caller.drive(fn), context=caller.context())
        self._cancels.add(task.cancel)

        def done(_: object) -> None:
            self._cancels.discard(task.cancel)
            self._shielded.discard(task.cancel)
            ended()

        task.add_done_callback(done)

    def _spawn_in_trio(self, fn: _Body, ended: Callable[[], object], caller: CallerState) -> None:
        trio_module = sys.modules["trio"]
        scope: trio.CancelScope = trio_module.CancelScope()
        self._cancels.add(scope.cancel)

        async def run(fn: _Body, ended: Callable[[], object]) -> None:
            task = trio_module.lowlevel.current_task()
            # Around all that a generator enters, and so left after it. One made where it is to be
            # shielded would stand inside those that it holds open from one item to the next.
            inner = self._inner_scopes[task] = trio_module.CancelScope()
            try:
                with scope, inner:
                    await caller.drive(fn)
            except trio_module.Cancelled:
                # By the end of the run; or by a scope that a generator held at a `yield`, and has
                # left since. Nobody would catch that: it would end the run.
                pass
            finally:
                del self._inner_scopes[task]
                self._cancels.discard(scope.cancel)
                ended()
                del fn, ended  # as in `CallerState.drive`

        trio_module.lowlevel.spawn_system_task(run, fn, ended, context=caller.context())

    @staticmethod
    def is_the_loops(error: BaseException) -> bool:
        """Whether one of them that was left to `error` has to raise it all the same.

        Its loop then knows that it was cancelled, or ends. Any other error would end trio's.
        """
        return is_cancellation(error) or isinstance(error, (KeyboardInterrupt, SystemExit))

    def shield(self) -> None:
        """Called by one of them: `cancel` does not reach it any more, nor the end of trio's run."""
        if self._loop is None:
            self._inner_scopes[sys.modules["trio"].lowlevel.current_task()].shield = True
        # No scope of anyio's: that would keep a task whose loop was closed under it for ever.
        elif (task := asyncio.current_task()) is not None:
            self._shielded.add(task.cancel)

    async def close(self, iterator: Any, what: str) -> None:
        """Awaited by one of them at its end: close an async iterator, if it can be closed.

        Args:
            iterator: Its `finally` blocks are not reached by a cancellation any more.
            what: It is, for the log, where its error goes: nobody waits for it any more.
        """
        aclose = getattr(iterator, "aclose", None)
        if aclose is None or self.finished:  # then nothing can be awaited: the collector came here
            return
        # The task may be here by itself, before a cancellation comes: that must not come into the
        # iterator.
        self.shield()
        try:
            await aclose()
        except Exception as error:  # noqa: BLE001  # nobody reads any more
            logger.error("%s failed when it was closed", what, exc_info=error)
        except BaseExceptionGroup as group:
            # A task group that a generator is left in raises its `GeneratorExit` in one.
            rest = group.split(GeneratorExit)[1]
            if isinstance(rest, Exception):
                logger.error("%s failed when it was closed", what, exc_info=rest)
            elif rest is not None:
                raise

    def cancel(self) -> None:
        """Cancel all of them, soon; from any thread."""
        self.soon(self._cancel)

    def _cancel(self) -> None:
        for cancel in self._cancels - self._shielded:
            cancel()


def is_cancellation(error: BaseException) -> bool:
    """Whether it is how the running loop cancels a task.

    Where the garbage collector closes what a closed loop has left behind, there may be none.
    """
    return in_event_loop() and isinstance(error, anyio.get_cancelled_exc_class())


class _Posted:
    __slots__ = ("_fn",)

    def __init__(self, fn: Callable[[], object]) -> None:
        self._fn = fn

    def deliver(self) -> None:
        self._fn()


Cancel = Callable[[], object]
"""Takes the order back; afterwards it does nothing. To be called on the loop's thread."""


def call_later(seconds: float, fn: Callable[[], object]) -> Cancel:
    """Call `fn` on this thread's loop, outside of any task, after `seconds`."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        # In an empty context: asyncio keeps that of a cancelled timer until its time has come.
        return loop.call_later(seconds, fn, context=contextvars.Context()).cancel
    return _call_later_in_trio(seconds, fn)


async def within(seconds: float, fn: Callable[[], Awaitable[object]]) -> float | None:
    """Await `fn()`; the seconds that are left then. None: it took longer, and was cancelled."""
    began = monotonic()
    with anyio.CancelScope() as scope:
        # Not by its own deadline, whose timer keeps the context until its time has come.
        expiry = call_later(seconds, scope.cancel)
        try:
            await fn()
            return max(0.0, seconds - (monotonic() - began))
        finally:
            expiry()
    return None


def _call_later_in_trio(seconds: float, fn: Callable[[], object]) -> Cancel:
    trio_module = sys.modules["trio"]
    scope: trio.CancelScope = trio_module.CancelScope()

    async def run() -> None:
        with scope:
            await trio_module.sleep(seconds)
        if not scope.cancelled_caught:
            fn()

    trio_module.lowlevel.spawn_system_task(run)
    return scope.cancel


TaskRef: TypeAlias = weakref.ref[Any]
"""Of a task of asyncio's or trio's; two of one task are equal."""


def current_task() -> TaskRef | None:
    """The task that runs this; None outside of tasks."""
    task: Any = None
    if asyncio._get_running_loop() is not None:
        task = asyncio.current_task()
    elif in_event_loop():
        task = sys.modules["trio"].lowlevel.current_task()
    return None if task is None else weakref.ref(task)


def has_ended(task: TaskRef) -> bool:
    """Whether it takes no more steps."""
    known = task()
    if known is None:
        return True
    if isinstance(known, asyncio.Future):
        return known.done()
    nursery = known.parent_nursery
    return nursery is None or known not in nursery.child_tasks
