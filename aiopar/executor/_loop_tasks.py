"""Tasks and timers on asyncio or trio that belong to no task group, as anyio's would."""

import asyncio
import contextvars
import sys
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from .._base.thread_state import CallerState
from .._base.tracebacks import logger
from ..futures._wakeup import Waker, in_event_loop, trio_waker, waker_of

if TYPE_CHECKING:
    import trio

_Body: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

Cancel: TypeAlias = Callable[[], object]
"""Cancels a timer or a task that has not ended. Must be called on the loop's thread."""

TaskRef: TypeAlias = weakref.ref[Any]
"""A reference to a task of asyncio or trio; two references to one task are equal."""


class Tasks:
    """Tasks on the event loop of the thread that makes this object, under the state of `caller`."""

    def __init__(self, caller: CallerState) -> None:
        self._caller = caller
        self._loop = asyncio._get_running_loop()
        self._waker: Waker = trio_waker() if self._loop is None else waker_of(self._loop)
        # It keeps asyncio's tasks alive: the loop does not. In trio a task runs in an outer scope,
        # which `cancel` cancels, and an inner scope, which `shield` shields.
        self._running: dict[Any, tuple[Cancel, trio.CancelScope | None]] = {}
        self._was_cancelled = False  # whether a task was cancelled before it was shielded

    @property
    def finished(self) -> bool:
        """Whether the loop is known to be closed: its tasks take no more steps."""
        return self._waker.finished

    @property
    def loop_runs(self) -> bool:
        """Whether the loop runs now, on any thread: else its tasks take no steps."""
        return not self.finished if self._loop is None else self._loop.is_running()

    def spawn(self, fn: _Body, ended: Callable[[], object] = lambda: None) -> None:
        """Run `fn` in a new task; from any thread.

        `fn` may raise only errors for which `must_propagate` is True. `ended` is called when
        the task has ended, also if it was cancelled before its start.
        """
        if not self._runs_here():
            self._waker.post(partial(self.spawn, fn, ended))
        elif self._loop is None:
            self._spawn_in_trio(fn, ended)
        else:
            self._spawn_in_asyncio(self._loop, fn, ended)

    def _runs_here(self) -> bool:
        running = asyncio._get_running_loop()
        if running is not None or self._loop is not None:
            return running is self._loop
        return in_event_loop() and trio_waker() is self._waker

    def _spawn_in_asyncio(
        self, loop: asyncio.AbstractEventLoop, fn: _Body, ended: Callable[[], object]
    ) -> None:
        task = loop.create_task(self._caller.drive(fn), context=self._caller.context())
        self._running[task] = task.cancel, None

        def done(task: asyncio.Task[None]) -> None:
            del self._running[task]
            ended()

        task.add_done_callback(done)

    def _spawn_in_trio(self, fn: _Body, ended: Callable[[], object]) -> None:
        caller = self._caller
        trio_module = sys.modules["trio"]
        scope: trio.CancelScope = trio_module.CancelScope()
        # `shield` cannot make the inner scope: its scope would be inside those that an async
        # generator holds open from one item to the next.
        inner: trio.CancelScope = trio_module.CancelScope()

        async def run(fn: _Body, ended: Callable[[], object]) -> None:
            try:
                with scope, inner:
                    await caller.drive(fn)
            except trio_module.Cancelled:
                # The run ends, or a generator has left a scope that it held open at a `yield`.
                # Nothing else would catch this error, which would end the run.
                pass
            finally:
                del self._running[trio_module.lowlevel.current_task()]
                ended()
                del fn, ended  # as in `CallerState.drive`

        try:
            task = trio_module.lowlevel.spawn_system_task(run, fn, ended, context=caller.context())
        except RuntimeError:  # the run is about to end: nothing happens, as on a closed loop
            return
        self._running[task] = scope.cancel, inner

    def call_soon(self, fn: Callable[[], object]) -> None:
        """Call `fn` soon on the loop's thread, outside any task; from any thread."""
        self._waker.post(fn)

    def cancel(self) -> None:
        """Cancel all tasks that are not shielded, soon; from any thread."""
        self._waker.post(self._cancel)

    def _cancel(self) -> None:
        for cancel, _ in tuple(self._running.values()):
            cancel()

    def shield(self) -> None:
        """Shield the calling task from `cancel` and from the end of the trio run."""
        on_trio = self._loop is None
        task: Any
        task = sys.modules["trio"].lowlevel.current_task() if on_trio else asyncio.current_task()
        _, inner = self._running.get(task, (None, None))
        if inner is not None:
            inner.shield = True
        elif task in self._running:  # a scope of anyio would keep the task of a closed loop forever
            self._running[task] = (lambda: None), None
            self._was_cancelled = task.cancelling() > 0
            # A task group of asyncio would cancel the task once more, since CPython 3.13.
            while task.uncancel():
                pass

    def cancel_requested(self) -> bool:
        """Whether the running task was cancelled; False if only its code raised `CancelledError`.

        Always True on trio, where no code can raise a cancellation.
        """
        in_asyncio = asyncio._get_running_loop() is not None
        task = asyncio.current_task() if in_asyncio else None
        return task is None or task.cancelling() > 0 or self._was_cancelled

    @staticmethod
    def must_propagate(error: BaseException) -> bool:
        """Whether a task must raise `error`: a cancellation, or an error that ends the loop.

        Any other error would end a trio run.
        """
        return is_cancellation(error) or isinstance(error, (KeyboardInterrupt, SystemExit))

    async def close(self, iterator: Any, what: str) -> None:
        """Close an async iterator, if it can be closed, as the last step of the calling task.

        The task is shielded from now on. An error is logged, with `what` as the iterator's name.
        """
        aclose = getattr(iterator, "aclose", None)
        if aclose is None or self.finished:  # the collected task of a closed loop cannot wait
            return
        self.shield()  # a later cancellation must not reach the iterator
        try:
            await aclose()
        except Exception as error:  # noqa: BLE001  # nothing reads the iterator any more
            logger.error("%s failed when it was closed", what, exc_info=error)
        except BaseExceptionGroup as group:
            # A task group in a generator wraps the `GeneratorExit` of `aclose`.
            rest = group.split(GeneratorExit)[1]
            if isinstance(rest, Exception):
                logger.error("%s failed when it was closed", what, exc_info=rest)
            elif rest is not None:
                raise


