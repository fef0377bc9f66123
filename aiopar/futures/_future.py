"""`Future`: a future of `concurrent.futures` that can be awaited; `wrap_future` for torch's."""

import asyncio
import concurrent.futures
import sys
import threading
from _thread import RLock
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, InvalidStateError, _base
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar, overload

import torch

from .._base.arguments import check_callable
from .._base.devices import result_events
from .._base.tracebacks import awaitable_error, log_callback_error, own_traceback
from .._base.tree import tensors
from ..errors import BlockingWaitError
from ._wakeup import Awaiter, awaiter_here, in_event_loop, ki_protected

T = TypeVar("T")
U = TypeVar("U")

PENDING, RUNNING, FINISHED = _base.PENDING, _base.RUNNING, _base.FINISHED
# For `concurrent.futures.wait` a future that is only `_base.CANCELLED` is not done.
CANCELLED = _base.CANCELLED_AND_NOTIFIED
DONE = frozenset((CANCELLED, FINISHED))
_MAX_NESTED = 50


class QueuedCall(Protocol):
    """The call whose result a future will hold."""

    def drop(self) -> None:
        """Release what the call holds: the future was cancelled."""

    def leave(self) -> None:
        """Note that nobody waits for the running call any more."""


class ThreadHooks(threading.local):
    """What a thread calls before it blocks, if it serves a worker."""

    help: Callable[["Future[Any]"], None] | None = None
    """Called before a wait for one future: runs the call of the future here if it is pending."""

    about_to_block: Callable[[], None] = staticmethod(lambda: None)
    """Called before any wait: lets another thread serve the worker's queues.

    Also called before a task waits, because the event loop may run inside a call on a worker.
    Raises RuntimeError if the process can start no more threads.
    """

    driving = False
    """Whether `aiopar.wait` drives a coroutine on this thread."""

    called_back = False
    """Whether this thread has called callbacks, which may have changed its torch state."""

    nested = 0
    """How many callbacks this thread is in: a callback may complete a future that has callbacks."""

    def __init__(self) -> None:
        self.postponed: deque[Future[Any]] = deque()
        """The futures whose callbacks run when the outermost callback has returned."""

    def clear(self) -> None:
        """Remove the hooks: the thread serves no worker any more."""
        for hook in ("help", "about_to_block"):
            self.__dict__.pop(hook, None)


thread_hooks = ThreadHooks()


