"""Devices, streams and events: the only module that knows accelerators.

It uses `torch.accelerator`, `torch.Stream` and `torch.get_device_module`, so that CUDA, XPU, MPS
and out-of-tree backends are one case. A device without streams (CPU, meta) has `None` in place of a
stream.
"""

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .arguments import as_int
from .operator_threads import core_count

Device: TypeAlias = torch.device | str | int
"""A device argument. An int is the index of an accelerator, as in `torch.nn.parallel`."""

_CPU, _META = torch.device("cpu"), torch.device("meta")
# In torch "cpu" and "cpu:0" are unequal devices; here they are one.
_STREAMLESS: dict[Device, torch.device] = {
    name: device
    for device in (_CPU, _META)
    for name in (device, f"{device}", f"{device}:0", torch.device(f"{device}:0"))
}


@functools.cache
def _devices_of(accelerator: torch.device) -> tuple[torch.device, ...]:
    if not torch.accelerator.is_available():
        return ()
    kind = accelerator.type
    return tuple(torch.device(kind, index) for index in range(torch.accelerator.device_count()))


def all_accelerators() -> tuple[torch.device, ...]:
    """Every accelerator of this machine, in the order of the indices."""
    # Never cached: an out-of-tree backend may be registered after aiopar is imported.
    accelerator = torch.accelerator.current_accelerator()
    return () if accelerator is None else _devices_of(accelerator)


def supported_accelerator() -> str | None:
    """The device type that this build of torch supports, whether or not the machine has one."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def unsupported_hardware() -> str | None:
    """Accelerators of this machine that torch does not find, in words; None if there are none."""
    gpus = "/proc/driver/nvidia/gpus"  # a build of torch for the CPU cannot ask the driver
    if all_accelerators() or not os.path.isdir(gpus) or not os.listdir(gpus):
        return None
    return f"This machine has an NVIDIA GPU that torch {torch.__version__} does not find"


def describe_accelerator(device: torch.device) -> tuple[str | None, int | None]:
    """The name and the memory in bytes of an accelerator; None for what its backend hides."""
    module = torch.get_device_module(device)
    properties = getattr(module, "get_device_properties", lambda _: None)(device)
    return getattr(properties, "name", None), getattr(properties, "total_memory", None)


def accelerators_in_use() -> tuple[torch.device, ...]:
    """Every accelerator, if this process may have launched work on accelerators; else none.

    Before such work, a look at the streams would claim memory. In a forked child it would raise.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return ()
    # Before `_devices_of`, which asks CUDA's driver: from then on no forked child can use CUDA.
    in_use = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return _devices_of(accelerator) if in_use is None or in_use() else ()


def default_devices() -> tuple[torch.device, ...]:
    """Every accelerator; without one, the CPU once per core, and at least twice."""
    return all_accelerators() or (_CPU,) * max(2, core_count())


def is_accelerator(device: torch.device) -> bool:
    """Whether work on `device` is asynchronous, with streams and events."""
    if device.type in ("cpu", "meta"):  # a quick answer for most calls
        return False
    return any(device.type == accelerator.type for accelerator in all_accelerators())


def parse_device(device: Device) -> torch.device:
    """Return the canonical `torch.device` of `device`, so that equal devices compare equal.

    An accelerator without an index is the current one. Raises TypeError for what is no device, and
    ValueError if this machine has no such device.
    """
    if not isinstance(device, (torch.device, str)):
        index = as_int("device", device, "a torch.device, a str or an int")
        return _accelerator(None, index, index)
    known = _STREAMLESS.get(device)
    if known is not None:
        return known
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}: {error}") from None
    if parsed.type in ("cpu", "meta"):  # with another index
        return torch.device(parsed.type)
    return _accelerator(parsed.type, parsed.index, device)


def _accelerator(kind: str | None, index: int | None, given: Device) -> torch.device:
    present = all_accelerators()
    if not present or kind not in (None, present[0].type):
        found = f"only {present[0].type} accelerators" if present else "no accelerator"
        raise ValueError(f"device {given!r} is not available: this machine has {found}")
    if index is None:
        index = torch.accelerator.current_device_index()
    count = len(present)
    if not 0 <= index < count:
        raise ValueError(f"device {given!r} is out of range: expected an index in [0, {count})")
    return present[index]


def parse_devices(devices: Iterable[Device]) -> tuple[torch.device, ...]:
    """Return canonical devices, repeats included; raise as `parse_device`, and for none at all."""
    # The items of bytes are ints, and would be indices.
    if isinstance(devices, str | bytes | bytearray) or not isinstance(devices, Iterable):
        raise TypeError(f"devices must be a sequence of devices, got {devices!r}")
    parsed = tuple(parse_device(device) for device in devices)
    if not parsed:
        raise ValueError("devices is empty: expected at least one device")
    return parsed


def slot_stream(device: torch.device) -> torch.Stream | None:
    """Make a stream for one worker of `device`; None for a device without streams.

    Workers do not use the default stream: there, a read by the event loop's thread (`.tolist()`)
    would wait for the kernels of later calls.
    """
    if not is_accelerator(device):
        return None
    # From now on the accelerator counts as in use: `capture_streams` must see callers' streams.
    getattr(torch.get_device_module(device), "init", lambda: None)()
    return _as_own_class(torch.Stream(device=device))


