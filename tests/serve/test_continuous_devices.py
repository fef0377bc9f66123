"""`ContinuousBatcher` on an accelerator: complete parts, late errors, real out of memory."""

import gc
from dataclasses import dataclass

import anyio
import pytest
import torch
from torch import Tensor

import aiopar
from tests import simdevice

from .batches import current_executor, running, until

pytestmark = [pytest.mark.anyio, pytest.mark.sim]


@dataclass
class Adding:
    """Adds 1 to a tensor on an accelerator, so many times; `fail_at`: a kernel fails late."""

    steps: int = 3
    fail_at: int | None = None
    launched: int = 0
    resumable = True

    def start(self, item: Tensor) -> list[Tensor]:
        return [item, torch.zeros((), dtype=torch.int)]

    def step(self, states: list[list[Tensor]]) -> list[Tensor | aiopar.Done[Tensor]]:
        sums = torch.stack([value for value, _ in states]) + 1
        if self.launched == self.fail_at:
            simdevice.fail_next_sync("the kernel failed", "sim:0")
        self.launched += 1
        results: list[Tensor | aiopar.Done[Tensor]] = []
        for state, value in zip(states, sums.unbind(), strict=True):
            state[:] = value, state[1] + 1
            results.append(value if state[1] < self.steps else aiopar.Done(value, value))
        return results


async def test_a_part_is_complete_on_its_device() -> None:
    stepper, parts = Adding(), list[Tensor]()

    async def read(batcher: aiopar.ContinuousBatcher[Tensor, Tensor, Tensor]) -> None:
        async for part in batcher.stream(torch.zeros(2, device="sim:0")):
            parts.append(part)

    async with (
        current_executor(["sim:0"]),
        aiopar.ContinuousBatcher(stepper) as batcher,
        anyio.create_task_group() as tasks,
    ):
        with simdevice.paused("sim:0"):
            tasks.start_soon(read, batcher)
            await until(lambda: stepper.launched == 3)
            await anyio.wait_all_tasks_blocked()
            assert not parts, "though all steps are launched"
    assert [part.tolist() for part in parts] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("fail_at", [0, 1, 2])
async def test_a_kernel_that_fails_late_fails_its_request(fail_at: int) -> None:
    stepper = Adding(fail_at=fail_at)
    async with current_executor(["sim:0"]), aiopar.ContinuousBatcher(stepper) as batcher:
        with pytest.raises(RuntimeError, match="the kernel failed"):
            await batcher(torch.zeros(2, device="sim:0"))  # perhaps its last step has run
        stepper.fail_at = None
        assert (await batcher(torch.ones(2, device="sim:0"))).tolist() == [4, 4]
        await until(lambda: running(batcher) == 0)


async def test_real_out_of_memory() -> None:
    kib = 1 << 10
    gc.collect()  # what earlier tests left in cycles
    used = torch.accelerator.memory_allocated(0)
    sizes: list[int] = []

    class Large(Adding):
        def step(self, states: list[list[Tensor]]) -> list[Tensor | aiopar.Done[Tensor]]:
            sizes.append(len(states))
            rows = torch.stack([value for value, _ in states])
            rows[:, None].expand(-1, 2 * kib).contiguous()
            return super().step(states)

    async with current_executor(["sim:0"]), aiopar.ContinuousBatcher(Large()) as batcher:
        items = [*torch.arange(16.0, device="sim:0").unbind()]
        simdevice.set_memory_limit("sim:0", used + 64 * kib)
        results: list[float] = []

        async def ask(item: Tensor) -> None:
            results.append((await batcher(item)).item())

        async with anyio.create_task_group() as tasks:
            for item in items:
                tasks.start_soon(ask, item)
        assert sorted(results) == [float(n + 3) for n in range(16)]
        assert max(sizes) > 8 >= sizes[-1], "the limit was learned"
        assert batcher.stats().preempted >= 8