class Future(concurrent.futures.Future[T]):
    """The result of a call that runs elsewhere; threads and tasks can wait for it.

    It *is* a `concurrent.futures.Future`: `concurrent.futures.wait`, `as_completed`,
    `asyncio.wrap_future`, `asyncio.gather` and `asyncio.wait_for` accept it. It can be awaited any
    number of times, by any number of tasks, in any event loop (asyncio or trio). It has the methods
    of `torch.futures.Future`.

    Differences from `torch.futures.Future`: it can be awaited and cancelled. `wait` on an event
    loop's thread raises instead of blocking the loop. Errors keep their class (torch's `then`
    raises a RuntimeError that quotes them). `value` of a future that is not done raises
    `InvalidStateError`. `then` skips its function if the future that it returned was cancelled.

    `asyncio.wait`, `asyncio.create_task` and `asyncio.isfuture` need `asyncio.wrap_future(future)`.

    A cancelled `await` cancels the call only if the call has not started, no other task awaits the
    future, and nothing else depends on it: no callback, no `then`, no thread in `result()`. A
    running call runs on. If `cancel` is called, `await` raises `concurrent.futures.CancelledError`,
    which is not `asyncio.CancelledError`.

    Example:
        >>> import asyncio, aiopar
        >>> async def main():
        ...     future = aiopar.fork(pow, 2, 10)
        ...     return await future, await future.then(lambda done: done.value() + 1)
        >>> asyncio.run(main())
        (1024, 1025)
    """

    call: QueuedCall | None = None
    """The call behind the future, until the future is done."""
    _blocked_threads = 0

    def __init__(self) -> None:
        # The parent's `__init__` is not called: it makes a Condition, which is slow, and few
        # threads ever block on a future. `_condition` makes one for the first such thread.
        self._lazy_condition: threading.Condition | None = None
        # The mutex guards all writes. `_state` is read without the mutex: a final state is written
        # last, so a thread that reads a final state also finds the result. Re-entrant: while a
        # thread holds the mutex, the garbage collector may close a coroutine that awaits this
        # future. `threading.RLock`, a Python function, is slower.
        self._mutex = RLock()
        self._state = PENDING
        self._result: T = None  # type: ignore[assignment]  # set before it is read
        self._exception: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._waiters: list[Any] = []  # of `concurrent.futures.wait` and `as_completed`
        self._done_callbacks: list[Callable[[Any], object]] = []
        self._awaiters: list[Awaiter] = []

    def __reduce__(self) -> NoReturn:
        # A copy would share the lock, and would never be completed.
        raise TypeError("a future can be neither copied nor pickled")

    def _made_condition(self) -> threading.Condition:
        # The first look takes no mutex. `concurrent.futures.wait` looks again with the mutex held.
        if self._lazy_condition is None:
            with self._mutex:
                if self._lazy_condition is None:
                    self._lazy_condition = threading.Condition(self._mutex)
        return self._lazy_condition

    _condition: threading.Condition = property(_made_condition)  # type: ignore[assignment]  # lazy

    # State

    def done(self) -> bool:
        """Whether the call has ended or was cancelled."""
        return self._state in DONE

    def cancelled(self) -> bool:
        """Whether the call was cancelled before it started."""
        return self._state == CANCELLED

    def running(self) -> bool:
        """Whether the call has started and not ended."""
        return self._state == RUNNING

    def claim(self) -> bool:
        """Change from pending to running. Only the caller that gets True may run the call."""
        with self._mutex:
            if self._state != PENDING:
                return False
            self._state = RUNNING
            return True

    def set_running_or_notify_cancel(self) -> bool:
        """Change from pending to running; return False if the future was cancelled.

        Raises:
            RuntimeError: The future is running or done.
        """
        if not (claimed := self.claim()) and not self.cancelled():
            raise RuntimeError(f"the future is already {self._state.lower()}")
        return claimed

    # Completion

    def set_result(self, result: T) -> None:
        """Complete the future with a value.

        Raises:
            InvalidStateError: The future is done already.
        """
        if not self._complete(FINISHED, result):
            raise InvalidStateError(f"the future is already {self._state.lower()}")

    def set_exception(self, exception: BaseException | None) -> None:
        """Complete the future with an exception, which every waiter gets.

        Raises:
            InvalidStateError: The future is done already.
            TypeError: `exception` is not an exception.
        """
        if not isinstance(exception, BaseException):
            raise TypeError(f"expected an exception instance, got {exception!r}")
        if not self._fail(exception):
            raise InvalidStateError(f"the future is already {self._state.lower()}")

    def _fail(self, error: BaseException, then: Callable[[], object] | None = None) -> bool:
        """Complete the future with an error; False if the future was done already.

        `then` is called before callbacks; after an interruption perhaps twice.
        """
        return self._complete(FINISHED, error=awaitable_error(error), then=then)

    def _fail_as(self, failed: "Future[Any]") -> None:
        """Complete the future with the error of `failed` and its first traceback."""
        self._complete(FINISHED, error=failed._exception, traceback=failed._traceback)

    def cancel(self) -> bool:
        """Cancel the call if it has not started; every waiter gets `CancelledError`.

        False: the call runs on, or has ended. See also `kill_after` of `ProcessExecutor`.
        """
        if self._complete(CANCELLED) or self.cancelled():
            return True
        call = self.call  # read once: the call may end meanwhile
        if call is not None:
            call.leave()
        return False

    @ki_protected
    def _complete(
        self,
        state: str,
        result: Any = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
        then: Callable[[], object] | None = None,
    ) -> bool:
        try:
            with self._mutex:
                if self._state in DONE or (self._state == RUNNING and state == CANCELLED):
                    return False
                self._result = result
                if error is not None:
                    self._exception = error
                    self._traceback = traceback or error.__traceback__
                if self._state == RUNNING:
                    self.call = None  # there is nothing to drop
                self._state = state
                if self._lazy_condition is not None:
                    self._notify_threads(self._lazy_condition)
            self._tell(then)
        except BaseException:  # Ctrl-C between two of these steps
            if self._state in DONE:
                self._tell(then)
            raise
        return True

    def _tell(self, then: Callable[[], object] | None) -> None:
        """Drop the call, wake the tasks, call the callbacks.

        After an interruption, a second run does the steps that are left.
        """
        call = self.call
        if call is not None:
            call.drop()
            self.call = None
        for awaiter in self._awaiters:  # nothing changes the list when the future is done
            awaiter.wake()
        self._awaiters = []
        if then is not None:
            then()
        if self._done_callbacks:
            self._call_callbacks()

    def _notify_threads(self, condition: threading.Condition) -> None:
        for waiter in self._waiters:
            if self._state == CANCELLED:
                waiter.add_cancelled(self)
            elif self._exception is not None:
                waiter.add_exception(self)
            else:
                waiter.add_result(self)
        condition.notify_all()

    # Callbacks

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call `fn(future)` when the future is done: in the completing thread, or now.

        Callbacks are called in the order in which they were added, and their errors are logged.
        Ctrl-C during one of them is raised in the main thread when all were called.
        """
        with self._mutex:
            if self._state not in DONE:
                self._done_callbacks.append(fn)
                return
        self._call_each(iter((fn,)))

    def _remove_done_callback(self, fn: Callable[[Self], object]) -> None:
        with self._mutex:
            if self._state not in DONE:  # else they are being called, and dropped
                # By identity: a user's callback may have an `__eq__` of its own.
                self._done_callbacks = [one for one in self._done_callbacks if one is not fn]

    def _call_callbacks(self) -> None:
        # A chain of `then` may be longer than the stack is deep.
        if thread_hooks.nested == _MAX_NESTED:
            thread_hooks.postponed.append(self)
            return
        callbacks, self._done_callbacks = iter(self._done_callbacks), []
        interrupt: BaseException | None = None
        thread_hooks.called_back = True
        thread_hooks.nested += 1
        try:
            while True:
                try:
                    self._call_each(callbacks)
                    while thread_hooks.nested == 1 and thread_hooks.postponed:
                        thread_hooks.postponed[0]._call_callbacks()
                        del thread_hooks.postponed[0]
                    break
                except BaseException as error:  # noqa: BLE001  # Ctrl-C: after the other callbacks
                    interrupt = interrupt or error
            if interrupt is not None:
                raise interrupt
        finally:
            thread_hooks.nested -= 1
            del interrupt  # its traceback holds this frame

    def _call_each(self, callbacks: Iterator[Callable[[Any], object]]) -> None:
        for callback in callbacks:
            try:
                callback(self)
            except BaseException as error:  # noqa: BLE001  # the next line decides what is raised
                log_callback_error(error, _base.LOGGER, "exception calling callback for %r", self)

    def then(self, fn: Callable[["Future[T]"], U]) -> "Future[U]":
        """Return a future of `fn(self)`, called when this future is done, however it ended.

        Raises:
            TypeError: `fn` is not callable, or is a coroutine function.
        """
        check_callable(fn)
        child: Future[U] = Future()
        # The child refers to the error of `fn`, and the error refers to the frames around `fn`.
        # These frames refer to the child by this list only, which `run` empties: no cycle.
        waiting = [child]

        def run(parent: Future[T]) -> None:
            child = waiting.pop()
            try:
                if child.claim():
                    _complete_by(child, fn, parent)
            finally:
                del child, parent

        child.call = DoneCallback([self], run)
        self.add_done_callback(run)
        return child

    # Waiting. Before a frame raises the error, it drops its reference to the future. Otherwise the
    # traceback of the error refers to the frame, the frame to the future, and that to the error.

    def result(self, timeout: float | None = None) -> T:
        """Return the value, after a wait of at most `timeout` seconds; as `concurrent.futures`.

        Raises:
            TimeoutError: The future is not done by then.
            CancelledError: The future was cancelled; the class is that of `concurrent.futures`.
        """
        try:
            if self._state not in DONE:
                self._block(timeout)
            return self._outcome()
        finally:
            self = None  # type: ignore[assignment]  # noqa: PLW0642

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception or None; waits and raises as `result` does."""
        if self._state not in DONE:
            self._block(timeout)
        if self._state == FINISHED:
            return self._exception
        raise CancelledError if self._state == CANCELLED else TimeoutError

    def value(self) -> T:
        """Return the value of a future that is done, or raise its error.

        Raises:
            InvalidStateError: The future is not done.
        """
        try:
            if self._state not in DONE:
                raise InvalidStateError(f"the future is {self._state.lower()}: await it first")
            return self._outcome()
        finally:
            self = None  # type: ignore[assignment]  # noqa: PLW0642

    def wait(self) -> T:
        """Block this thread until the future is done, and return the value.

        A waiting worker runs a call of its executor itself if the call has not started. So calls
        that wait for calls never deadlock, on any number of workers.

        Raises:
            BlockingWaitError: The future is not done, and this thread runs an event loop.
        """
        try:
            if self._state not in DONE:
                if in_event_loop():
                    raise BlockingWaitError(
                        "wait() would block the event loop of this thread: use `await future`"
                    )
                if thread_hooks.help is not None:
                    thread_hooks.help(self)
            return self.result()
        finally:
            self = None  # type: ignore[assignment]  # noqa: PLW0642

    def _outcome(self) -> T:
        try:
            if self._state == FINISHED:
                if self._exception is not None:
                    # With its first traceback: else the frames of all earlier waiters add up.
                    raise self._exception.with_traceback(self._traceback)
                return self._result
            raise CancelledError if self._state == CANCELLED else TimeoutError
        finally:
            self = None  # type: ignore[assignment]  # noqa: PLW0642

    def _block(self, timeout: float | None) -> None:
        thread_hooks.about_to_block()
        with self._condition:
            self._blocked_threads += 1
            try:
                self._condition.wait_for(self.done, timeout)
            finally:
                self._blocked_threads -= 1

    @ki_protected
    def __await__(self) -> Generator[Any, Any, T]:
        try:
            if self._state not in DONE:
                awaiter = awaiter_here()
                if awaiter is None:
                    if isinstance(sys.exception(), GeneratorExit) and not thread_hooks.driving:
                        # A coroutine is closed after its loop: it must not block.
                        raise GeneratorExit
                    # `aiopar.wait` drives a coroutine, in a worker or a program without a loop.
                    self.wait()
                elif self._add_awaiter(awaiter):
                    try:
                        yield from awaiter.__await__()
                    except BaseException:
                        self._remove_awaiter(awaiter)
                        raise
            if self._exception is not None:
                _free_wrapper(sys._getframe(1))
            return self._outcome()
        finally:
            self = None  # type: ignore[assignment]  # noqa: PLW0642

    def _add_awaiter(self, awaiter: Awaiter) -> bool:
        """Let `awaiter` be woken when the future is done; False if the future is done already."""
        thread_hooks.about_to_block()
        with self._mutex:
            if self._state in DONE:
                return False
            self._awaiters.append(awaiter)
            return True

    def _remove_awaiter(self, awaiter: Awaiter) -> None:
        """Remove the awaiter of a cancelled task, and cancel the call if nothing else needs it."""
        with self._mutex:
            if self._state in DONE or awaiter not in self._awaiters:
                return  # completed meanwhile
            self._awaiters.remove(awaiter)
            if self._awaiters or self._done_callbacks or self._waiters or self._blocked_threads:
                return
            call, started = self.call, self._state == RUNNING
            if not started:
                # With the lock held, so that the next waiter finds the future cancelled.
                self._state, self.call = CANCELLED, None
        if call is not None:
            call.leave() if started else call.drop()


