"""Devices, streams and events: the one module that knows what an accelerator is.

Everything here goes through `torch.accelerator`, `torch.Stream` and `torch.get_device_module`, so
that CUDA, XPU, MPS and out-of-tree backends are one case. A device without streams (CPU, meta) has
`None` where an accelerator has a stream.
"""

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .arguments import as_int

Device: TypeAlias = torch.device | str | int
"""What a device argument may be; an int is an accelerator index, as in `torch.nn.parallel`."""

_CPU, _META = torch.device("cpu"), torch.device("meta")
# torch knows "cpu" and "cpu:0" as two unequal devices; to us they are one.
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
    """Every accelerator of this machine, in index order; empty where there is none."""
    # Asked anew each time, for an out-of-tree backend may be registered after aiopar is imported.
    accelerator = torch.accelerator.current_accelerator()
    return () if accelerator is None else _devices_of(accelerator)


def supported_accelerator() -> str | None:
    """The kind of accelerator that this torch knows: the machine may have some; None: none."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def accelerators_in_use() -> tuple[torch.device, ...]:
    """All, if this process may have launched something on them.

    Until then nothing is to be ordered, and to ask for streams would claim memory there; in a child
    forked later, which can use them no more, it would raise.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return ()
    # First: whether one is available is asked of CUDA's driver, after which no forked child of this
    # process could use it.
    in_use = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return _devices_of(accelerator) if in_use is None or in_use() else ()


def core_count() -> int:
    """How many cores this process may use: on a pinned host fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def default_devices() -> tuple[torch.device, ...]:
    """Every accelerator; where there is none, the CPU once for each core, at least twice."""
    return all_accelerators() or (torch.device("cpu"),) * max(2, core_count())


def _accelerator_type() -> str | None:
    devices = all_accelerators()
    return devices[0].type if devices else None


def is_accelerator(device: torch.device) -> bool:
    """Whether work on `device` is asynchronous: launched on a stream, awaited by an event."""
    return device.type not in ("cpu", "meta") and device.type == _accelerator_type()


def any_accelerator(devices: Iterable[torch.device]) -> bool:
    """Whether one of `devices` is an accelerator."""
    return any(map(is_accelerator, devices))


def parse_device(device: Device) -> torch.device:
    """The one canonical `torch.device` for `device`; equal devices compare equal.

    Args:
        device: A `torch.device`, a string, or an accelerator's index. An accelerator without an
            index is the current one of that type.

    Raises:
        TypeError: It is none of these.
        ValueError: There is no such device on this machine.
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
    present = _accelerator_type()
    if present is None or kind not in (None, present):
        found = "no accelerator" if present is None else f"only {present} accelerators"
        raise ValueError(f"device {given!r} is not available: this machine has {found}")
    if index is None:
        index = torch.accelerator.current_device_index()
    count = torch.accelerator.device_count()
    if not 0 <= index < count:
        raise ValueError(f"device {given!r} is out of range: expected an index in [0, {count})")
    return torch.device(present, index)


def parse_devices(devices: Iterable[Device]) -> tuple[torch.device, ...]:
    """Canonical devices, repeats kept.

    Raises:
        TypeError: `devices` is a lone string or bytes, or holds something that is no device.
        ValueError: It is empty, or names a device that this machine does not have.
    """
    # The bytes of a string are ints, and would be taken for indices.
    if isinstance(devices, str | bytes | bytearray) or not isinstance(devices, Iterable):
        raise TypeError(f"devices must be a sequence of devices, got {devices!r}")
    parsed = tuple(parse_device(device) for device in devices)
    if not parsed:
        raise ValueError("devices is empty: expected at least one device")
    return parsed


def slot_stream(device: torch.device) -> torch.Stream | None:
    """A stream for one worker of `device`.

    Never the default one: there, what the event loop's thread reads back (`.tolist()`) would wait
    behind the kernels of calls that came later.
    """
    if not is_accelerator(device):
        return None
    # In use from here on, not from the first tensor: callers' streams are to be looked at.
    initialize = getattr(torch.get_device_module(device), "init", None)
    if initialize is not None:
        initialize()
    return _as_own_class(torch.Stream(device=device))


def current_stream(device: torch.device | None = None) -> torch.Stream:
    """The calling thread's current stream of an accelerator; None: of the current one."""
    return _as_own_class(torch.accelerator.current_stream(device))


@functools.cache
def default_stream(device: torch.device) -> torch.Stream:
    """The default stream of an accelerator."""
    module = torch.get_device_module(device)
    if hasattr(module, "default_stream"):
        stream: torch.Stream = module.default_stream(device)
        return stream
    # XPU, say, does not tell: it is what a thread has that has set none.
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(current_stream, device).result()


def _as_own_class(stream: torch.Stream) -> torch.Stream:
    """The same stream, of its backend's own class (`torch.cuda.Stream`) where there is one.

    A plain `torch.Stream` does not go with the backend's own events, which `new_event` needs. Up to
    torch 2.10 `torch.cuda.Event.record` reads past the end of one; up to 2.11 one that is to wait
    for such an event waits for nothing. And CUDA's streams are unequal to all plain ones.
    """
    own_class = getattr(torch.get_device_module(stream.device), "Stream", None)
    if own_class is None or isinstance(stream, own_class):
        return stream
    return _another(stream, own_class)


