"""`Request`: one item on its way through a batch, from the queue to the outcome of its caller."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic
from types import TracebackType
from typing import Any, Protocol

from .._base.collate import unbatch
from .._base.devices import CallerStream
from .._base.tracebacks import add_note_once, in_words, stand_in
from ..errors import DeadlineExceeded, ReaderTooSlow
from ..executor._loop_tasks import Cancel, is_cancellation
from ..futures._wakeup import Awaiter, Waker
from ._observer import Outcome, Refusal
from ._queue import RequestGroup


class RequestOwner(Protocol):
    """The owner of the requests that are made in its context, such as an HTTP request.

    Its methods may be called from any thread.
    """

    def waits_for(self, request: "Request") -> None:
        """Note a request that was made in the context of this owner."""

    def left(self, request: "Request") -> None:
        """Note the end of the request."""

    def began(self, stream: Any) -> None:
        """Note an `OutputStream` that was begun in the context of this owner."""


request_owner: ContextVar[RequestOwner | None] = ContextVar("aiopar_request_owner", default=None)


class Waiters(Protocol):
    """The callers that wait for a running computation; the methods are called from any thread."""

    def read(self, request: "Request") -> None:
        """Count an output that a caller has read."""

    def leave(self, request: "Request") -> None:
        """Remove a caller, which does not wait any more."""


class Request:
    """One item on its way through a batch.

    Result, deadline and cancellation reach the request on the caller's loop, one after the other.
    The first one settles the request; later ones find it `done`.
    """

    streams_outputs = False
    """Whether the output comes in parts."""
    _audience: "Waiters | None" = None  # a class attribute: see `join`

    def __init__(self, item: Any, awaiter: Awaiter, group: RequestGroup) -> None:
        self.item = item
        self.awaiter = awaiter
        self.group = group
        """The requests that may share a batch with this one."""
        self.arrived = monotonic()
        self.priority = 0
        self.cost = 1.0
        self.deadline = inf
        """By `time.monotonic`. After the deadline the item is not computed any more."""
        self.streams: tuple[CallerStream, ...] = ()
        """The streams on which the caller had launched work."""
        self.refused: Refusal | None = None
        """Why the request was refused; for observers (`ItemInfo`)."""
        self.outcome: Outcome = "cancelled"
        """How the request has ended; before its end, how it would end if its caller left now."""
        self.losses = 0
        """How often the host of its batch was lost; a failed replica counts for three."""
        self.skipped = False
        """Whether the request left the queue without a batch because of its deadline."""
        self.done = False
        """Whether the request has its outcome, or its caller has left. Workers skip it then."""
        self.result: Any = None
        self.failure: tuple[BaseException, TracebackType | None, Outcome] | None = None
        """The error, the traceback with which it is raised, and the outcome then."""
        self.at_end: tuple[Callable[[BaseException | None], object], ...] = ()
        """Called with the caller's error or None when the caller has its outcome or leaves."""
        owner = request_owner.get()
        if owner is not None:
            owner.waits_for(self)
            self.at_end = (lambda _: owner.left(self),)

    @property
    def buffer(self) -> int:
        """How many unread outputs the caller has room for."""
        return 1

    def has_room(self, sent: int) -> bool:  # for streams
        """Whether the caller has room for another output after `sent` outputs."""
        return True

    @property
    def key(self) -> Hashable:
        """The result of `batch_key`."""
        return self.group.key

    def cancel_at_end(self, cancel: Cancel) -> None:
        """Cancel a timer when the caller has its outcome or leaves."""
        self.at_end = (*self.at_end, lambda _: cancel())

    # These methods run on the caller's loop. Ctrl-C may interrupt them between two steps, and they
    # are called again then, so `done` is set last.

    def resolve(self, result: Any, step: int) -> None:
        """Set the result; `step` counts the results of a stream."""
        if not self.done:
            self.result = result
            self._settle()

    def fail(
        self, error: BaseException, traceback: TracebackType | None, outcome: Outcome = "failed"
    ) -> None:
        """Set the error, which other requests may share; it is raised with `traceback`."""
        if is_cancellation(error) or isinstance(error, GeneratorExit):
            # The error itself would look as if the caller was cancelled or closed.
            error, traceback = stand_in(f"the function raised {in_words(error)}", error), None
        if not self.done:
            self.failure = error, traceback, outcome
            self._settle()

    def expire(self) -> None:
        """Fail the request, which is not in the queue any more: its deadline has passed."""
        waited = monotonic() - self.arrived
        where = "in the queue" if self.skipped else "in a batch that was running"
        error = DeadlineExceeded(f"no result after {waited:.3g} s, {where}")
        self.fail_at_once(error, "expired")

    def fail_at_once(self, error: BaseException, outcome: Outcome = "failed") -> None:
        """Set the error; outputs that the caller has not read are dropped."""
        self.fail(error, None, outcome)

    def abandon(self) -> None:
        """Mark the request as done: its caller has left."""
        # The item stays: a worker may be about to read it.
        self.done = True
        self._leave_audience()

    # A request may leave on its loop while a worker lets it join. Both take an atomic step on the
    # instance's dict: `_leave_audience` finds the audience, or `join` finds the request done.

    def join(self, audience: "Waiters") -> None:
        """Wait with the callers of a part; no longer with those of an earlier part."""
        self.__dict__["_audience"] = audience
        if self.done:
            self._leave_audience()

    def _leave_audience(self) -> None:
        audience: Waiters | None = self.__dict__.pop("_audience", None)
        if audience is not None:
            audience.leave(self)

    def _settle(self) -> None:
        self._leave_audience()  # which may refer to this request
        self.awaiter.deliver()
        self.done = True

    def unwrap(self) -> Any:
        """Return the result, or raise the error."""
        if self.failure is None:
            return self.result
        error, traceback, self.outcome = self.failure
        try:
            raise error.with_traceback(traceback)
        finally:
            # The error's traceback holds this frame and the caller's.
            self.failure = None
            del error, traceback, self


