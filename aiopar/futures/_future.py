"""`Future`: a `concurrent.futures.Future` that can be awaited and speaks torch's verbs."""

import concurrent.futures
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, InvalidStateError, _base
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar, cast

from .._base.arguments import check_callable
from .._base.tracebacks import awaitable_error, log_callback_error, own_traceback
from ..errors import BlockingWaitError
from ._wakeup import Awaiter, awaiter_here, in_event_loop

T = TypeVar("T")

PENDING, RUNNING, FINISHED = _base.PENDING, _base.RUNNING, _base.FINISHED
# The last state of a cancellation, at once: a future that is merely `_base.CANCELLED` counts as
# unfinished for `concurrent.futures.wait`, until its executor meets it.
CANCELLED = _base.CANCELLED_AND_NOTIFIED
DONE = frozenset((CANCELLED, FINISHED))


# A callback may complete another future (`then`), whose callbacks are called within it: so many
# deep. Past that they are called when all of these have returned, however long the chain is.
_MAX_NESTING = 50


class _Nesting(threading.local):
    """How deep in callbacks this thread is."""

    def __init__(self) -> None:
        self.depth = 0
        self.postponed: deque[Completion[Any]] = deque()


_nesting = _Nesting()


class QueuedCall(Protocol):
    """The call behind a future that nobody has started."""

    def drop(self) -> None:
        """Let go of function and arguments: the future was cancelled."""