def to_enter(stream: torch.Stream) -> torch.Stream:
    """`stream`, for one `with` block.

    Entered, an object keeps what it has replaced until it is left. Two threads within one object at
    the same time would leave it with each other's streams.
    """
    return _another(stream, torch.Stream)


def _another(stream: torch.Stream, stream_class: type[torch.Stream]) -> torch.Stream:
    """The same stream in another object."""
    return stream_class(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def bind_thread(stream: torch.Stream) -> None:
    """Make `stream` and its device the current ones of the calling thread."""
    torch.accelerator.set_device_index(stream.device.index)
    torch.accelerator.set_stream(stream)


def new_event(device: torch.device) -> torch.Event:
    """An event whose `synchronize` sleeps where the backend can, instead of spinning."""
    module = torch.get_device_module(device)
    event_class = getattr(module, "Event", None)
    if event_class is None or not hasattr(module, "Stream"):  # MPS's events know no streams
        return torch.Event(device)
    with torch.accelerator.device_index(device.index):
        event: torch.Event = event_class(**_event_options(event_class))
    return event


@functools.cache
def _event_options(event_class: Callable[..., torch.Event]) -> dict[str, bool]:
    # `torch.Event(blocking=True)` ignores its argument in 2.13; CUDA's own class does not. XPU's
    # has none.
    try:
        event_class(blocking=True)
    except TypeError:
        return {}
    return {"blocking": True}


def record_event(stream: torch.Stream) -> torch.Event:
    """An event that is done when everything launched on `stream` so far is done."""
    event = new_event(stream.device)
    event.record(stream)
    return event


@dataclass(frozen=True, slots=True)
class CallerStream:
    """A caller's current stream of one accelerator, and how far it was when the call was made."""

    stream: torch.Stream
    event: torch.Event | None
    """None on the default stream, for most calls: the worker records it when it starts, off the
    event loop; what was launched there meanwhile is waited for too."""


def capture_streams() -> tuple[CallerStream, ...]:
    """The calling thread's current stream of every accelerator; empty where none is in use."""
    devices = accelerators_in_use()
    if not devices:  # for every call, so without the generator below
        return ()
    return tuple(_captured(device) or _at_default(device) for device in devices)


def capture_side_streams() -> tuple[CallerStream, ...]:
    """Those of them that are not the default ones; mostly none."""
    captured = map(_captured, accelerators_in_use())
    return tuple(caller for caller in captured if caller is not None)


def _captured(device: torch.device) -> CallerStream | None:
    if on_stream(default_stream(device)):
        return None
    own = current_stream(device)
    return CallerStream(own, record_event(own))


@functools.cache
def _at_default(device: torch.device) -> CallerStream:
    return CallerStream(default_stream(device), None)


def default_streams(devices: Iterable[torch.device]) -> tuple[CallerStream, ...]:
    """What `capture_streams` gives to who has set no stream."""
    return tuple(map(_at_default, devices))


def on_stream(stream: torch.Stream) -> bool:
    """Whether it is the calling thread's current one of its device."""
    # By numbers: to look at each object's device would take most of the time.
    current: torch.Stream = torch.accelerator.current_stream(stream.device_index)
    return current.stream_id == stream.stream_id


def order_after(callers: Iterable[CallerStream], own: torch.Stream | None = None) -> None:
    """Make the calling thread's streams wait for what its caller had launched.

    Args:
        callers: The caller's stream of each accelerator.
        own: What waits on its device instead of the thread's current stream.
    """
    for caller in callers:
        device = caller.stream.device
        target = own if own is not None and own.device == device else current_stream(device)
        if caller.stream != target:
            target.wait_event(caller.event or record_event(caller.stream))


def result_events(
    result: Iterable[torch.Tensor], own: torch.Stream | None = None
) -> list[torch.Event]:
    """Events that are done when `result` is complete, wherever the calling worker launched it.

    That is its own stream, if it has one, and, for tensors on other accelerators, the current ones.
    """
    devices = {tensor.device for tensor in result if is_accelerator(tensor.device)}
    streams = [current_stream(device) for device in devices if own is None or device != own.device]
    return [record_event(stream) for stream in (*streams, *([] if own is None else [own]))]


def share_memory(tensors: Iterable[torch.Tensor], stream: torch.Stream) -> None:
    """Tell the allocator that `stream` uses `tensors`, so that it reuses their memory after it.

    A tensor's memory returns to the stream it was allocated on as soon as the last reference goes;
    without this, that stream could overwrite it while `stream` still reads.
    """
    for tensor in tensors:
        # Others than strided ones, sparse ones say, have no memory of their own to record.
        if tensor.device == stream.device and tensor.layout == torch.strided:
            tensor.record_stream(stream)


def is_device_error(error: BaseException) -> bool:
    """Whether the device has failed for good: no later work on it can succeed in this process."""
    return isinstance(error, torch.AcceleratorError)