def streams_of(requests: Sequence[Request]) -> list[CallerStream]:
    """The streams on which the callers launched work; one entry per stream without an event."""
    callers = [caller for request in requests for caller in request.streams]
    others = {caller.stream: caller for caller in callers if caller.event is None}
    return [caller for caller in callers if caller.event is not None] + list(others.values())


@dataclass(slots=True, eq=False)
class PartOutcome:
    """The outcome of requests that ran together: their outputs, or the error that they share."""

    requests: Sequence[Request]
    outputs: Any = None
    """The function's output for all of them or, if `unbatched`, one output per request."""
    unbatched: bool = False
    step: int = 0
    """The number of the step of a stream."""
    size: int = 0
    """How many items the outputs are for: more than the requests, if the batch was padded."""
    error: BaseException | None = None
    traceback: TracebackType | None = None
    """The error's traceback before any caller raised it: every raise adds frames."""

    def __post_init__(self) -> None:
        if self.error is not None:
            self.traceback = self.error.__traceback__

    def unbatch(self) -> None:
        """Split the outputs into one per request; these are views, so it takes little time."""
        if self.error is not None or self.unbatched:
            return
        try:
            self.outputs = unbatch(self.outputs, self.size)
            self.unbatched = True
        except Exception as error:  # noqa: BLE001  # a user's type of output may raise any error
            note = f"while the batch's outputs, {type(self.outputs)}, were taken apart"
            add_note_once(error, note)
            # The frames of the traceback hold this outcome.
            self.error = error.with_traceback(None)


def deliver_soon(outcomes: Sequence[PartOutcome]) -> None:
    """Deliver `outcomes` to the callers, on their event loops; from any thread."""
    wakers = {request.awaiter.waker for outcome in outcomes for request in outcome.requests}
    if len(wakers) > 1:
        for outcome in outcomes:  # here, because two loops may call `_deliver` at the same time
            outcome.unbatch()
    # One callback for all requests of a loop, because waking a loop costs most.
    for waker in wakers:
        waker.post(partial(_deliver, outcomes, waker))


def _deliver(outcomes: Sequence[PartOutcome], waker: Waker) -> None:
    """Deliver `outcomes` to the callers on the loop of `waker`; again if Ctrl-C interrupts it."""
    for outcome in outcomes:
        outcome.unbatch()
        for index, request in enumerate(outcome.requests):
            if request.awaiter.waker is not waker:
                continue
            if outcome.error is not None:
                request.fail(outcome.error, outcome.traceback)
            else:
                request.resolve(outcome.outputs[index], outcome.step)


