"""Copies of batches to devices, through pinned host memory that is reused, on separate streams.

A copy on the computing stream would wait for the kernels of the previous batch. A copy from
pageable memory would block its thread until the stream reaches it. Here a worker copies into pinned
memory, launches the copy to the device, and waits only for that copy.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from .._base.devices import (
    CallerStream,
    all_accelerators,
    capture_streams,
    is_accelerator,
    order_after,
    record_event,
    share_memory,
    slot_stream,
    to_enter,
)
from .._base.forking import ReentrantLock
from .._base.tree import map_tensors, tensors
from ..nn._scatter_gather import move, move_objects, scatter_sync

_SMALLEST = 4096


class PinnedBuffers:
    """A pool of pinned buffers by size, as many as were in use at once; usable from any thread."""

    def __init__(self) -> None:
        self._lock = ReentrantLock()
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes."""
        # A power of two, so that batches of varying length share buffers.
        size = max(_SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            if free := self._free[size]:
                return free.pop()
        # Not an inference tensor, which could not be written to outside inference mode.
        with torch.inference_mode(mode=False):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Make the buffers available again; no copy may read them any more."""
        with self._lock:
            for buffer in buffers:
                self._free[buffer.numel()].append(buffer)


class DeviceCopies:
    """Copies batches to devices, on workers; objects with a method `to(device)` move themselves.

    A batch becomes a list of chunks, one per device, as by `scatter`. `whole`: it goes to the only
    device as it is.
    """

    def __init__(self, devices: Sequence[torch.device], *, whole: bool) -> None:
        self._devices = devices
        self._whole = whole
        self._buffers = PinnedBuffers()
        streams = {device: slot_stream(device) for device in devices}
        self._streams = [stream for stream in streams.values() if stream is not None]

    def __call__(self, batch: Any, readers: Sequence[CallerStream] = ()) -> Any:
        """The batch on its devices, complete; `readers` are the streams that will read it."""
        taken: list[Tensor] = []
        try:
            with ExitStack() as entered:
                if any(is_accelerator(tensor.device) for tensor in tensors(batch)):
                    # Kernels that this thread has launched may still write the batch.
                    for stream in self._streams:
                        order_after(capture_streams(), stream)
                for stream in self._streams:
                    entered.enter_context(to_enter(stream))
                if self._streams:
                    batch = map_tensors(lambda tensor: self._staged(tensor, taken), batch)
                if self._whole:
                    placed = map_tensors(lambda tensor: move(tensor, self._devices[0]), batch)
                else:
                    placed = scatter_sync(batch, self._devices)
        finally:
            # Also after an error: a copy that was launched may still read its buffer.
            for stream in self._streams:
                record_event(stream).synchronize()
            self._buffers.give_back(taken)
        with ExitStack() as entered:
            # Objects move on the readers' streams, because the allocator cannot be told which
            # streams read the tensors in an object.
            for reader in readers:
                entered.enter_context(to_enter(reader.stream))
            placed = self._move_objects(placed)
        for reader in readers:
            share_memory(tensors(placed), reader.stream)
        return placed

    def _move_objects(self, placed: Any) -> Any:
        if self._whole:
            return move_objects(placed, self._devices[0])
        pairs = zip(placed, self._devices, strict=False)  # a small batch has fewer chunks
        return [move_objects(chunk, device) for chunk, device in pairs]

    def _staged(self, tensor: Tensor, taken: list[Tensor]) -> Tensor:
        """A copy of `tensor` in pinned memory, or `tensor` itself if no copy can be made there."""
        if not _can_be_staged(tensor):
            return tensor
        buffer = self._buffers.take(tensor.numel() * tensor.element_size())
        taken.append(buffer)
        # The strides that `.to` would give to its copy.
        layout = torch.empty_like(tensor, device="meta")
        flat = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
        return flat.as_strided(layout.shape, layout.stride()).copy_(tensor)


def _can_be_staged(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    # A copy into a buffer would cut the autograd graph.
    free = not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return (
        plain
        and free
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not tensor.is_pinned()
    )


def can_pin() -> bool:
    """Whether this machine has an accelerator, to which pinned memory is copied faster."""
    return bool(all_accelerators())
