"""Loading the simulated device, and the knobs that only a simulator has."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.utils import backend_registration

from . import _build, device as _sim
from ._native import native

_Device: TypeAlias = int | str | torch.device | None

DEFAULT_MEMORY_LIMIT = 16 << 30
"""Bytes that a device has until `set_memory_limit` says otherwise."""

_MAX_DEVICES = 16


@dataclass(frozen=True, slots=True)
class Availability:
    """True if the simulator can be loaded; else `reason` says what is missing."""

    reason: str | None

    def __bool__(self) -> bool:
        return self.reason is None


def available() -> Availability:
    """Whether `load` can work here: the extension is built, or what builds it is installed."""
    return Availability(None if _build.built() is not None else _build.missing())


@functools.cache
def load() -> None:
    """Build the extension if need be and register it as torch's accelerator, "sim".

    Later calls do nothing. The environment variable SIMDEV_COUNT (default 2) sets the number of
    devices. Load before the first backward of the process: autograd starts its device threads
    then, one for each device it knows. From then on `torch.accelerator` is `sim`, for the rest of
    the process; see `hidden`.

    Raises:
        RuntimeError: it cannot be built; `available` says so beforehand.
        ValueError: SIMDEV_COUNT is not a number from 1 to 16.
    """
    count = os.environ.get("SIMDEV_COUNT") or "2"
    if not count.isdecimal() or not 1 <= int(count) <= _MAX_DEVICES:
        raise ValueError(f"SIMDEV_COUNT must be a number from 1 to {_MAX_DEVICES}, got {count!r}")
    if (found := available()).reason is not None:
        raise RuntimeError(f"cannot build the simulated device: {found.reason}")
    native()
    backend_registration.rename_privateuse1_backend("sim")
    register: Callable[[str, object], None] = torch._register_device_module
    register("sim", _sim)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)


def _devices(wanted: _Device) -> list[int]:
    if wanted is None:
        return list(range(_sim.device_count()))
    return [_sim._index(wanted)]


def set_kernel_latency(seconds: float, device: _Device = None) -> None:
    """How long a stream sleeps before each kernel, on one device or all."""
    for index in _devices(device):
        native().set_kernel_latency(index, seconds)


def set_copy_latency(seconds: float, device: _Device = None) -> None:
    """How long a stream sleeps before each copy to or from the host or another device."""
    for index in _devices(device):
        native().set_copy_latency(index, seconds)


def set_memory_limit(device: _Device, size: int) -> None:
    """Bytes that fit on the device; an allocation beyond raises `torch.OutOfMemoryError`."""
    for index in _devices(device):
        native().set_memory_limit(index, size)


def set_inline(enabled: bool) -> None:
    """Whether work may run on the launching thread (the default).

    It does where nobody can tell: the stream is idle and the work has no latency.
    """
    native().set_inline(enabled)


def set_poison(enabled: bool) -> None:
    """Whether freed memory is overwritten, in the order of the stream that allocated it (default).

    A stream that still reads it, neither ordered nor named by `record_stream`, reads NaN then.
    """
    native().set_poison(enabled)


@contextlib.contextmanager
def paused(where: _Device | torch.Stream = None) -> Iterator[None]:
    """One stream, those of one device, or all start no further work inside.

    What is launched stays queued, whatever time passes. Reading a value and copying pageable
    memory wait for the stream: for ever, on the thread that pauses it.
    """
    if isinstance(where, torch.Stream):
        held = [(where.device_index, where.stream_id)]
    else:
        held = [(index, stream) for index in _devices(where) for stream in range(native().streams)]
    for index, stream in held:
        native().hold(index, stream)
    try:
        yield
    finally:
        for index, stream in held:
            native().release(index, stream)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """`torch.accelerator.is_available()` is False inside, as on a machine without accelerator."""
    native().set_visible(False)
    try:
        yield
    finally:
        native().set_visible(True)


def sleep(seconds: float, device: _Device = None) -> None:
    """Launch a kernel on the current stream that does nothing but take this time."""
    native().sleep(_sim._index(device), seconds)


def fail_next_sync(message: str, device: _Device = None) -> None:
    """Launch a kernel on the current stream that fails.

    Who synchronises next with the stream, or with an event of it, or reads a value, gets the
    `RuntimeError`.
    """
    native().fail(_sim._index(device), message)


def pending_streams(device: _Device = None) -> int:
    """How many streams have work that is not done."""
    return sum(native().pending(index) for index in _devices(device))


def recorded_streams(tensor: torch.Tensor) -> frozenset[int]:
    """Ids of the streams that `record_stream` has named for the tensor's memory."""
    return frozenset(native().recorded_streams(tensor))


def reset() -> None:
    """Wait for all devices and put every knob back: for the end of a test.

    Failures that nobody has seen are dropped.
    """
    set_kernel_latency(0.0)
    set_copy_latency(0.0)
    set_inline(True)
    set_poison(True)
    for index in _devices(None):
        native().set_memory_limit(index, DEFAULT_MEMORY_LIMIT)
        while _failed(index):
            pass


def _failed(index: int) -> bool:
    try:
        _sim.synchronize(index)
    except RuntimeError:
        return True  # of one stream; another may have one too
    return False
