"""Which parts of a batch to run, so that one bad item does not fail the others."""

import copy
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any

import torch

from .._base.collate import unbatch
from .._base.tracebacks import add_note_once, error_chain
from ..errors import InvalidInput, OutputMismatch
from ..futures._wakeup import Waker
from ._request import Request


def own_error(error: BaseException, traceback: TracebackType | None) -> BaseException:
    """A copy of `error` for one more caller, or `error` itself where it cannot be copied.

    Who raises an error writes to it: the frames it passes (`__traceback__`) and what was handled
    there (`__context__`). In one object for all, the log of one would show those of another.
    """
    try:
        copied = copy.copy(error)
        if copied is error or type(copied) is not type(error):
            return error
        # A constructor need not hand on what it was given; and what is a list would be shared.
        copied.args = error.args
        if hasattr(error, "__notes__"):
            copied.__notes__ = list(error.__notes__)
        copied.__cause__ = error.__cause__  # which sets `__suppress_context__`
        copied.__context__ = error.__context__
        copied.__suppress_context__ = error.__suppress_context__
        return copied.with_traceback(traceback)
    except Exception:  # noqa: BLE001  # of a constructor, or of a class that forbids it
        return error


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


_ENOUGH = 4  # single items that fail with one type, and nothing that succeeds
_BROKEN = (
    f"not split further: {_ENOUGH} of the batch had failed with one type of error, each alone, and "
    "nothing had succeeded"
)


class Splitting:
    """One batch and its parts: halves, when it fails, until the bad item stands alone.

    Whoever runs the batch asks for part after part, and tells of each how it went:

        for part in splitting:
            try:
                splitting.succeeded(part, compute(part), unbatched=False)
            except Exception as error:
                splitting.failed(part, error)

    Attributes:
        parts: What has an outcome.
        again: Whether some part has failed before the one that is asked for.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.parts: list[Part] = []
        self.again = False
        self._count = len(requests)
        # Each with the error that made it one.
        self._waiting: list[tuple[list[Request], Exception | None]] = [(requests, None)]
        self._succeeded = False
        self._fitting = len(requests)
        """How many fit into memory at once, at most."""
        self._out_of_memory: list[Sequence[Request]] = []
        self._failed_alone: list[type] = []

    def __iter__(self) -> Iterator[list[Request]]:
        # Depth first, the first half first, so that at most log2(n) halves wait.
        while self._waiting:
            part, failure = self._waiting.pop()
            # Expired or gone meanwhile: not computed any more.
            live = [request for request in part if not request.done]
            if failure is not None and self._is_broken():
                add_note_once(failure, _BROKEN)
                self.parts.append(Part(live, error=failure))
            elif len(live) > self._fitting:
                self._halve(live, failure)
            elif live:
                yield live

    def succeeded(self, part: Sequence[Request], outputs: Any, *, unbatched: bool) -> None:
        """A part has outputs; `unbatched`: a sequence of one for each request."""
        self._succeeded = True
        self.parts.append(Part(part, outputs, unbatched))

    def failed(self, part: list[Request], error: Exception) -> None:
        """A part has failed, and it may be an item's fault."""
        self.again = True
        if isinstance(error, torch.OutOfMemoryError):
            self._out_of_memory.append(part)
            # The parts that wait are tried at this size. But where one does not fit alone, it was
            # that one's fault, and says nothing about the others.
            self._fitting = (len(part) + 1) // 2 if len(part) > 1 else self._count
        if len(part) > 1 or isinstance(error, torch.OutOfMemoryError):
            _let_go_of_tensors(error)
        if isinstance(error, OutputMismatch):
            # The function's fault: it would return the wrong number for fewer, too.
            self.parts.append(Part(part, error=error))
            return
        if len(part) > 1:
            self._halve(part, error)
            return
        if not isinstance(error, InvalidInput):  # by which the function says that it is not broken
            self._failed_alone.append(type(error))
        add_note_once(error, f"raised by one item alone, of a batch of {self._count}")
        self.parts.append(Part(part, error=error))

    def _halve(self, part: list[Request], failure: Exception | None) -> None:
        half = (len(part) + 1) // 2
        self._waiting += [(part[half:], failure), (part[:half], failure)]

    @property
    def too_large(self) -> list[Sequence[Request]]:
        """The parts that did not fit into memory, and not for one item that does not by itself."""
        if not self._out_of_memory:
            return []
        alone = {part[0] for part in self._out_of_memory if len(part) == 1}
        return [part for part in self._out_of_memory if alone.isdisjoint(part)]

    def _is_broken(self) -> bool:
        """Whether it is the function that is broken, not an item."""
        most = max(Counter(self._failed_alone).values(), default=0)
        return not self._succeeded and most >= _ENOUGH


def failed_midway(error: BaseException, count: int) -> None:
    """A batch of `count` has failed when its callers had part of the output: it is not split."""
    if isinstance(error, torch.OutOfMemoryError):
        _let_go_of_tensors(error)
    add_note_once(error, f"raised after the first part of the output, for a batch of {count} items")


def _let_go_of_tensors(error: BaseException) -> None:
    """What a failed try had allocated hangs on its frames, of which the error holds the traceback.

    To be let go of before the next try.
    """
    for one in error_chain(error):
        traceback.clear_frames(one.__traceback__)
