"""`torch.sim`, which `torch.get_device_module("sim")` gives: shaped like `torch.cuda`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TypeAlias

import torch

from ._native import native

_Device: TypeAlias = int | str | torch.device | None


def _index(device: _Device) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "sim":
            raise ValueError(f"expected a sim device, got {device}")
        device = device.index
    return native().current_device() if device is None else device


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return native().was_used() and not _is_in_bad_fork()


def init() -> None:
    """Nothing to do: the extension is ready when it is loaded."""


def _lazy_init() -> None:
    init()


def _is_in_bad_fork() -> bool:
    return native().in_bad_fork()


def device_count() -> int:
    return native().device_count()


def current_device() -> int:
    return native().current_device()


def set_device(device: _Device) -> None:
    native().set_device(_index(device))


class device(  # noqa: N801 - the name that torch.cuda gave it
    contextlib.AbstractContextManager["device"]
):
    """Context manager: the current device of this thread."""

    def __init__(self, device: _Device) -> None:
        self._wanted = _index(device)
        self._before = -1

    def __enter__(self) -> device:
        self._before = native().current_device()
        native().set_device(self._wanted)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        native().set_device(self._before)


# Streams and events go together as CUDA's did up to torch 2.10, which is stricter than later ones:
# none of these classes understands the plain `torch.Stream` or `torch.Event`.


class Stream(torch.Stream):
    """A stream of the pool of 32 that a device has; they are handed out in turn."""

    def __new__(cls, device: _Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:  # stream_id, device_index, device_type: an existing stream
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, torch.device("sim", _index(device)), priority=priority)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and super().__eq__(other)

    __hash__ = torch.Stream.__hash__

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        recorded = Event() if event is None else event
        recorded.record(self)
        return recorded

    def wait_stream(self, other: torch.Stream) -> None:
        self.wait_event(other.record_event())


def _own(stream: torch.Stream | None) -> Stream:
    """CUDA's would read past the end of a plain stream."""
    if stream is None:
        return current_stream()
    if not isinstance(stream, Stream):
        raise TypeError(f"expected a torch.sim.Stream, got {stream!r}")
    return stream


class Event(torch.Event):
    """An event. `blocking` is taken for its name's sake: waiting never spins here.

    It keeps the real one: a plain stream that is given this one waits for nothing.
    """

    _event: torch.Event

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        if interprocess:
            raise ValueError("sim has no interprocess events")
        event = super().__new__(cls, torch.device("sim"))
        event._event = torch.Event(torch.device("sim"), enable_timing=enable_timing)
        return event

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # as torch's, in fact
        return self._event.device

    def record(self, stream: torch.Stream | None = None) -> None:
        self._event.record(_own(stream))

    def wait(self, stream: torch.Stream | None = None) -> None:
        self._event.wait(_own(stream))

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize()


def current_stream(device: _Device = None) -> Stream:
    stream = torch.accelerator.current_stream(_index(device))
    return Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def default_stream(device: _Device = None) -> Stream:
    index = _index(device)
    kind = current_stream(index).device_type
    return Stream(stream_id=0, device_index=index, device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Makes the stream, and its device, current for this thread; None changes nothing."""
    if stream is None:
        yield
        return
    with stream:
        yield


def synchronize(device: _Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def memory_allocated(device: _Device = None) -> int:
    return native().memory_allocated(_index(device))


def max_memory_allocated(device: _Device = None) -> int:
    return native().max_memory_allocated(_index(device))


def reset_peak_memory_stats(device: _Device = None) -> None:
    native().reset_peak(_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Free and total bytes."""
    total = native().memory_limit(_index(device))
    return max(total - memory_allocated(device), 0), total


def empty_cache() -> None:
    """Nothing to do: freed memory is not kept."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    native().default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        native().default_generator(index).manual_seed(seed)


def seed() -> None:
    native().default_generator(current_device()).seed()


def initial_seed() -> int:
    return native().default_generator(current_device()).initial_seed()


def get_rng_state(device: _Device = None) -> torch.Tensor:
    return native().default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    native().default_generator(_index(device)).set_state(new_state)
