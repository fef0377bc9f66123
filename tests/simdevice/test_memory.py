"""Device memory: the limit, the account, and what happens to memory that is read after its end."""

import gc
import math

import pytest
import torch

from tests import simdevice

pytestmark = pytest.mark.sim

KIB = 1 << 10


@pytest.fixture
def used() -> int:
    """Bytes that sim:0 holds already, and goes on holding."""
    gc.collect()  # what earlier tests left in cycles must not go in the middle of this one
    torch.accelerator.synchronize(0)
    return torch.accelerator.memory_allocated(0)


def test_the_account_follows_tensors(used: int) -> None:
    sim = torch.get_device_module("sim")
    sim.reset_peak_memory_stats("sim:0")
    x = torch.empty(KIB, device="sim:0")
    y = x.view(2, -1)
    assert sim.memory_allocated("sim:0") == used + 4 * KIB
    z = x + 1
    assert torch.accelerator.memory_allocated(0) == used + 8 * KIB
    del x, z
    assert torch.accelerator.memory_allocated(0) == used + 4 * KIB  # y still holds x's memory
    del y
    assert torch.accelerator.memory_allocated(0) == used
    assert sim.max_memory_allocated("sim:0") == used + 8 * KIB
    free, total = sim.mem_get_info("sim:0")
    assert free == total - used


@pytest.mark.parametrize("inline", [True, False])
def test_out_of_memory(used: int, inline: bool) -> None:
    simdevice.set_inline(inline)
    simdevice.set_memory_limit("sim:0", used + 9 * KIB)
    x = torch.ones(KIB, device="sim:0")
    with pytest.raises(torch.OutOfMemoryError, match=r"sim out of memory\. Tried to allocate 16"):
        x.expand(4, KIB).contiguous()
    with pytest.raises(torch.OutOfMemoryError, match="sim:0 has a total capacity of"):
        torch.empty(2 * KIB, device="sim:0")
    y = x + 1  # there is room for one more
    torch.empty(2 * KIB, device="sim:1")  # and on the other device
    assert y.sum().item() == 2 * KIB
    del x, y
    torch.empty(2 * KIB, device="sim:0")


def _read_on_side_after_free(side: torch.Stream, *, record: bool) -> torch.Tensor:
    """Hand memory to another stream, let it go, and only then let that stream read it."""
    x = torch.ones(4, device="sim:0")
    torch.accelerator.synchronize(0)
    with simdevice.paused(side):
        with side:
            y = x + 1
        if record:
            x.record_stream(side)
            assert simdevice.recorded_streams(x) == {side.stream_id}
        del x
    torch.accelerator.synchronize(0)
    return y


def test_memory_freed_while_another_stream_reads_it() -> None:
    side = torch.Stream("sim:0")
    assert all(math.isnan(value) for value in _read_on_side_after_free(side, record=False).tolist())
    assert _read_on_side_after_free(side, record=True).tolist() == [2, 2, 2, 2]
    simdevice.set_poison(False)
    assert _read_on_side_after_free(side, record=False).tolist() == [2, 2, 2, 2]


def test_a_recorded_stream_keeps_the_account(used: int) -> None:
    side = torch.Stream("sim:0")
    with simdevice.paused("sim:0"):
        x = torch.empty(KIB, device="sim:0")
        with side:
            x.add_(1)
        x.record_stream(side)
        del x
        assert torch.accelerator.memory_allocated(0) == used + 4 * KIB
    torch.accelerator.synchronize(0)
    assert torch.accelerator.memory_allocated(0) == used


def test_an_allocation_waits_for_recorded_streams_before_it_fails(used: int) -> None:
    side = torch.Stream("sim:0")
    simdevice.set_memory_limit("sim:0", used + 4 * KIB)
    x = torch.empty(KIB, device="sim:0")
    with side:
        simdevice.sleep(0.02, "sim:0")
    x.record_stream(side)
    del x
    assert torch.empty(KIB, device="sim:0").numel() == KIB
