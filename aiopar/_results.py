"""Results on their way to who fetches them, each to one; and room for more of them."""

import math
import threading
from collections import deque
from typing import Generic, TypeVar

from ._errors import ExecutorShutdown
from ._future import Future, running_future

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
