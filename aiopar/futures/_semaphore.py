"""`Semaphore`: a fair semaphore for tasks of any event loop and for threads."""

import math
from collections import OrderedDict
from typing import Self

from .._base.forking import ReentrantLock
from ._future import Future, running_future
from ._wakeup import ki_protected


class Semaphore:
    """A number of permits; tasks that wait for one get it in the order in which they came.

    As `asyncio.Semaphore`, but tasks of several event loops may wait, on asyncio and on trio;
    `try_acquire` and `release` may be called from any thread. `lift` ends the limit, and
    `wait_idle` waits until no permit is in use.
    """

    def __init__(self, permits: float) -> None:
        """Start with `permits` free permits; with `math.inf` there is no limit."""
        # Re-entrant: a destructor may release a permit, and the collector runs it at any line.
        self._lock = ReentrantLock()
        self._permits = permits
        self.held = 0
        """How many permits were acquired and not released."""
        self._waiters: OrderedDict[Future[None], None] = OrderedDict()
        self._idle: Future[None] | None = None

    def try_acquire(self) -> bool:
        """Take a permit if one is free; return whether it was. While one is free, nobody waits."""
        with self._lock:
            if self.held >= self._permits:
                return False
            self.held += 1
            return True

    @ki_protected
    async def acquire(self) -> None:
        """Take a permit; wait if none is free, behind the earlier waiters.

        A cancelled wait takes no permit: the next waiter gets it.
        """
        if self.try_acquire():
            return
        waiter: Future[None] = Future()
        with self._lock:
            self._waiters[waiter] = None
        self._grant()  # a permit may have been released meanwhile
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
        self._grant(released=1)

    def lift(self) -> None:
        """End the limit: all waiters and all later tasks get a permit."""
        self._permits = math.inf
        self._grant()

    async def wait_idle(self) -> None:
        """Wait until all permits have been released."""
        with self._lock:
            if self._idle is None:
                self._idle = running_future()
            idle = self._idle
            if not self.held:  # looked at last: a destructor may release the last permit
                return
        await idle

    def _grant(self, released: int = 0) -> None:
        """Give back permits, then give the free permits to waiters."""
        done: list[Future[None]] = []
        with self._lock:
            self.held -= released
            while self._waiters and self.held < self._permits:
                waiter, _ = self._waiters.popitem(last=False)
                if waiter.claim():  # else it was cancelled
                    self.held += 1
                    done.append(waiter)
            if not self.held and self._idle is not None:
                done.append(self._idle)
                self._idle = None
        for waiter in done:  # without the lock, because a woken task may take it at once
            waiter.set_result(None)

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.release()
