"""`Parallel`: the device of a unit, and results that are complete there."""

import contextlib
import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.testing import Gate, Sequencer
from tests import simdevice
from tests.train.units import fetched, units
from tests.workers import worker_device


def where(_: object) -> str:
    """The device of the worker that runs this."""
    return worker_device() or "not in a worker"


class TestDevices:
    @pytest.mark.asyncio
    async def test_units_run_where_their_first_tensor_is(self) -> None:
        here, there = torch.ones(1), torch.ones(1, device="meta")
        async with aiopar.Parallel(2, units(where), devices=["meta", "cpu"]) as parallel:
            for x in here, {"a": [there, here]}, (1, here, there), there:
                await parallel.put(x)
                expected = "meta" if x is there or isinstance(x, dict) else "cpu"
                assert await parallel.get() == expected

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("x", "devices"), [("no tensor", ["meta", "cpu"]), (torch.ones(1), ["meta"] * 2)]
    )
    async def test_other_units_take_the_devices_in_turn(self, x: object, devices: Any) -> None:
        async with aiopar.Parallel(2, units(where), devices=devices) as parallel:
            seen = []
            for _ in range(6):
                await parallel.put(x)
                seen.append(await parallel.get())
        assert seen == devices * 3

    @pytest.mark.asyncio
    async def test_without_workers_each_device_has_one(self) -> None:
        async with aiopar.Parallel(0, units(where), devices=["meta", "cpu", "cpu"]) as parallel:
            for _ in range(3):
                await parallel.put(None)
            assert await fetched(parallel, 3) == ["meta", "cpu", "meta"]


def _memory(tensor: Tensor) -> list[float]:
    """What is in the simulated memory now; `tolist` would wait for the kernels."""
    return list((ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr()))


@pytest.mark.sim
class TestAccelerators:
    @pytest.mark.asyncio
    async def test_units_run_where_their_first_tensor_is(self) -> None:
        async with aiopar.Parallel(2, units(where)) as parallel:
            for device in ("sim:1", "sim:0", "sim:1"):
                await parallel.put(torch.ones(1, device=device))
                assert await parallel.get() == device
            for device in ("sim:0", "sim:1", "sim:0"):
                await parallel.put(torch.ones(1))
                assert await parallel.get() == device

    @pytest.mark.asyncio
    async def test_an_accelerator_tensor_without_a_worker_there(self) -> None:
        async with aiopar.Parallel(1, units(where)) as parallel:
            with pytest.raises(ValueError, match="is on sim:1, but the workers are on sim:0"):
                parallel.put(torch.ones(1, device="sim:1"))  # type: ignore[unused-coroutine]  # it raises
        async with aiopar.Parallel(0, units(where)) as parallel:
            await parallel.put(torch.ones(1, device="sim:1"))
            assert await parallel.get() == "sim:1"

    @pytest.mark.asyncio
    @pytest.mark.parametrize("num_workers", [1, 2])
    async def test_results_are_complete_when_get_returns(self, num_workers: int) -> None:
        x = torch.ones(4, device="sim:0")
        simdevice.set_kernel_latency(0.02)
        async with aiopar.Parallel(
            num_workers, units(lambda x: x * 2 + 1), devices=[0]
        ) as parallel:
            for _ in range(4):
                await parallel.put(x)
            for _ in range(4):
                assert _memory(await parallel.get()) == [3.0] * 4

    @pytest.mark.asyncio
    async def test_first_units_end_on_the_device_before_the_next_starts(self) -> None:
        seen: list[list[float]] = []
        results: list[Tensor] = []

        def look_and_launch(x: Tensor) -> None:
            seen.extend(map(_memory, results))
            results.append(x * 2)

        x = torch.ones(1, device="sim:0")
        simdevice.set_kernel_latency(0.02)
        async with aiopar.Parallel(3, units(look_and_launch), devices=[0]) as parallel:
            for _ in range(3):
                await parallel.put(x)
        assert seen == [[2.0]] * 3

    @pytest.mark.asyncio
    async def test_inputs_that_autograd_saves_stay_until_a_later_backward_has_read_them(
        self,
    ) -> None:
        weight = torch.ones(3, device="sim:0", requires_grad=True)
        net = units(lambda x: (weight * x).sum())
        async with aiopar.Parallel(2, net, devices=[0]) as parallel:
            await parallel.put(torch.full((3,), 7.0, device="sim:0"))
            loss = await parallel.get()
        simdevice.set_kernel_latency(0.02)
        await aiopar.backward(loss)
        assert weight.grad is not None
        assert weight.grad.tolist() == [7.0] * 3

    @pytest.mark.asyncio
    async def test_gradients_of_units_on_several_workers_are_added_in_order(self) -> None:
        weight = torch.ones(3, device="sim:0", requires_grad=True)
        together, sequence, launched = Gate(), Sequencer(), Gate()

        def forward_backward(number: int) -> None:
            together()  # so that each has a worker of its own
            with sequence(number):
                if number == 0:
                    held.enter_context(simdevice.paused(torch.accelerator.current_stream()))
                loss = (weight * 10.0**number).sum()
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
                # The graph is freed: the second adds to a gradient that is not written yet.
                del loss
            launched()

        async with aiopar.Parallel(2, units(forward_backward), False, devices=[0]) as parallel:
            with contextlib.ExitStack() as held, launched, together:
                for number in range(2):
                    await parallel.put(number)
                await together.entered(2)
                together.open()
                await launched.entered(2)
        assert weight.grad is not None
        assert weight.grad.tolist() == [11.0] * 3
