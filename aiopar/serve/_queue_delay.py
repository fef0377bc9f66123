"""`max_queue_delay`: until when requests wait for company."""

from collections.abc import Iterator
from math import inf
from time import monotonic
from weakref import WeakKeyDictionary

from .._wakeup import Waker
from ._queue import RequestQueue
from ._request import Request
from ._tally import Tally

_SHORTEST = 0.001
"""Seconds from one timer to the next: loops are no more exact, and to wait is to cost nothing."""
_SHORTEST_EACH = 2e-5
"""The same for each of those that wait, where all of them are to be looked at."""


class QueueDelay:
    """Until when batches that are not full wait, and the timers that end the wait.

    A request waits `delay` seconds, but with a deadline no longer than half of its timeout, and not
    so long that less than two batch times are left: half of the batches take longer than usual.

    Each loop from which a request comes has a timer of its own: another may be closed, and its
    timer gone. It has no lock: its owner lets one thread in at a time.
    """

    def __init__(self, delay: float, queue: RequestQueue[Request], tally: Tally) -> None:
        self._delay = delay
        self._queue = queue
        self._tally = tally
        self._urgent = inf
        """When the first of those with a deadline is due, or earlier: some may have left."""
        self._put_back = False
        """Whether some of those that wait were taken before."""
        self._timers: WeakKeyDictionary[Waker, float] = WeakKeyDictionary()
        """When the next timer of each loop goes off, if one is about to."""

    def put(self, request: Request) -> float | None:
        """It is in the queue; when its loop has to set off a timer, unless it has one.

        Who is due at once needs none: an idle runner is started, or a busy one takes it.
        """
        urgent = inf if request.deadline == inf else self._urgent_at(request)
        if len(self._queue) == 1:
            self._urgent, self._put_back = urgent, False
        else:
            self._urgent = min(self._urgent, urgent)
        due = min(request.arrived + self._delay, urgent)
        return self._timer(request.waker, due) if due > monotonic() else None

    def put_back(self) -> None:
        """Others are in the queue, which had been taken from it: they have waited for company."""
        self._put_back = True

    def is_due(self) -> bool:
        """Whether somebody has waited long enough."""
        oldest, now = self._queue.oldest, monotonic()
        if oldest is None or now - oldest.arrived >= self._delay or self._put_back:
            return True
        if now < self._urgent:
            return False
        urgent = inf
        for at in self._times(now):
            if at <= now:
                return True
            urgent = min(urgent, at)
        self._urgent = urgent
        return False

    def fired(self, waker: Waker, at: float) -> float | None:
        """The timer for `at` has gone off; when the next one has to, if there is any."""
        if self._timers.get(waker) != at:  # another has taken its place, for an earlier time
            return None
        del self._timers[waker]
        oldest, now = self._queue.oldest, monotonic()
        if oldest is None:
            return None
        # Who is due by now waits for a runner, who takes it; the timer is for those behind it.
        due = oldest.arrived + self._delay
        due = due if due > now else now + self._delay
        urgent, soonest = self._urgent, now + _SHORTEST
        if urgent <= now:
            urgent = min((at for at in self._times(now) if at > now), default=inf)
            soonest = now + max(_SHORTEST, _SHORTEST_EACH * len(self._queue))
        return self._timer(waker, max(min(due, urgent), soonest))

    def clear(self) -> None:
        """There are no timers any more."""
        self._timers.clear()

    def _timer(self, waker: Waker, at: float) -> float | None:
        if at >= self._timers.get(waker, inf):
            return None
        self._timers[waker] = at
        return at

    def _times(self, now: float) -> Iterator[float]:
        """When those are due who have a deadline that has not passed."""
        return (self._urgent_at(one) for one in self._queue if now < one.deadline < inf)

    def _urgent_at(self, request: Request) -> float:
        left = max((request.deadline - request.arrived) / 2, 2 * self._tally.batch_seconds)
        return request.deadline - left
