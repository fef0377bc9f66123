"""Something to be done a while after each of many has come, for those that are still there."""

import asyncio
from collections import deque
from contextvars import Context
from typing import Protocol
from weakref import ref

# Timers are no more exact than this, in some loops: to set one for less would be to poll.
_EXACTNESS = 0.001


class Delayed(Protocol):
    """One that has come."""

    def due(self) -> None:
        """The while has passed; on the loop's thread."""


class DelayQueue:
    """Calls `due` of each that was put, `delay` seconds later, unless it was let go of before.

    All of them share one timer, which costs more than all the rest; it is set for the first, and
    there is none while there is nobody to wait for.

    Args:
        loop: Where it is used.
        delay: In seconds.
    """

    __slots__ = ("_delay", "_timed", "_waiting", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, delay: float) -> None:
        self.loop = loop
        self._delay = delay
        self._timed = False
        self._waiting: deque[tuple[float, ref[Delayed]]] = deque()

    def put(self, delayed: Delayed) -> None:
        """It comes now."""
        # Weakly: most have gone when the timer goes off, and nothing of them is to be kept.
        self._waiting.append((self.loop.time() + self._delay, ref(delayed)))
        if not self._timed:
            self._timed = True
            self.loop.call_later(self._delay, self._call, context=Context())  # nobody's

    def _call(self) -> None:
        self._timed = False
        waiting = self._waiting
        now = self.loop.time() + _EXACTNESS
        while waiting:
            due_at, reference = waiting[0]
            delayed = reference()
            if delayed is not None and due_at > now:
                self._timed = True
                self.loop.call_at(due_at, self._call, context=Context())
                return
            waiting.popleft()
            if delayed is not None:
                delayed.due()
            del delayed
