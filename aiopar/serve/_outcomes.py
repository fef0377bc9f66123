"""The results of a batch: how they reach the callers, and how a failed batch is split."""

import traceback
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch

from .._base.collate import unbatch
from .._base.tracebacks import add_note_once, error_chain
from ..errors import InvalidInput, OutputMismatch
from ..futures._wakeup import Waker
from ._request import Request


@dataclass(slots=True, eq=False)
class Part:
    """Requests that ran together, and their outputs or the error that they share."""

    requests: Sequence[Request]
    outputs: Any = None
    """The function's output for all of them or, if `unbatched`, one output per request."""
    unbatched: bool = False
    error: BaseException | None = None
    traceback: TracebackType | None = None
    """The error's traceback before any caller raised it: every raise adds frames."""

    def __post_init__(self) -> None:
        if self.error is not None:
            self.traceback = self.error.__traceback__

    def unbatch(self) -> None:
        """Take the outputs apart, into one per request: views, which take little time."""
        if self.error is not None or self.unbatched:
            return
        try:
            self.outputs = unbatch(self.outputs, len(self.requests))
            self.unbatched = True
        except Exception as error:  # noqa: BLE001  # a user's type of output may raise any error
            note = f"while the batch's outputs, {type(self.outputs)}, were taken apart"
            add_note_once(error, note)
            # The frames of the traceback hold this part.
            self.error = error.with_traceback(None)


def deliver_soon(parts: Sequence[Part]) -> None:
    """Deliver `parts` to the callers, on their event loops; from any thread."""
    wakers = {request.waker for part in parts for request in part.requests}
    if len(wakers) > 1:
        for part in parts:  # not in `_deliver`: two loops would do it at the same time
            part.unbatch()
    # One callback for all requests of a loop: waking a loop is what costs most.
    for waker in wakers:
        waker.post(partial(_deliver, parts, waker))


def _deliver(parts: Sequence[Part], waker: Waker) -> None:
    """Deliver `parts` to the callers on the loop of `waker`."""
    for part in parts:
        part.unbatch()
        for index, request in enumerate(part.requests):
            if request.waker is not waker:
                continue
            if part.error is not None:
                request.fail(part.error, part.traceback)
            else:
                request.resolve(part.outputs[index])


_ENOUGH = 4  # single items that fail with one type of error, while no item succeeds
_BROKEN = (
    f"not split further: {_ENOUGH} of the batch had failed with one type of error, each alone, and "
    "nothing had succeeded"
)


class Splitting:
    """The parts of one batch: the whole, then halves of failed parts, until the bad item is alone.

    The batch's runner takes one part after the other, and reports how each part ended:

        while part := splitting.next_part():
            try:
                outputs = compute(part)
            except Exception as error:
                splitting.failed(part, error)
            else:
                splitting.succeeded()

    Attributes:
        again: Whether a part has failed.
    """

    def __init__(self, requests: list[Request]) -> None:
        self._failed_parts: deque[Part] = deque()
        self.again = False
        self._count = len(requests)
        self._waiting: list[tuple[list[Request], Exception | None]] = [(requests, None)]
        """Parts to run, each with the error of the part that it is a half of."""
        self._succeeded = False
        self._fitting = len(requests)
        """The most items that may fit into memory at once."""
        self._out_of_memory: list[Sequence[Request]] = []
        self._failed_alone: list[type] = []

    def next_part(self) -> list[Request]:
        """Take the next part; empty if there is none."""
        # Depth first, the first half first: at most log2(n) halves wait.
        while self._waiting:
            part, failure = self._waiting.pop()
            live = [request for request in part if not request.done]
            if failure is not None and self._is_broken():
                add_note_once(failure, _BROKEN)
                self._failed_parts.append(Part(live, error=failure))
            elif len(live) > self._fitting:
                self._halve(live, failure)
            elif live:
                return live
        return []

    @property
    def waiting(self) -> list[Request]:
        """The requests of the parts that wait to run."""
        return [request for part, _ in self._waiting for request in part]

    def failed_parts(self) -> list[Part]:
        """The parts that have failed for good since the last call."""
        parts = []
        while self._failed_parts:
            parts.append(self._failed_parts.popleft())
        return parts

    def succeeded(self) -> None:
        """Report that a part has outputs."""
        self._succeeded = True

    def failed(self, part: list[Request], error: Exception) -> None:
        """Report that a part has failed; one of its items may be the reason."""
        self.again = True
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if out_of_memory:
            self._out_of_memory.append(part)
            # Later parts are tried at this size. An item that does not fit alone says nothing
            # about the other items.
            self._fitting = (len(part) + 1) // 2 if len(part) > 1 else self._count
        if len(part) > 1 or out_of_memory:
            release_tensors(error)
        if isinstance(error, OutputMismatch):
            # The function is wrong: it would return a wrong number for fewer items, too.
            self._failed_parts.append(Part(part, error=error))
        elif len(part) > 1:
            self._halve(part, error)
        else:
            if not isinstance(error, InvalidInput):  # with it, the function says that it works
                self._failed_alone.append(type(error))
            add_note_once(error, f"raised by one item of a batch of {self._count}")
            self._failed_parts.append(Part(part, error=error))

    def _halve(self, part: list[Request], failure: Exception | None) -> None:
        half = (len(part) + 1) // 2
        self._waiting += [(part[half:], failure), (part[:half], failure)]

    @property
    def too_large(self) -> list[Sequence[Request]]:
        """The parts that did not fit into memory, except those with an item too large by itself."""
        alone = {part[0] for part in self._out_of_memory if len(part) == 1}
        return [part for part in self._out_of_memory if alone.isdisjoint(part)]

    def _is_broken(self) -> bool:
        """Whether the function is broken, not an item."""
        most = max(Counter(self._failed_alone).values(), default=0)
        return not self._succeeded and most >= _ENOUGH


def failed_midway(error: BaseException, count: int) -> None:
    """Note that `error` came after the callers had outputs: the batch is not split."""
    if isinstance(error, torch.OutOfMemoryError):
        release_tensors(error)
    add_note_once(error, f"raised after the first part of the output, for a batch of {count} items")


def release_tensors(error: BaseException) -> None:
    """Release the tensors of a failed try, which the frames of the tracebacks hold."""
    for one in error_chain(error):
        traceback.clear_frames(one.__traceback__)
