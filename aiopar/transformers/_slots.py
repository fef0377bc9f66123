"""The keys and values of all requests that run."""

import itertools
from typing import Any

import torch
from transformers import Cache


class Slots(Cache):
    """Keys and values of all rows: per layer two buffers [slot, position, head, feature].

    The attributes say what the next forward needs.
    """

    capacity: tuple[int, int]  # at least so many slots and positions
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
        """Write keys and values [row, head, position, feature] of a layer; return those to read."""
        states = [key_states.transpose(1, 2), value_states.transpose(1, 2)]
        old = self._buffers.get(layer_idx) or [new[:0, :0] for new in states]
        buffers = [self._grown(*pair) for pair in zip(old, states, strict=True)]
        self._buffers[layer_idx] = buffers
        for buffer, new in zip(buffers, states, strict=True):
            buffer.index_put_(self.target, new)
        keys, values = (buffer[self.source].transpose(1, 2) for buffer in buffers)
        return keys, values

    def _grown(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The buffer, or a larger one with its content: the next powers of two."""
        slots, places = self.capacity
        if len(buffer) >= slots and buffer.shape[1] >= places:
            return buffer
        slots, places = (
            1 << (max(pair) - 1).bit_length()
            for pair in zip(buffer.shape[:2], self.capacity, strict=True)
        )
        larger = states.new_zeros(slots, places, *states.shape[2:])
        larger[: len(buffer), : buffer.shape[1]] = buffer
        return larger

    def free(self, slot: int, last: int, places: int) -> None:
        """Move the first places of slot `last` into `slot`, and make those of `last` zero.

        Zero, because a NaN would reach the next row in this slot: attention multiplies by 0.
        """
        for buffer in itertools.chain(*self._buffers.values()):
            buffer[slot : slot + 1, :places] = 0
            if slot < last < len(buffer):  # a failed forward may not have reached this layer
                buffer[slot, :places] = buffer[last, :places]
                buffer[last, :places] = 0

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers.clear()
