"""Batches to their devices: through pinned host memory that is used again, on streams of their own.

A copy on the stream that computes would wait behind the kernels of the batch before, and one from
pageable memory would stop its thread until the stream has come so far. Here the worker copies into
pinned memory, launches, and waits for the copy alone.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from .._base.devices import (
    CallerStream,
    capture_streams,
    is_accelerator,
    order_after,
    record_event,
    share_memory,
    slot_stream,
    to_enter,
)
from .._base.tree import map_tensors, tensors
from ..nn._scatter_gather import move, scatter_sync

_SMALLEST = 4096


class PinnedBuffers:
    """Pinned memory by size, taken for one copy and given back; from any thread.

    There are never more buffers of a size than were in use at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes."""
        # To powers of two, so that batches of varying length share them.
        size = max(_SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            if free := self._free[size]:
                return free.pop()
        # No inference tensor, wherever this is called: it will be written to elsewhere too.
        with torch.inference_mode(mode=False):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Nothing reads them any more."""
        with self._lock:
            for buffer in buffers:
                self._free[buffer.numel()].append(buffer)


class DeviceCopies:
    """Puts batches on devices; called on workers.

    Args:
        devices: One: the batch goes there whole. Otherwise: one chunk on each, as `scatter` deals.
        whole: Whether the batch goes to the only device whole, and not as a list of one chunk.
    """

    def __init__(self, devices: Sequence[torch.device], *, whole: bool) -> None:
        self._devices = devices
        self._whole = whole
        self._buffers = PinnedBuffers()
        streams = {device: slot_stream(device) for device in devices}
        self._streams = [stream for stream in streams.values() if stream is not None]

    def __call__(self, batch: Any, readers: Sequence[CallerStream] = ()) -> Any:
        """The batch on its devices, complete there; `readers` are the streams that will read it."""
        taken: list[Tensor] = []
        try:
            with ExitStack() as entered:
                if any(is_accelerator(tensor.device) for tensor in tensors(batch)):
                    # Fetched there: by what the calling thread has launched.
                    for stream in self._streams:
                        order_after(capture_streams(), stream)
                for stream in self._streams:
                    entered.enter_context(to_enter(stream))
                if self._streams:
                    batch = map_tensors(lambda tensor: self._staged(tensor, taken), batch)
                placed = self._place(batch)
        finally:
            # Whatever happens: a buffer is not given back before the copy has read it.
            for stream in self._streams:
                record_event(stream).synchronize()
            self._buffers.give_back(taken)
        for reader in readers:
            share_memory(tensors(placed), reader.stream)
        return placed

    def _place(self, batch: Any) -> Any:
        if not self._whole:
            return scatter_sync(batch, self._devices)
        return map_tensors(lambda tensor: move(tensor, self._devices[0]), batch)

    def _staged(self, tensor: Tensor, taken: list[Tensor]) -> Tensor:
        """`tensor` in pinned memory, if it is pageable; nothing is lost where it is not."""
        if not _can_be_staged(tensor):
            return tensor
        buffer = self._buffers.take(tensor.numel() * tensor.element_size())
        taken.append(buffer)
        # With the strides that `.to` would give its copy.
        layout = torch.empty_like(tensor, device="meta")
        flat = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
        return flat.as_strided(layout.shape, layout.stride()).copy_(tensor)


def _can_be_staged(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    # What autograd follows is left to `.to`, which it can follow.
    free = not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return (
        plain
        and free
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not tensor.is_pinned()
    )


def can_pin() -> bool:
    """Whether there is an accelerator that pinned memory would be for."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and is_accelerator(accelerator)
