"""Streams and events: what is ordered, what is not, and who waits.

`paused` holds the streams instead of a sleep: what must not have run yet cannot have.
"""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests import simdevice

pytestmark = pytest.mark.sim


def _in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def side() -> torch.Stream:
    """A stream that is not the default one, on sim:0."""
    return torch.Stream("sim:0")


@pytest.fixture
def x() -> Iterator[Tensor]:
    """Zeros on sim:0, there before the test starts; the test leaves the default stream current."""
    tensor = torch.zeros(3, device="sim:0")
    torch.accelerator.synchronize(0)
    yield tensor
    assert torch.accelerator.current_stream(0).stream_id == 0


def test_launching_does_not_wait(x: Tensor) -> None:
    with simdevice.paused():
        y = (x + 1).relu().sum()
        assert y.shape == ()
        assert not torch.accelerator.current_stream(0).query()
        assert simdevice.pending_streams("sim:0") == 1
    assert y.item() == 3


def test_a_stream_keeps_its_order(x: Tensor) -> None:
    simdevice.set_inline(False)
    for step in range(200):
        x.mul_(2).add_(step % 2)
    expected = 0.0
    for step in range(200):
        expected = expected * 2 + step % 2
    assert x[0].item() == torch.tensor(expected).item()


def test_without_an_event_streams_are_unordered(x: Tensor, side: torch.Stream) -> None:
    default = torch.accelerator.current_stream(0)
    with simdevice.paused(default):
        x.add_(1)
        with side:
            stale = x.clone()
        side.synchronize()
    default.synchronize()
    assert stale.tolist() == [0, 0, 0]
    assert x.tolist() == [1, 1, 1]


ORDERINGS: dict[str, Callable[[torch.Stream, torch.Stream], object]] = {
    "wait_stream": lambda first, second: second.wait_stream(first),
    "wait_event": lambda first, second: second.wait_event(first.record_event()),
    "event.wait": lambda first, second: first.record_event().wait(second),
}


@pytest.mark.parametrize("how", ORDERINGS)
def test_ordered_streams(x: Tensor, side: torch.Stream, how: str) -> None:
    default = torch.accelerator.current_stream(0)
    with simdevice.paused(default):
        x.add_(1)
        ORDERINGS[how](default, side)
        with side:
            assert torch.accelerator.current_stream(0) == side
            fresh = x.clone()
        assert not side.query()
    side.synchronize()
    assert fresh.tolist() == [1, 1, 1]


def test_an_event_completes_when_its_stream_reaches_it(x: Tensor) -> None:
    event = torch.Event("sim:0")
    assert event.query()  # never recorded
    with simdevice.paused():
        x.add_(1)
        event.record()
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_recording_again_does_not_move_who_waits(x: Tensor, side: torch.Stream) -> None:
    default, event = torch.accelerator.current_stream(0), torch.Event("sim:0")
    with simdevice.paused(default):
        event.record()
        side.wait_event(event)
    side.synchronize()
    with simdevice.paused(default):
        event.record()
        assert side.query()
        assert not event.query()


def test_the_device_module_s_classes(side: torch.Stream) -> None:
    sim = torch.get_device_module("sim")
    event = sim.Event(blocking=True, enable_timing=True)
    stream = sim.Stream("sim:1")
    with sim.stream(stream):
        assert sim.current_stream() == stream
        assert torch.accelerator.current_device_index() == 1
        event.record()
    event.synchronize()
    assert event.device == torch.device("sim:1")
    assert sim.current_stream("sim:1") == sim.default_stream("sim:1") != stream


def test_the_current_stream_is_a_thread_s_own(side: torch.Stream) -> None:
    seen = []
    with side:
        _in_thread(lambda: seen.append(torch.accelerator.current_stream(0))).join()
        assert torch.accelerator.current_stream(0) == side
    assert seen[0].stream_id == 0


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "tolist": Tensor.tolist,
    "cpu": Tensor.cpu,
    "nonzero": torch.nonzero,
    "device": lambda _: torch.accelerator.synchronize(0),
    "stream": lambda _: torch.accelerator.current_stream(0).synchronize(),
    "event": lambda _: torch.accelerator.current_stream(0).record_event().synchronize(),
    "pageable copy": lambda t: t.copy_(torch.ones(3), non_blocking=True),
}


@pytest.mark.parametrize("how", WAITS)
def test_waiting_lets_the_gil_go(x: Tensor, how: str) -> None:
    entered = threading.Event()

    def wait() -> None:
        entered.set()
        WAITS[how](x)

    with simdevice.paused():
        x.add_(1)
        thread = _in_thread(wait)
        assert entered.wait(60)  # with the GIL held by the waiting thread this would be the end
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()


def test_a_failing_kernel_is_raised_by_the_next_synchronisation(x: Tensor) -> None:
    for wait in WAITS.values():
        simdevice.fail_next_sync("the kernel's own words", "sim:0")
        with pytest.raises(RuntimeError, match="the kernel's own words"):
            wait(x)
        torch.accelerator.synchronize(0)


def test_copies_between_devices_are_ordered_on_both(x: Tensor) -> None:
    there = torch.zeros(3, device="sim:1")
    source, target = (torch.accelerator.current_stream(index) for index in (0, 1))
    torch.accelerator.synchronize(1)
    with simdevice.paused(target):
        there.add_(5)
        there.copy_(x)  # on the source's stream, after what the target's does
        x.add_(1)  # after the copy
        assert not source.query()
    assert there.tolist() == [0, 0, 0]
    with simdevice.paused(source):
        x.add_(1)
        there.copy_(x)
        doubled = there * 2  # after the copy
        assert not target.query()
    assert doubled.tolist() == [4, 4, 4]
    assert x.tolist() == [2, 2, 2]


def test_pinned_copies_do_not_wait(x: Tensor) -> None:
    source = torch.ones(3).pin_memory()
    assert source.is_pinned()
    assert source[1:].is_pinned()
    assert not torch.ones(3).is_pinned()
    with simdevice.paused():
        x.copy_(source, non_blocking=True)
        source.fill_(7)  # too early: the copy has not read it
        back = x.to("cpu", non_blocking=True)
        assert back.is_pinned()
    torch.accelerator.synchronize(0)
    assert back.tolist() == [7, 7, 7]