class Completion(concurrent.futures.Future[T]):
    """What happens to a future once: claimed, then completed; or cancelled.

    Waiting for it is `Future`'s part.
    """

    # What most futures neither set nor read is a class attribute: it costs nothing to create.
    # (Slots would save nothing: the parent's instances have a `__dict__`.)
    _traceback: TracebackType | None
    """That of the exception, when it was set; there is none before."""
    _blocked = 0
    _waiters: list[Any] = ()  # type: ignore[assignment]  # none can be added to it
    """Those of `concurrent.futures.wait` and `as_completed`, which come for the Condition first:
    with that each future gets a list of its own."""

    def __init__(self) -> None:
        # Not the parent's: a Condition costs more than all the rest, and few futures are ever
        # waited for by a blocked thread. One plain lock guards the state; the Condition that
        # `concurrent.futures` expects is made over that same lock when somebody asks for it.
        self._mutex = threading.Lock()
        # What every future reads on its way is set, though most never change it; and what it is
        # given later. As in `Call`.
        self._state = PENDING
        self._result: T = None  # type: ignore[assignment]  # set before it is read
        self._exception: BaseException | None = None
        self._lazy_condition: threading.Condition | None = None
        self._done_callbacks: tuple[Callable[[Any], object], ...] = ()
        self._awaiters: tuple[Awaiter, ...] = ()
        self.call: QueuedCall | None = None
        """The call behind it, until somebody claims it."""

    def __reduce__(self) -> NoReturn:
        # A copy would share the lock, and never be completed.
        raise TypeError("a future can be neither copied nor pickled")

    def _made_condition(self) -> threading.Condition:
        # Also asked for by who holds it already (`concurrent.futures.wait` lets it go by its name):
        # what is there must be found without the lock.
        condition = self._lazy_condition
        if condition is None:
            with self._mutex:
                condition = self._condition_locked()
        return condition

    # An attribute to who uses it, and to type checkers.
    _condition: threading.Condition = property(_made_condition)  # type: ignore[assignment]  # ditto

    def _condition_locked(self) -> threading.Condition:
        if self._lazy_condition is None:
            self._waiters = []  # first: who has the Condition may add to them
            self._lazy_condition = threading.Condition(self._mutex)
        return self._lazy_condition

    # State. It is written under the lock and read without: a done state is the last thing written,
    # so that who sees it sees the outcome too (also without a GIL: attributes are written and read
    # in order there), and it never changes again.

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
        """Go from pending to running; True for exactly one of all who try.

        A worker claims a call before it runs it; whoever claims a call first runs it.
        """
        with self._mutex:
            if self._state != PENDING:
                return False
            self._state = RUNNING
            self.call = None
            return True

    def set_running_or_notify_cancel(self) -> bool:
        """As in `concurrent.futures`: for who completes the future by hand."""
        if self.claim():
            return True
        if self.cancelled():
            return False
        raise RuntimeError(f"the future is already {self._state.lower()}")

    # Completion.

    def set_result(self, result: T) -> None:
        """Complete the future with a value.

        Raises:
            InvalidStateError: It is done already.
        """
        if not self._complete(FINISHED, result, None):
            raise InvalidStateError(f"the future is already {self._state.lower()}")

    def set_exception(self, exception: BaseException | None) -> None:
        """Complete the future with an exception, which every waiter gets.

        Raises:
            InvalidStateError: It is done already.
            TypeError: `exception` is not an exception.
        """
        if not isinstance(exception, BaseException):
            raise TypeError(f"expected an exception instance, got {exception!r}")
        if not self._complete(FINISHED, cast(T, None), awaitable_error(exception)):
            raise InvalidStateError(f"the future is already {self._state.lower()}")

    def cancel(self) -> bool:
        """Cancel the call if it has not started; every waiter gets `CancelledError`.

        Returns:
            Whether the future is cancelled now.
        """
        return self._complete(CANCELLED, cast(T, None), None) or self.cancelled()

    def _complete(self, state: str, result: T, exception: BaseException | None) -> bool:
        with self._mutex:
            if self._state in DONE or (self._state == RUNNING and state == CANCELLED):
                return False
            self._result = result
            if exception is not None:
                self._exception = exception
                self._traceback = exception.__traceback__
            self._state = state
            call, self.call = self.call, None
            awaiters, self._awaiters = self._awaiters, ()
            if self._lazy_condition is not None:
                self._notify_waiters()
                self._lazy_condition.notify_all()
        for awaiter in awaiters:
            awaiter.waker.post(awaiter)  # `wake`, without a call more
        if call is not None:
            call.drop()
        if self._done_callbacks:
            self._invoke_callbacks()
        return True

    def _notify_waiters(self) -> None:
        for waiter in self._waiters:
            if self._state == CANCELLED:
                waiter.add_cancelled(self)
            elif self._exception is not None:
                waiter.add_exception(self)
            else:
                waiter.add_result(self)

    def _invoke_callbacks(self) -> None:
        if _nesting.depth == _MAX_NESTING:
            _nesting.postponed.append(self)
            return
        # None is added any more: the future is done. None is kept, nor what it refers to.
        callbacks, self._done_callbacks = self._done_callbacks, ()
        _nesting.depth += 1
        try:
            for callback in callbacks:
                self._call_back(callback)
            while _nesting.depth == 1 and _nesting.postponed:
                _nesting.postponed.popleft()._invoke_callbacks()
        finally:
            _nesting.depth -= 1

    def _call_back(self, callback: Callable[[Any], object]) -> None:
        try:
            callback(self)
        except BaseException as error:  # noqa: BLE001  # seen to there
            log_callback_error(error, _base.LOGGER, "exception calling callback for %r", self)

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call `fn(future)` when the future is done: in the completing thread, or now.

        Callbacks are called in the order in which they were added; what they raise is logged.
        """
        with self._mutex:
            if self._state not in DONE:
                self._done_callbacks += (fn,)
                return
        self._call_back(fn)

    def _remove_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call `fn` no more, if it has not been."""
        with self._mutex:
            if self._state not in DONE:
                self._done_callbacks = tuple(one for one in self._done_callbacks if one is not fn)


U = TypeVar("U")


def _just_block() -> None:
    pass


