"""`backward` on streams: gradients are complete when awaited, and added in order."""

import asyncio
import ctypes
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

import aiopar
from tests import simdevice


@pytest.mark.sim
class TestAccelerators:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("output", ["sim:0", "sim:1", "cpu"])
    @pytest.mark.parametrize("workers", [["sim:0", "sim:1", "cpu"], ["sim:0"]])
    async def test_gradients_are_complete_on_every_device(
        self, output: str, workers: list[str]
    ) -> None:
        weights = [
            torch.ones(3, device=device, requires_grad=True) for device in ("sim:0", "sim:1")
        ]

        def forward() -> Tensor:
            moved: Tensor = sum((weight * 3).to(output) for weight in weights)  # type: ignore[assignment]  # not 0
            return moved.sum()

        async with aiopar.DeviceExecutor(workers) as executor:
            with aiopar.use_executor(executor):
                loss = await aiopar.run_sync(forward)
                simdevice.set_kernel_latency(0.02)
                await aiopar.backward(loss)
                assert [_memory(weight.grad) for weight in weights] == [[3.0] * 3] * 2

    @pytest.mark.asyncio
    @pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
    async def test_two_streams_add_to_one_gradient_in_order(self) -> None:
        simdevice.set_inline(False)
        weight = torch.ones(3, device="sim:0", requires_grad=True)

        def forward(factor: float) -> Tensor:
            return (weight * factor).sum()

        async with aiopar.DeviceExecutor(["sim:0", "sim:0"]) as executor:
            first, second = executor.on(worker=0), executor.on(worker=1)
            loss = await first.run_sync(forward, 10.0)
            # What the first backward launches is held: its gradient is there, but not written yet,
            # and only its call still has the graph. Then a second comes on another stream.
            with simdevice.paused(await first.run_sync(torch.accelerator.current_stream, 0)):
                call = _backward_on(first, loss)
                del loss
                one = await _launched(executor, call)
                call = _backward_on(second, await second.run_sync(forward, 100.0))
                other = await _launched(executor, call)
            await asyncio.gather(one, other)
        assert weight.grad is not None
        assert weight.grad.tolist() == [110.0] * 3


def _memory(tensor: Tensor | None) -> list[float]:
    """What is written in the (simulated) device's memory now; `tolist` would wait for it."""
    assert tensor is not None
    return list((ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr()))


class _Launched(aiopar.ExecutorObserver):
    """Says when a call has launched its kernels."""

    def __init__(self) -> None:
        self.future: aiopar.Future[None] = aiopar.Future()

    def launched(self, call: aiopar.CallInfo) -> None:
        self.future.set_result(None)


def _backward_on(worker: aiopar.DeviceExecutor, loss: Tensor) -> Coroutine[Any, Any, None]:
    with aiopar.use_executor(worker):
        return aiopar.backward(loss)


async def _launched(
    executor: aiopar.DeviceExecutor, call: Coroutine[Any, Any, None]
) -> "asyncio.Task[None]":
    """The running call, when all its kernels are launched."""
    observer = _Launched()
    executor.add_observer(observer)
    task = asyncio.create_task(call)
    await observer.future
    executor.remove_observer(observer)
    return task