def current_stream(device: torch.device | None = None) -> torch.Stream:
    """The calling thread's current stream of `device`, or of the current accelerator for None."""
    return _as_own_class(torch.accelerator.current_stream(device))


@functools.cache
def default_stream(device: torch.device) -> torch.Stream:
    """The default stream of an accelerator."""
    module = torch.get_device_module(device)
    if hasattr(module, "default_stream"):
        return module.default_stream(device)  # type: ignore[no-any-return]  # a torch.Stream
    # XPU has no such function. A new thread has the default stream.
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(current_stream, device).result()


def _as_own_class(stream: torch.Stream) -> torch.Stream:
    """Return the same stream as an object of its backend's class (`torch.cuda.Stream`), if any.

    Up to torch 2.10, `torch.cuda.Event.record` reads past the end of a plain `torch.Stream`; up to
    2.11, a plain stream does not wait for such an event. The two are never equal.
    """
    own_class = getattr(torch.get_device_module(stream.device), "Stream", torch.Stream)
    return stream if isinstance(stream, own_class) else to_enter(stream, own_class)


def to_enter(stream: torch.Stream, kind: type[torch.Stream] = torch.Stream) -> torch.Stream:
    """Return a new object for the same stream, for one `with` block.

    An entered object keeps the thread's earlier stream, so two threads must not enter one object.
    """
    index, device_type = stream.device_index, stream.device_type
    return kind(stream_id=stream.stream_id, device_index=index, device_type=device_type)


def bind_thread(stream: torch.Stream) -> None:
    """Make `stream` and its device current on the calling thread."""
    torch.accelerator.set_device_index(stream.device.index)
    torch.accelerator.set_stream(stream)


def _new_event(device: torch.device) -> torch.Event:
    # `synchronize` of the event sleeps instead of spinning, if the backend can.
    module = torch.get_device_module(device)
    event_class = getattr(module, "Event", None)
    if event_class is None or not hasattr(module, "Stream"):  # MPS's events know no streams
        return torch.Event(device)
    with torch.accelerator.device_index(device.index):
        event: torch.Event = event_class(**_event_options(event_class))
    return event


@functools.cache
def _event_options(event_class: Callable[..., torch.Event]) -> dict[str, bool]:
    # CUDA's class has this argument, XPU's has not, and `torch.Event` ignores it (torch 2.13).
    try:
        event_class(blocking=True)
    except TypeError:
        return {}
    return {"blocking": True}


def record_event(stream: torch.Stream) -> torch.Event:
    """Record an event on `stream`; it is done when all work launched there so far is done."""
    event = _new_event(stream.device)
    event.record(stream)
    return event


@dataclass(frozen=True, slots=True)
class CallerStream:
    """The stream of one accelerator that was the caller's current stream at the time of a call."""

    stream: torch.Stream
    event: torch.Event | None
    """Done when the work launched before the call is done. None for the default stream: there the
    worker records the event when the call starts, off the event loop."""


def capture_streams() -> tuple[CallerStream, ...]:
    """The calling thread's current stream of every accelerator; empty if none is in use."""
    return tuple(map(_captured, accelerators_in_use()))


def _captured(device: torch.device) -> CallerStream:
    if on_stream(default_stream(device)):
        return _at_default(device)
    own = current_stream(device)
    return CallerStream(own, record_event(own))


@functools.cache
def _at_default(device: torch.device) -> CallerStream:
    return CallerStream(default_stream(device), None)


def default_streams(devices: Iterable[torch.device]) -> tuple[CallerStream, ...]:
    """The result of `capture_streams` on a thread that has set no stream."""
    return tuple(map(_at_default, devices))


def on_stream(stream: torch.Stream) -> bool:
    """Whether `stream` is the calling thread's current stream of its device."""
    current: torch.Stream = torch.accelerator.current_stream(stream.device_index)
    return current.stream_id == stream.stream_id


def order_after(callers: Iterable[CallerStream], own: torch.Stream | None = None) -> None:
    """Make the calling thread's streams wait for the work launched on the streams `callers`.

    On the device of `own`, the stream `own` waits in place of the thread's current stream.
    """
    for caller in callers:
        device = caller.stream.device
        target = own if own is not None and own.device == device else current_stream(device)
        if caller.stream != target:
            target.wait_event(caller.event or record_event(caller.stream))


def result_events(
    result: Iterable[torch.Tensor], own: torch.Stream | None = None
) -> list[torch.Event]:
    """Record events that are done when `result`, launched by this thread, is complete.

    The events are on the worker's stream `own`, if any, and on the current streams of the other
    accelerators that `result` has tensors on.
    """
    devices = {tensor.device for tensor in result if is_accelerator(tensor.device)}
    streams = [current_stream(device) for device in devices if own is None or device != own.device]
    return [record_event(stream) for stream in (*streams, *([] if own is None else [own]))]


def share_memory(tensors: Iterable[torch.Tensor], stream: torch.Stream) -> None:
    """Tell the allocator that `stream` uses `tensors`: it reuses their memory only afterwards.

    Otherwise the tensor's own stream could overwrite the memory while `stream` still reads.
    """
    for tensor in tensors:
        # A sparse tensor has no memory of its own.
        if tensor.device == stream.device and tensor.layout == torch.strided:
            tensor.record_stream(stream)


def is_device_error(error: BaseException) -> bool:
    """Whether the device has failed for this process: no later work on it can succeed."""
    return isinstance(error, torch.AcceleratorError)