class ThreadHooks(threading.local):
    """What a worker's thread does before it blocks; any other thread just blocks."""

    help: Callable[["Future[Any]"], None] | None = None
    """Before a wait for one future: run its call here, if nobody has started it."""

    about_to_block: Callable[[], None] = staticmethod(_just_block)
    """Called before any wait: lets another thread serve this one's queue.

    Also before the wait of a task, for its loop may run in a call, and holds that call's worker.
    Raises RuntimeError if there can be no more threads.
    """

    def just_block(self) -> None:
        """This thread is no worker's any more."""
        self.help, self.about_to_block = None, _just_block


thread_hooks = ThreadHooks()


class Future(Completion[T]):
    """The result of a call that runs elsewhere: a future for every kind of waiter.

    It *is* a `concurrent.futures.Future`: `concurrent.futures.wait`, `as_completed`,
    `asyncio.wrap_future`, `asyncio.gather` and `asyncio.wait_for` take it. It can be awaited, any
    number of times, by any number of tasks, in any event loop (asyncio or trio). And it has the
    verbs of `torch.futures.Future`: `wait`, `value`, `then`, `add_done_callback`, `set_result`,
    `set_exception`.

    Differences from `torch.futures.Future`: it can be awaited and cancelled; `wait` on the thread
    of an event loop raises instead of blocking the loop; errors keep their class (`then` of torch
    raises a RuntimeError that quotes them); `value` of a future that is not done raises
    `InvalidStateError`; `then` skips its function if the future it returned was cancelled.
    What asyncio accepts only from its own class it does not accept here: `asyncio.wait`,
    `asyncio.create_task` and `asyncio.isfuture` (wrap it with `asyncio.wrap_future`, or in a
    coroutine).

    Cancelling an `await` cancels the call only if it has not started, this was the last `await` of
    it, and nothing else hangs on the future: no callback, no `then`, no thread in `result()`. A
    call that runs goes on unseen. When somebody else cancels the future, `await` raises
    `concurrent.futures.CancelledError`, which is not `asyncio.CancelledError`.

    Example:
        >>> import asyncio, aiopar
        >>> async def main():
        ...     future = aiopar.fork(pow, 2, 10)
        ...     return await future, await future.then(lambda done: done.value() + 1)
        >>> asyncio.run(main())
        (1024, 1025)
    """

    # Said again: from what `_leave` sets it to, type checkers infer another type for this class.
    call: QueuedCall | None

    def then(self, fn: Callable[["Future[T]"], U]) -> "Future[U]":
        """A future of `fn(self)`, called when this one is done (whatever way it ended).

        Raises:
            TypeError: `fn` is not callable, or a coroutine function, which nobody would await.
        """
        check_callable(fn)
        child: Future[U] = Future()
        # The traceback of what `fn` raises holds the frames that called it: these know the child,
        # which holds the error, by this list alone, and `run` empties it.
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

    # Waiting. A frame that raises the outcome lets go of the future first: the traceback keeps the
    # frame, and the future keeps the error, so that together they would be a cycle.

    def result(self, timeout: float | None = None) -> T:
        """The value, waiting up to `timeout` seconds; `concurrent.futures`' contract.

        Raises:
            TimeoutError: It is not done by then.
            CancelledError: That of `concurrent.futures`: it was cancelled.
        """
        try:
            if self._state not in DONE:
                self._block(timeout)
            return self._outcome()
        finally:
            self = None  # type: ignore[assignment]  # noqa: PLW0642

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception or None, waiting up to `timeout` seconds.

        Raises:
            TimeoutError: It is not done by then.
            CancelledError: That of `concurrent.futures`: it was cancelled.
        """
        if self._state not in DONE:
            self._block(timeout)
        if self._state == FINISHED:
            return self._exception
        raise CancelledError if self._state == CANCELLED else TimeoutError

    def value(self) -> T:
        """The value of a future that is done; raises what its call raised.

        Raises:
            InvalidStateError: It is not done.
        """
        try:
            if self._state not in DONE:
                raise InvalidStateError(f"the future is {self._state.lower()}: await it first")
            return self._outcome()
        finally:
            self = None  # type: ignore[assignment]  # noqa: PLW0642

    def wait(self) -> T:
        """The value, blocking this thread until it is there.

        A worker first runs a call of its executor itself if nobody has started it, so that calls
        which wait for calls never deadlock, on any number of workers.

        Raises:
            BlockingWaitError: This is an event loop's thread and the future is not done.
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
            state = self._state
            if state == FINISHED:
                if self._exception is not None:
                    # With the traceback it came with: the frames of those who got it before would
                    # add up there, and be kept.
                    raise self._exception.with_traceback(self._traceback)
                return self._result
            raise CancelledError if state == CANCELLED else TimeoutError
        finally:
            self = None  # type: ignore[assignment]  # noqa: PLW0642

    def _block(self, timeout: float | None) -> None:
        thread_hooks.about_to_block()
        with self._mutex:
            self._blocked += 1
            try:
                self._condition_locked().wait_for(self.done, timeout)
            finally:
                self._blocked -= 1

    def __await__(self) -> Generator[Any, Any, T]:
        try:
            if self._state not in DONE:
                awaiter = awaiter_here()
                if awaiter is None:
                    # Driven by `aiopar.wait`, in a worker or in a program without a loop.
                    self.wait()
                elif self._join(awaiter):
                    try:
                        yield from awaiter.resumed  # a call less than `awaiter.__await__()`
                    except BaseException:
                        self._leave(awaiter)
                        raise
            if self._state == FINISHED and self._exception is None:
                return self._result  # what mostly comes of it, without a call more
            return self._outcome()
        finally:
            self = None  # type: ignore[assignment]  # noqa: PLW0642

    def _join(self, awaiter: Awaiter) -> bool:
        """`awaiter` is to be woken; False if there is nothing to wait for."""
        thread_hooks.about_to_block()
        with self._mutex:
            if self._state in DONE:
                return False
            self._awaiters += (awaiter,)
            return True

    def _leave(self, awaiter: Awaiter) -> None:
        """The `await` was cancelled; with the last of all who wait, the call is."""
        with self._mutex:
            if awaiter not in self._awaiters:
                return  # completed meanwhile
            self._awaiters = tuple(other for other in self._awaiters if other is not awaiter)
            wanted = self._awaiters or self._done_callbacks or self._waiters or self._blocked
            if wanted or self._state == RUNNING:
                return
            # In the same step as the look: who comes to wait from now on finds it cancelled. And
            # there is nobody to be told.
            self._state = CANCELLED
            call, self.call = self.call, None
        if call is not None:
            call.drop()