_MOST_UNREAD = 64
"""A caller with more unread outputs than this many times its buffer loses its stream."""


class Audience:
    """The callers that wait for the outputs of one part of a batch.

    A caller has room for `Request.buffer` outputs that it has not read. The next step of a
    generator is due when any caller has room, or when no caller is left. So a caller that stops
    reading slows no other caller. A caller for which too many outputs wait is removed.

    Every method may be called from any thread, also by the garbage collector in the middle of
    another method. So no method waits: one thread at a time makes the changes of all threads.

    Args:
        requests: The requests of the callers.
        emptied: Called when the last caller has left.
    """

    def __init__(
        self, requests: Sequence[Request], emptied: Callable[[], object] | None = None
    ) -> None:
        self._turn = [None]
        """Holds one element; the thread that makes the changes takes this element."""
        self._changes: deque[Callable[[], object]] = deque()
        self._unread = dict.fromkeys(requests, 0)
        """How many outputs each caller has not read."""
        self._due: Callable[[], object] | None = None
        self._latest = 0.0
        """When the latest output was made or read, by `time.monotonic`."""
        self._emptied = emptied
        for request in requests:
            request.join(self)

    @property
    def gone(self) -> bool:
        """Whether no caller is left."""
        return not self._unread

    def when_due(self, fn: Callable[[], object]) -> None:
        """Call `fn` once when the next step is due: now, or later in any thread."""
        self._change(partial(setattr, self, "_due", fn))

    def send(self) -> None:
        """Count an output for every caller."""
        self._change(self._sent)

    def read(self, request: Request) -> None:
        """Count an output that a caller has read."""
        self._change(partial(self._was_read, request))

    def end_stalled(self, seconds: float) -> None:
        """Remove all callers if none has room and none has read for this many seconds."""
        self._change(partial(self._remove_stalled, seconds))

    def leave(self, request: Request) -> None:
        """Remove a caller, which does not wait any more."""
        self._change(partial(self._unread.pop, request, None))

    def end(self) -> None:
        """Remove all callers without calling anything: the part has ended."""
        self._change(self._clear)

    def _change(self, change: Callable[[], object]) -> None:
        self._changes.append(change)
        # The loop looks again after each turn: a change may have come just before the turn's end.
        while self._changes:
            due = emptied = None
            try:
                # Up to the `try` no function is called: Ctrl-C comes only when a function returns.
                del self._turn[0]
            except IndexError:
                return  # the thread that makes the changes makes this one too
            try:
                while self._changes:
                    next_change = self._changes[0]
                    del self._changes[0]
                    next_change()
                if self._has_room or not self._unread:
                    due, self._due = self._due, None
                if not self._unread:
                    emptied, self._emptied = self._emptied, None
            finally:
                try:
                    self._turn.append(None)
                finally:
                    if due is not None:
                        due()
                    if emptied is not None:
                        emptied()

    @property
    def _has_room(self) -> bool:
        return any(unread < request.buffer for request, unread in self._unread.items())

    def _sent(self) -> None:
        self._latest = monotonic()
        for request, unread in tuple(self._unread.items()):
            self._unread[request] = unread + 1
            if unread == _MOST_UNREAD * request.buffer:
                self._remove_slow(request, f"the caller has not read {unread} outputs")

    def _was_read(self, request: Request) -> None:
        if request in self._unread:
            self._latest = monotonic()
            self._unread[request] -= 1

    def _remove_stalled(self, seconds: float) -> None:
        if self._due is None or self._has_room or monotonic() - self._latest < seconds:
            return
        why = f"other items wait, and no caller of the batch has read for {seconds:g} s"
        for request in tuple(self._unread):
            self._remove_slow(request, why)

    def _remove_slow(self, request: Request, why: str) -> None:
        del self._unread[request]
        request.awaiter.waker.post(partial(request.fail_at_once, ReaderTooSlow(why)))

    def _clear(self) -> None:
        self._unread.clear()
        self._due = self._emptied = None