class DoneCallback:
    """The `call` of a future that is completed by `fn`, a callback of other futures.

    When the future is cancelled, `fn` is removed from the others: nothing needs its result.
    """

    def __init__(self, others: Iterable[Future[Any]], fn: Callable[[Future[Any]], object]) -> None:
        self._others = [*others]
        self._fn = fn

    def drop(self) -> None:
        """Remove the callback: cancelled awaits may now cancel the other futures."""
        for other in self._others:
            other._remove_done_callback(self._fn)

    def leave(self) -> None:
        """Do nothing: the callback runs already."""


def _free_wrapper(frame: FrameType) -> None:
    """Clear the frame of asyncio's coroutine around a failed future (`gather`, `wait_for`), soon.

    Otherwise the error's traceback, the frame, the future and the error are a reference cycle.
    """
    loop = asyncio._get_running_loop()
    if loop is not None and frame.f_globals.get("__name__") == "asyncio.tasks":
        loop.call_soon(frame.clear)  # by then the frame has ended, and can be cleared


def running_future() -> Future[Any]:
    """Make a future that nobody can cancel."""
    future: Future[Any] = Future()
    future.claim()
    return future


def _complete_by(child: Future[U], fn: Callable[[Future[T]], U], parent: Future[T]) -> None:
    try:
        result = fn(parent)
    except BaseException as error:  # noqa: BLE001  # every error goes to the child
        if error is parent._exception:
            # Without the frame of `fn`, which refers to the parent.
            error.with_traceback(parent._traceback)
        else:
            own_traceback(error)
        child.set_exception(error)
    else:
        child.set_result(result)
    finally:
        del child, parent


