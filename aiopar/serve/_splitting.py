"""Which parts of a batch to run, so that one bad item does not fail the others."""

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .._error_handling import add_note_once, error_chain
from .._errors import InvalidInput, OutputMismatch
from ._part import Part
from ._request import Request

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
