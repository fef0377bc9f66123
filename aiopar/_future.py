"""`Future`: a `concurrent.futures.Future` that can be awaited and speaks torch's verbs."""

import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, InvalidStateError
from typing import Any, TypeVar

from ._awaiter import Awaiter, awaiter_here
from ._callables import check_callable
from ._completion import CANCELLED, DONE, FINISHED, RUNNING, Completion, QueuedCall
from ._error_handling import own_traceback
from ._errors import BlockingWaitError
from ._wakeup import in_event_loop

T = TypeVar("T")
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
