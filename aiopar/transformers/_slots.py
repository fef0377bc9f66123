"""The keys and values of all requests that run."""

import itertools
from typing import Any

import torch
from transformers import Cache


class Slots(Cache):
    """Keys and values of all rows: per layer two buffers [slot, position, head, feature].

    The stepper sets the attributes before each forward.
    """

    capacity: tuple[int, int]  # how many slots and positions are in use
    target: tuple[torch.Tensor, torch.Tensor]  # the slots and positions that are written
    source: tuple[Any, slice]  # the slots and positions that are read

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._buffers: dict[int, list[torch.Tensor]] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [row, head, position, feature] of a layer; return `source`."""
        states = [key_states.transpose(1, 2), value_states.transpose(1, 2)]
        old = self._buffers.get(layer_idx) or [new[:0, :0] for new in states]
        buffers = [self._fitted(*pair) for pair in zip(old, states, strict=True)]
        self._buffers[layer_idx] = buffers
        for buffer, new in zip(buffers, states, strict=True):
            buffer.index_put_(self.target, new)
        keys, values = (buffer[self.source].transpose(1, 2) for buffer in buffers)
        return keys, values

    def _fitted(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the buffer, or a copy in another size: the next powers of two."""
        slots, places = (1 << (size - 1).bit_length() for size in self.capacity)
        small = len(buffer) < slots or buffer.shape[1] < places
        if not small and len(buffer) <= 4 * slots and buffer.shape[1] <= 4 * places:
            return buffer
        if small:  # in one direction; the other one may be large enough already
            slots, places = max(slots, len(buffer)), max(places, buffer.shape[1])
        fitted = states.new_zeros(slots, places, *states.shape[2:])
        fitted[: len(buffer), : buffer.shape[1]] = buffer[:slots, :places]
        return fitted

    def free(self, slot: int, last: int, places: int) -> None:
        """Move the first places of slot `last` into `slot`, and make those of `last` zero.

        A NaN that stays would reach the next row in this slot: attention multiplies it by 0.
        """
        for buffer in itertools.chain(*self._buffers.values()):
            buffer[slot : slot + 1, :places] = 0
            if slot < last < len(buffer):  # a failed forward may not have reached this layer
                buffer[slot, :places] = buffer[last, :places]
                buffer[last, :places] = 0

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers.clear()
