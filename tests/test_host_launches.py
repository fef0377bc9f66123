"""`aiopar._host_launches`: what calls on the CPU launch on accelerators, and get from there."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import aiopar
from tests import simdevice

pytestmark = pytest.mark.sim


@pytest.fixture
def side() -> torch.Stream:
    """A stream of the caller's own."""
    return torch.Stream(device="sim:0")


async def batched(x: torch.Tensor) -> torch.Tensor:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with aiopar.serve.Batcher(torch.Tensor.cpu, max_batch_size=2) as batcher:
                result: torch.Tensor = await batcher(x)
                return result


CALLS: dict[str, Callable[[torch.Tensor], Coroutine[Any, Any, torch.Tensor]]] = {
    "run_sync": lambda x: aiopar.run_sync(x.cpu, device="cpu"),
    "gather": lambda x: aiopar.gather([x], "cpu"),
    "batcher": batched,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.anyio
async def test_what_the_caller_has_launched_is_waited_for(name: str, side: torch.Stream) -> None:
    x = torch.zeros(2, device="sim:0")
    torch.accelerator.synchronize()
    with side:
        simdevice.sleep(0.05, "sim:0")
        x += 7
        result = await CALLS[name](x)
    assert result.tolist() == [7, 7]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("synchronize", [True, False])
def test_a_result_on_an_accelerator_is_complete(synchronize: bool) -> None:
    x = torch.ones(2, device="sim:0")
    with aiopar.DeviceExecutor(["cpu"] * 2, synchronize=synchronize) as executor:
        with simdevice.paused():
            launched = executor.submit(double, x)
            with pytest.raises(TimeoutError):
                launched.result(0.05)
            assert executor.submit(abs, -1).result(10) == 1, "what has no such result goes on"
        launched.result(10)
        assert not simdevice.pending_streams()


def test_memory_is_kept_for_the_streams_that_read_it(side: torch.Stream) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        with side:
            x = torch.ones(2, device="sim:0")
            result = executor.submit(double, x).result(10)
        assert simdevice.recorded_streams(x) == {0}, "the worker's"
        assert simdevice.recorded_streams(result) == {side.stream_id}
        plain = executor.submit(double, x).result(10)
        assert not simdevice.recorded_streams(plain)


def test_a_kernel_that_fails_is_its_callers() -> None:
    def fail() -> torch.Tensor:
        simdevice.fail_next_sync("device-side assert triggered", "sim:0")
        return torch.ones(2, device="sim:0")

    with aiopar.DeviceExecutor(["cpu"]) as executor:
        with pytest.raises(RuntimeError, match="device-side assert triggered"):
            executor.submit(fail).result(10)
        assert executor.submit(abs, -1).result(10) == 1


def test_nothing_is_asked_of_accelerators_that_are_not_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = torch.get_device_module("sim")
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        monkeypatch.setattr(module, "is_initialized", lambda: False)  # as in a forked child
        monkeypatch.setattr(torch.accelerator, "current_stream", None)
        assert executor.submit(abs, -1).result(10) == 1
        assert asyncio.run(executor.run_sync(abs, -1)) == 1
