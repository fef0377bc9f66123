"""How a failed batch is split in halves, until the bad item is alone."""

from collections.abc import Sequence

import torch

from .._base.inputs import outline, outlines
from .._base.tracebacks import add_note_once, drop_frames, without_frames
from ..errors import OutputMismatch
from ._request import PartOutcome, Request

_MANY_BAD = 4  # after so many items have failed alone, a failed part is split into single items


class Splitting:
    """The parts of one batch that has failed: halves of failed parts, until the bad item is alone.

    Every item is tried: only the function can say which items are bad. Halving a batch of n bad
    items would take 2n - 1 calls. So after `_MANY_BAD` bad items a failed part is no longer halved:
    its items run alone, which takes about n calls.

    Args:
        batch: The requests of the batch.
    """

    def __init__(self, batch: Sequence[Request]) -> None:
        self._count = len(batch)
        self._items = outlines([request.item for request in batch])
        """The types and shapes of the items."""
        self._waiting: list[list[Request]] = []
        self._failed_alone = 0
        self._fitting = self._count  # the most items that may fit into memory at once
        self._out_of_memory: list[list[Request]] = []  # the parts that did not fit into memory

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

    def failed(self, part: list[Request], error: BaseException) -> PartOutcome | None:
        """Split a part that has failed, or return its outcome."""
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if out_of_memory:
            self._out_of_memory.append(part)
            # Later parts are tried at this size. An item that does not fit alone says nothing
            # about the other items.
            self._fitting = (len(part) + 1) // 2 if len(part) > 1 else self._count
        if isinstance(error, OutputMismatch):
            # The function is wrong: it would return a wrong number for fewer items, too.
            return PartOutcome(part, error=error)
        if len(part) > 1:
            if out_of_memory:
                drop_frames(error)  # frees memory; a reference cycle may keep the frames
            self._split(part, 1 if self._failed_alone >= _MANY_BAD else (len(part) + 1) // 2)
            return None
        self._failed_alone += 1
        if out_of_memory:
            without_frames(error)
        note = f"{self._count}; item: {outline(part[0].item)}"
        if self._count > 1:
            note += f"; batch: {self._items}"
        add_note_once(error, "raised by one item of a batch of ", note)
        return PartOutcome(part, error=error)

    def failed_midway(self, part: list[Request], error: BaseException) -> PartOutcome:
        """The outcome of a part that has failed after its callers had outputs."""
        if isinstance(error, torch.OutOfMemoryError):
            self._out_of_memory.append(part)
            without_frames(error)  # other batches need the memory before the callers drop the error
        note = "raised after the first part of the output, for a batch of "
        add_note_once(error, note, f"{len(part)} items")
        return PartOutcome(part, error=error)

    def _split(self, part: list[Request], size: int) -> None:
        starts = range(0, len(part), size)
        self._waiting += [part[start : start + size] for start in reversed(starts)]

    @property
    def too_large(self) -> list[list[Request]]:
        """The parts that did not fit into memory, except those with an item too large by itself."""
        alone = {part[0] for part in self._out_of_memory if len(part) == 1}
        return [part for part in self._out_of_memory if alone.isdisjoint(part)]
