"""`aiopar._base.devices`: devices, streams and events."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from aiopar._base.devices import (
    _event_options,
    bind_thread,
    capture_streams,
    current_stream,
    default_stream,
    record_event,
    slot_stream,
    to_enter,
)
from aiopar.testing import Sequencer


@pytest.mark.sim
def test_streams_and_events_have_the_backends_classes() -> None:
    # Up to torch 2.10, CUDA's events read past the end of a plain stream.
    sim, device = torch.get_device_module("sim"), torch.device("sim:1")
    slot, default = slot_stream(device), default_stream(device)
    assert type(slot) is type(default) is type(current_stream(device)) is sim.Stream
    assert default == sim.default_stream(1) == current_stream(device) != slot
    event = record_event(default)
    assert type(event) is sim.Event
    with torch.Stream(device=device) as plain:
        _, captured = capture_streams()
        assert type(captured.stream) is sim.Stream
        assert captured.stream.stream_id == plain.stream_id
        assert type(captured.event) is sim.Event


@pytest.mark.sim
def test_the_default_stream_with_and_without_the_backends_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim, device = torch.get_device_module("sim"), torch.device("sim:1")
    find = default_stream.__wrapped__  # without its cache
    with torch.Stream(device=device) as other:
        monkeypatch.setattr(sim, "default_stream", lambda _: other)
        assert find(device) is other
        monkeypatch.delattr(sim, "default_stream")  # as in XPU
        assert find(device) == default_stream(device) != current_stream(device)


@pytest.mark.sim
def test_only_streams_other_than_the_default_ones_are_captured_with_an_event() -> None:
    assert all(captured.event is None for captured in capture_streams())
    with torch.Stream(device="sim:1") as side:
        captured = next(one for one in capture_streams() if one.stream.device.index == 1)
    assert captured.stream.stream_id == side.stream_id
    assert captured.event is not None


@pytest.mark.sim
def test_a_device_with_a_worker_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on `capture_streams` sees the callers' streams, also before the first tensor."""
    began: list[str] = []
    monkeypatch.setattr(torch.get_device_module("sim"), "init", lambda: began.append("init"))
    slot_stream(torch.device("sim:1"))
    assert began == ["init"]


@pytest.mark.sim
def test_threads_that_enter_one_stream_get_their_own_stream_back() -> None:
    device = torch.device("sim:0")
    shared = slot_stream(device)
    assert shared is not None
    order = Sequencer()

    def enter(index: int) -> bool:
        own = slot_stream(device)
        assert own is not None
        bind_thread(own)
        with ExitStack() as entered:
            with order(index):
                entered.enter_context(to_enter(shared))
            with order(2 + index):
                entered.close()
        return current_stream(device) == own

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(enter, range(2)))


@pytest.mark.sim
def test_a_backend_without_classes_uses_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.get_device_module("sim"), "Stream")
    stream = slot_stream(torch.device("sim:0"))
    assert type(stream) is torch.Stream
    event = record_event(stream)
    assert type(event) is torch.Event
    event.synchronize()
    assert event.query()


def test_events_are_blocking_if_the_backend_can() -> None:
    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False) -> "Event":  # XPU's
            raise AssertionError("must not be called")

    class BlockingEvent(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> "BlockingEvent":
            return super().__new__(cls, "meta")

    assert _event_options(Event) == {}
    assert _event_options(BlockingEvent) == {"blocking": True}
