"""The results of a batch: how they reach the callers, and how a failed batch is split."""

import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch

from .._base.collate import unbatch
from .._base.tracebacks import add_note_once, error_chain
from ..errors import OutputMismatch
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


_ENOUGH = 4
"""After this many items have failed alone, a failed part is split into single items."""


class Splitting:
    """The parts of one batch: the whole, then halves of failed parts, until the bad item is alone.

    Every item gets its own chance: only the function can say which items are bad. The halves of a
    batch in which all items are bad would take 2n - 1 calls. So with `_ENOUGH` bad items a failed
    part is no longer halved: its items run alone, which takes about n calls.

    The batch's runner takes one part after the other, and reports the parts that failed:

        while part := splitting.next_part():
            try:
                outputs = compute(part)
            except Exception as error:
                splitting.failed(part, error)
    """

    def __init__(self, requests: list[Request]) -> None:
        self._failed_parts: deque[Part] = deque()
        self._count = len(requests)
        self._waiting: list[list[Request]] = [requests]
        """Parts to run."""
        self._failed_alone = 0
        """How many items have failed alone."""
        self._fitting = len(requests)
        """The most items that may fit into memory at once."""
        self._out_of_memory: list[Sequence[Request]] = []

    def next_part(self) -> list[Request]:
        """Take the next part; empty if there is none."""
        # Depth first, the first half first: few parts wait.
        while self._waiting:
            live = [request for request in self._waiting.pop() if not request.done]
            if len(live) > self._fitting:
                self._split(live, (len(live) + 1) // 2)
            elif live:
                return live
        return []

    @property
    def waiting(self) -> list[Request]:
        """The requests of the parts that wait to run."""
        return [request for part in self._waiting for request in part]

    def failed_parts(self) -> list[Part]:
        """The parts that have failed for good since the last call."""
        parts = []
        while self._failed_parts:
            parts.append(self._failed_parts.popleft())
        return parts

    def failed(self, part: list[Request], error: Exception) -> None:
        """Report that a part has failed; one of its items may be the reason."""
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
            self._split(part, 1 if self._failed_alone >= _ENOUGH else (len(part) + 1) // 2)
        else:
            self._failed_alone += 1
            add_note_once(error, f"raised by one item of a batch of {self._count}")
            self._failed_parts.append(Part(part, error=error))

    def _split(self, part: list[Request], size: int) -> None:
        starts = range(0, len(part), size)
        self._waiting += [part[start : start + size] for start in reversed(starts)]

    @property
    def too_large(self) -> list[Sequence[Request]]:
        """The parts that did not fit into memory, except those with an item too large by itself."""
        alone = {part[0] for part in self._out_of_memory if len(part) == 1}
        return [part for part in self._out_of_memory if alone.isdisjoint(part)]


def failed_midway(error: BaseException, count: int) -> None:
    """Note that `error` came after the callers had outputs: the batch is not split."""
    if isinstance(error, torch.OutOfMemoryError):
        release_tensors(error)
    add_note_once(error, f"raised after the first part of the output, for a batch of {count} items")


def release_tensors(error: BaseException) -> None:
    """Release the tensors of a failed try, which the frames of the tracebacks hold."""
    for one in error_chain(error):
        traceback.clear_frames(one.__traceback__)