class DoneCallback:
    """What is behind a future that is made of others: `fn`, which each is to call when it is done.

    When that future is cancelled, they do not: nothing is left there that would hang on them.
    """

    __slots__ = ("_fn", "_others")

    def __init__(self, others: Iterable[Future[Any]], fn: Callable[[Future[Any]], object]) -> None:
        # They hold `fn`, which holds that future: held here too, all of it would be a cycle.
        self._others = [*map(weakref.ref, others)]
        self._fn = weakref.ref(fn)

    def drop(self) -> None:
        """The future was cancelled."""
        fn = self._fn()
        for find in self._others:
            other = find()
            if other is not None and fn is not None:
                other._remove_done_callback(fn)


def running_future() -> Future[Any]:
    """A future of something under way: neither `cancel` nor a cancelled `await` cancels it."""
    future: Future[Any] = Future()
    future.claim()
    return future


def _complete_by(child: Future[U], fn: Callable[[Future[T]], U], parent: Future[T]) -> None:
    try:
        result = fn(parent)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the child gets it
        if error is parent._exception:
            # Passed on: without the frame of `fn`, which holds the parent.
            error.with_traceback(parent._traceback)
        else:
            own_traceback(error)
        child.set_exception(error)
    else:
        child.set_result(result)
    finally:
        del child, parent