@overload
def wrap_future(future: Future[T] | torch.futures.Future[T]) -> Future[T]: ...


@overload
def wrap_future(future: Any) -> Future[Any]: ...


def wrap_future(future: Any) -> Future[Any]:
    """Make an aiopar future of a future of `torch.futures` or `torch.jit`, or a distributed `Work`.

    The new future has the same value or error. It is done when the tensors of the value are
    complete on their accelerators. It cannot be cancelled, because the work runs already.

    Args:
        future: The future or `Work`. A future of aiopar is returned unchanged.

    Raises:
        TypeError: `future` is something else.

    Example:
        >>> import asyncio, aiopar, torch
        >>> theirs = torch.futures.Future()
        >>> theirs.set_result(3)
        >>> async def main():
        ...     return await aiopar.wrap_future(theirs)
        >>> asyncio.run(main())
        3
    """
    if isinstance(future, Future):
        return future
    theirs = future.get_future() if hasattr(future, "get_future") else future
    if not isinstance(theirs, torch._C.Future):
        raise TypeError(f"expected a torch future or Work, got {type(future).__name__}")
    wrapped: Future[Any] = running_future()

    def finished(done: Any) -> None:
        try:
            result = done.wait()
            # When torch calls back, the current streams are ordered after the computation.
            events = result_events(tensors(result))
        except BaseException as error:  # noqa: BLE001  # every error goes to the awaiter
            # Without this frame and torch's frames, which refer to the error.
            traceback, ours = error.__traceback__, (__name__, "torch.futures")
            while traceback and traceback.tb_frame.f_globals["__name__"] in ours:
                traceback = traceback.tb_next
            wrapped.set_exception(error.with_traceback(traceback))
            return
        if not events:
            wrapped.set_result(result)
            return
        # In a thread, because torch may call back on the loop's thread, with kernels still running.
        in_own_thread("aiopar-wrap_future", partial(_complete_after, events, wrapped, result))

    theirs.add_done_callback(finished)
    return wrapped


def in_own_thread(name: str, fn: Callable[[], object]) -> None:
    """Call `fn` in a new thread, or here if no more threads can be started."""
    try:
        threading.Thread(target=fn, name=name).start()
    except RuntimeError:
        fn()


def _complete_after(events: list[torch.Event], future: Future[Any], result: object) -> None:
    try:
        for event in events:
            event.synchronize()
    except BaseException as error:  # noqa: BLE001  # a kernel's error goes to the awaiter
        future.set_exception(own_traceback(error))
    else:
        future.set_result(result)
