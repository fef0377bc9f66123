"""Who waits for what runs on an event loop; when nobody is left, it is cancelled."""

import math
from collections.abc import Hashable, Sequence
from time import monotonic
from types import TracebackType
from typing import Any

from .._base.devices import CallerStream
from ..errors import DeadlineExceeded
from ..executor._loop_tasks import Tasks
from ..futures._wakeup import Awaiter


class Request:
    """One item on its way through a batch; its outcome is set on its caller's loop only.

    There result, deadline and cancellation meet, one after the other: the first of them settles
    it, and the others find it `done`.
    """

    # What most requests neither set nor read is a class attribute: it costs nothing to create.
    cost = 1.0
    streams: tuple[CallerStream, ...] = ()
    overdue = False
    """Whether its deadline passed in the queue, or was about to, and it was left out for that."""
    retried = False
    """Whether a replica has failed under it before."""
    rejected: str | None = None
    """Why it was not queued; for observers, to whom this is an `ItemInfo`."""
    result: Any = None
    _traceback: TracebackType | None = None

    def __init__(self, item: Any, awaiter: Awaiter) -> None:
        self.item = item
        self.awaiter = awaiter
        self.waker = awaiter.waker
        """That of its caller's loop."""
        self.arrived = monotonic()
        # What every request reads on its way is set, though most never change it: CPython 3.11
        # takes several times as long to find what only the class has.
        self.key: Hashable = None
        self.priority = 0
        self.deadline = math.inf
        """On the clock of `time.monotonic`; expired, it is not computed any more."""
        self.done = False
        """Whether it has its outcome, or its caller has gone. Read by workers, who skip it then."""
        self.error: BaseException | None = None

    def resolve(self, result: Any) -> None:
        """It has a result."""
        if not self.done:
            self.result = result
            self._settle()

    def fail(self, error: BaseException, traceback: TracebackType | None) -> None:
        """It has an error, which others may have too; it is to be raised with this traceback."""
        if not self.done:
            self.error = error
            self._traceback = traceback
            del error, traceback  # as in `aiopar._wakeup.resume`
            self._settle()

    def expire(self, *, in_queue: bool) -> None:
        """Its deadline has passed."""
        waited = monotonic() - self.arrived
        where = "in the queue" if in_queue or self.overdue else "in a batch that was running"
        self.fail(DeadlineExceeded(f"no result after {waited:.3g} s, {where}"), None)
        self._leave_audience()

    def abandon(self) -> None:
        """Its caller has gone."""
        # The item stays: a worker that has just found the caller there is about to read it.
        self.done = True
        self._leave_audience()

    # It may leave on its loop while it is made to attend on another. Both touch one name of its
    # dict, each by one step, which is atomic: either who leaves finds the audience, or that finds
    # it `done`.

    def attend(self, audience: "Audience") -> None:
        """From now on it waits for what this one does; no more for another that it was of."""
        self.__dict__["_audience"] = audience
        if self.done:
            self._leave_audience()

    def _leave_audience(self) -> None:
        audience: Audience | None = self.__dict__.pop("_audience", None)
        if audience is not None:
            audience.leave(self)

    def _settle(self) -> None:
        self.done = True
        self.awaiter.deliver()

    def outcome(self) -> Any:
        """The result; raises the error."""
        error = self.error
        if error is None:
            return self.result
        try:
            raise error.with_traceback(self._traceback)
        finally:
            # The error's traceback holds this frame and the caller's.
            self.error = self._traceback = None
            del error, self


def streams_of(requests: Sequence[Request]) -> list[CallerStream]:
    """The streams on which their callers had launched something: each event, each stream once."""
    callers = [caller for request in requests for caller in request.streams]
    others = {caller.stream: caller for caller in callers if caller.event is None}
    return [caller for caller in callers if caller.event is not None] + list(others.values())


class Audience:
    """The callers of a batch, or of one generator, that runs in tasks of its own.

    They leave it on their own loops, perhaps several at a time, or where the garbage collector
    finds them, in the midst of anything: so it has no lock, and each of its steps is atomic.

    Args:
        requests: Whose callers they are.
        tasks: Those of this run, and of no other: a cancellation that comes late, when a runner has
            its next batch, finds none of them.
    """

    def __init__(self, requests: Sequence[Request], tasks: Tasks) -> None:
        self._tasks = tasks
        self._waiting = set(requests)
        for request in requests:
            request.attend(self)

    @property
    def gone(self) -> bool:
        """Whether nobody waits any more; of no meaning once it has ended."""
        return not self._waiting

    def leave(self, request: Request) -> None:
        """The caller of one of them has gone, or came to its deadline."""
        try:
            self._waiting.remove(request)
        except KeyError:  # it has ended
            return
        # Of two who leave at the same time each may see that nobody is left: to cancel twice does
        # no harm. On the loop's thread: there the tasks either run still, or have ended.
        if not self._waiting:
            self._tasks.cancel()

    def end(self) -> None:
        """What they waited for has come to an end: who leaves from now on is nobody's concern."""
        self._waiting.clear()  # they refer to this
