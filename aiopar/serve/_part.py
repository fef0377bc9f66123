"""What a batch, or a part of one, has come to; and its way to who waits for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any

from .._collate import unbatch
from .._error_handling import add_note_once
from .._wakeup import Waker
from ._own_error import own_error
from ._request import Request


@dataclass(slots=True, eq=False)
class Part:
    """Requests that ran together, and their outputs or their common error."""

    requests: Sequence[Request]
    outputs: Any = None
    """Those of the whole part, or, `unbatched`, a list of one for each request."""
    unbatched: bool = False
    error: BaseException | None = None
    traceback: TracebackType | None = None
    """That of the error as it is now: raised here and there, it gets the frames of each place."""
    errors: Sequence[BaseException] | None = None
    """The error, once for each request: the same for one, a copy for each of the others."""
    undelivered: Iterator[tuple[Request, Any]] | None = None
    """Those who have yet to be told, each with its outcome, once it is being delivered."""

    def __post_init__(self) -> None:
        if self.error is not None and self.traceback is None:
            self.traceback = self.error.__traceback__

    def deliver(self) -> None:
        """Give each request its outcome; on the loop's thread, and again after an interrupt."""
        if self.error is None and not self.unbatched:
            self.unbatch()
        if self.undelivered is None:
            outcomes = self.outputs if self.errors is None else self.errors
            self.undelivered = zip(self.requests, outcomes, strict=True)
        request: Request | None = None
        outcome: Any = None
        try:
            if self.errors is not None:
                for request, outcome in self.undelivered:
                    request.fail(outcome, self.traceback)
            else:
                for request, outcome in self.undelivered:
                    request.resolve(outcome)
        except BaseException:
            # Ctrl-C, out of the step of one's task, or before it was told: it is told again. That
            # changes nothing for one that has its outcome; a part of a stream it may get twice.
            if request is not None:
                self.undelivered = chain([(request, outcome)], self.undelivered)
            raise
        finally:
            # As in `aiopar._wakeup.resume`: nor anything of the others in the batch.
            del self, request, outcome

    def unbatch(self) -> None:
        """Take the outputs apart: views, a few hundred nanoseconds each."""
        try:
            self.outputs = unbatch(self.outputs, len(self.requests))
            self.unbatched = True
        except Exception as error:  # noqa: BLE001  # that of an output type of the user's, say
            note = f"while the batch's outputs, {type(self.outputs)}, were taken apart"
            add_note_once(error, note)
            # Its traceback would hold the frames that hold this.
            self.error = error.with_traceback(None)
            self.share_out(set())

    def share_out(self, given: set[int]) -> None:
        """Make `errors`, unless they are made; before anybody has one, and raises it.

        Args:
            given: The `id` of each error that other parts have given to somebody.
        """
        error = self.error
        if error is None or self.errors is not None:
            return
        errors = []
        for request in self.requests:
            shared = id(error) in given and not request.done
            errors.append(own_error(error, self.traceback) if shared else error)
            if not request.done:
                given.add(id(error))
        self.errors = errors

    def of(self, waker: Waker) -> "Part":
        """What of it belongs to one of several loops."""
        if self.error is None and not self.unbatched:
            self.unbatch()
        chosen = [i for i, request in enumerate(self.requests) if request.waker is waker]
        requests = [self.requests[i] for i in chosen]
        if self.errors is not None:
            errors = [self.errors[i] for i in chosen]
            return Part(requests, error=self.error, traceback=self.traceback, errors=errors)
        return Part(requests, [self.outputs[i] for i in chosen], unbatched=True)


class _Delivery:
    """Parts whose requests all wait on one loop."""

    __slots__ = ("_parts", "_waker")

    def __init__(self, parts: list[Part], waker: Waker) -> None:
        self._parts = parts
        self._waker = waker

    def deliver(self) -> None:
        try:
            while self._parts:
                self._parts[-1].deliver()
                self._parts.pop()
        except BaseException:
            # Ctrl-C: the others must not wait for ever.
            if self._parts:
                self._waker.put_back(self)
            raise


def deliver_soon(parts: list[Part]) -> None:
    """Have parts delivered to the loops of their requests; from any thread."""
    given: set[int] = set()
    for part in parts:
        part.share_out(given)
    wakers = {request.waker for part in parts for request in part.requests}
    if len(wakers) == 1:
        # One callback for a whole batch: to wake a loop costs more than all the rest.
        [waker] = wakers
        waker.post(_Delivery(parts, waker))
        return
    for waker in wakers:
        waker.post(_Delivery([part.of(waker) for part in parts], waker))
