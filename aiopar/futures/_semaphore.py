"""`Semaphore`: a fair semaphore for tasks of any event loop and for threads."""

import math
import threading
from collections import OrderedDict
from typing import Self

from ._future import Future, running_future


class Semaphore:
    """A number of permits, handed out in the order in which they are asked for.

    Tasks of several event loops may wait at the same time, on asyncio and on trio. `try_acquire`
    and `release` may be called from any thread, `release` also more often than `acquire`.

    As `asyncio.Semaphore`. Differences: it belongs to no loop; `lift` ends the limit; `held` and
    `wait_idle` tell how many permits are in use.

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
        """Start with `permits` permits; `math.inf` only counts."""
        # Re-entrant: since CPython 3.12 the garbage collector may run at any call, and a destructor
        # may release a permit.
        self._lock = threading.RLock()
        self._permits = permits
        self._held = 0
        self._waiters: OrderedDict[Future[None], None] = OrderedDict()
        self._idle: Future[None] | None = None

    @property
    def held(self) -> int:
        """How many permits were acquired and not released."""
        return self._held

    def try_acquire(self) -> bool:
        """Take a permit if one is free, which is so only if nobody waits. Return whether it was."""
        with self._lock:
            if self._held >= self._permits:
                return False
            self._held += 1
            return True

    async def acquire(self) -> None:
        """Take a permit; wait for one behind all who came earlier.

        A cancelled wait takes no permit, and the next waiter gets it.
        """
        with self._lock:
            if self.try_acquire():
                return
            waiter: Future[None] = Future()
            self._waiters[waiter] = None
        try:
            await waiter
        except BaseException:
            with self._lock:
                self._waiters.pop(waiter, None)
            if not waiter.cancel():  # it got a permit at the moment of its cancellation
                self.release()
            raise

    def release(self) -> None:
        """Give a permit back; the task that has waited the longest gets it."""
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
        """End the limit: every waiter gets a permit, and so does everyone from now on."""
        with self._lock:
            self._permits = math.inf
            granted = self._grant()
        _complete(*granted)

    async def wait_idle(self) -> None:
        """Wait for a moment in which nobody holds a permit."""
        with self._lock:
            if not self._held:
                return
            if self._idle is None:
                self._idle = running_future()
            idle = self._idle
        await idle

    def _grant(self) -> list[Future[None]]:
        """Take the waiters that get a permit out of the line; with the lock held."""
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
    # Without the lock: the thread of a woken task wants it next.
    for waiter in waiters:
        waiter.set_result(None)
