"""The half of a future that those use who complete it: state, outcome, callbacks."""

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import InvalidStateError, _base
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar, cast

from ._awaiter import Awaiter
from ._error_handling import awaitable_error, log_callback_error

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
