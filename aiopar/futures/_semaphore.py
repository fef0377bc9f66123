"""`Semaphore`: a fair semaphore for tasks of any event loop and for threads."""

import math
from collections import OrderedDict
from typing import Self

from .._base.forking import ReentrantLock
from ._future import Future, running_future
from ._wakeup import ki_protected


class Semaphore:
    """A number of permits; tasks that wait for one get it in the order in which they came.

    Tasks of several event loops may wait at the same time, on asyncio and on trio. `try_acquire`
    and `release` may be called from any thread.

    As `asyncio.Semaphore`. Differences: it belongs to no loop; `lift` ends the limit; `held` is the
    number of permits in use, and `wait_idle` waits until it is 0.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     turn = Semaphore(1)
        ...     async with turn:
        ...         return turn.held, turn.try_acquire()
        >>> asyncio.run(main())
        (1, False)
    """

    def __init__(self, permits: float) -> None:
        """Start with `permits` free permits; with `math.inf` there is no limit."""
        # Re-entrant: since CPython 3.12 the garbage collector may run at any call, and a destructor
        # may release a permit.
        self._lock = ReentrantLock()
        self._permits = permits
        self._held = 0
        self._waiters: OrderedDict[Future[None], None] = OrderedDict()
        self._idle: Future[None] | None = None

    @property
    def held(self) -> int:
        """How many permits were acquired and not released."""
        return self._held

    def try_acquire(self) -> bool:
        """Take a permit if one is free; return whether it was. A free permit has no waiters."""
        with self._lock:
            if self._held >= self._permits:
                return False
            self._held += 1
            return True

    @ki_protected
    async def acquire(self) -> None:
        """Take a permit; wait if none is free, behind the earlier waiters.

        A cancelled wait takes no permit: the next waiter gets it.
        """
        with self._lock:
            if self.try_acquire():
                return
            waiter: Future[None] = Future()
            self._waiters[waiter] = None
            granted = self._grant()  # a destructor may have released a permit since the first look
        _complete(*granted)
        try:
            await waiter
        except BaseException:
            with self._lock:
                self._waiters.pop(waiter, None)
            if not waiter.cancel():  # it got a permit just before the cancellation
                self.release()
            raise

    @ki_protected
    def release(self) -> None:
        """Give a permit back; the waiter that came first gets it."""
        idle = None
        with self._lock:
            self._held -= 1
            granted = self._grant()
            if not self._held:
                idle, self._idle = self._idle, None
        _complete(*granted)
        if idle is not None:
            _complete(idle)

    def lift(self) -> None:
        """End the limit: all waiters and all later tasks get a permit."""
        with self._lock:
            self._permits = math.inf
            granted = self._grant()
        _complete(*granted)

    async def wait_idle(self) -> None:
        """Wait until all permits have been released."""
        with self._lock:
            if self._idle is None:
                self._idle = running_future()
            idle = self._idle
            if not self._held:  # looked at last: a destructor may release the last permit
                return
        await idle

    def _grant(self) -> list[Future[None]]:
        """Give free permits to waiters, and return these; with the lock held."""
        granted = []
        while self._waiters and self._held < self._permits:
            waiter, _ = self._waiters.popitem(last=False)
            if waiter.claim():  # else it was cancelled
                self._held += 1
                granted.append(waiter)
        return granted

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.release()


def _complete(*waiters: Future[None]) -> None:
    # Without the lock, because a woken task may take it at once.
    for waiter in waiters:
        waiter.set_result(None)