def is_cancellation(error: BaseException) -> bool:
    """Whether the running loop cancels a task with `error`; False if no loop runs."""
    # anyio's function works only within a task, but the garbage collector may end a task anywhere.
    if asyncio._get_running_loop() is not None:
        return isinstance(error, asyncio.CancelledError)
    return in_event_loop() and isinstance(error, sys.modules["trio"].Cancelled)


def call_later(seconds: float, fn: Callable[[], object]) -> Cancel:
    """Call `fn` outside any task on this thread's loop, after `seconds`; without a loop, never."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        # In an empty context: asyncio keeps the context of a cancelled timer until its time.
        return loop.call_later(seconds, fn, context=contextvars.Context()).cancel
    if not in_event_loop():  # the caller is closed after its loop has ended
        return lambda: None
    trio_module = sys.modules["trio"]
    scope: trio.CancelScope = trio_module.CancelScope()

    async def run() -> None:
        with scope:
            await trio_module.sleep(seconds)
        if not scope.cancelled_caught:
            fn()

    trio_module.lowlevel.spawn_system_task(run)
    return scope.cancel


class Repeating:
    """Calls `fn` outside any task on this thread's loop every `seconds`, until it is cancelled."""

    def __init__(self, seconds: float, fn: Callable[[], object]) -> None:
        self._seconds = seconds
        self._fn = fn
        self._due = monotonic() + seconds
        self._cancel_next = call_later(seconds, self._fire)

    @property
    def late(self) -> float:
        """How many seconds ago the next call was due; while `fn` runs, the running call."""
        return monotonic() - self._due

    def cancel(self) -> None:
        """Call `fn` no more. Must be called on the loop's thread."""
        self._cancel_next()

    def _fire(self) -> None:
        due = monotonic() + self._seconds
        self._cancel_next = call_later(self._seconds, self._fire)
        self._fn()
        self._due = due


def current_task() -> TaskRef | None:
    """The running task; None outside tasks."""
    task: Any = None
    if asyncio._get_running_loop() is not None:
        task = asyncio.current_task()
    elif in_event_loop():
        task = sys.modules["trio"].lowlevel.current_task()
    return None if task is None else weakref.ref(task)


def has_ended(task: TaskRef) -> bool:
    """Whether the task takes no more steps."""
    known = task()
    if known is None:
        return True
    if isinstance(known, asyncio.Future):
        return known.done()
    nursery = known.parent_nursery
    return nursery is None or known not in nursery.child_tasks
