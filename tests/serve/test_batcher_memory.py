"""A `Batcher` that runs out of memory: batches are halved, and the size is learned."""

import gc
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.serve import Batcher
from tests import simdevice

from .batches import outcomes_of, together, until
from .streams import full


class Memory:
    """A function that runs out of memory above `most` items."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.sizes: list[int] = []
        self.allocated: list[weakref.ref[Tensor]] = []

    def __call__(self, items: list[Any]) -> list[Any]:
        assert not any(one() is not None for one in self.allocated), "let go of before"
        self.sizes.append(len(items))
        activations = torch.ones(len(items))
        self.allocated.append(weakref.ref(activations))
        if len(items) > self.most:
            self._allocate(activations)
        return items

    def _allocate(self, activations: Tensor) -> None:
        more = activations + 1
        self.allocated.append(weakref.ref(more))
        raise torch.OutOfMemoryError("no memory")


@pytest.mark.anyio
async def test_out_of_memory_is_halved_and_learned_for_the_key() -> None:
    memory = Memory(5)
    async with Batcher(memory, **full(16), batch_key=type) as batcher:
        assert await outcomes_of(batcher, [*range(16)]) == [*range(16)]
        assert memory.sizes == [16, 8, 4, 4, 4, 4]
        memory.sizes.clear()
        assert await outcomes_of(batcher, [*range(16)]) == [*range(16)]
        assert memory.sizes == [4, 4, 4, 4], "it is known now"
        memory.sizes.clear()
        assert await outcomes_of(batcher, [*"0123456789abcdef"]) == [*"0123456789abcdef"]
        assert memory.sizes[0] == 16, "of another key nothing is known"


@pytest.mark.anyio
async def test_it_grows_back() -> None:
    memory = Memory(3)
    async with Batcher(memory, **full(4)) as batcher:
        await outcomes_of(batcher, range(4))
        assert memory.sizes == [4, 2, 2]
        memory.most = 4
        for size in [2] * 30 + [3] * 32 + [4] * 40:  # full batches, which go at once
            await outcomes_of(batcher, range(size))
    assert memory.sizes[3:] == [2] * 30 + [3] * 32 + [4] * 40


@pytest.mark.anyio
async def test_an_item_that_does_not_fit_alone_does_not_make_batches_smaller() -> None:
    sizes: list[int] = []

    def fn(items: list[int]) -> list[int]:
        sizes.append(len(items))
        if max(items) >= 100:
            raise torch.OutOfMemoryError("too large")
        return items

    async with Batcher(fn, **full(8)) as batcher:
        outcomes = await outcomes_of(batcher, [1, 2, 3, 100, 5, 6, 7, 8])
        error = outcomes.pop(3)
        assert isinstance(error, torch.OutOfMemoryError)
        where, note = error.__notes__
        assert "in fn" in where, "as text: frames would keep the tensors"
        assert "fn" not in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert note == "raised by one item of a batch of 8"
        assert outcomes == [1, 2, 3, 5, 6, 7, 8]
        assert sorted(sizes) == [1, 1, 2, 2, 4, 4, 8]
        await outcomes_of(batcher, [*range(8)])
        assert sizes[7:] == [8]


@pytest.mark.anyio
@pytest.mark.sim
async def test_real_out_of_memory() -> None:
    kib = 1 << 10
    gc.collect()  # what earlier tests left in cycles
    used = torch.accelerator.memory_allocated(0)
    sizes: list[int] = []

    def fn(batch: Tensor) -> Tensor:  # (n,)
        sizes.append(len(batch))
        work = batch[:, None].expand(-1, kib).contiguous()
        return work.sum(1) / kib

    async with aiopar.DeviceExecutor(["sim:0"]) as executor:
        with aiopar.use_executor(executor):
            items = list(torch.arange(16.0, device="sim:0").unbind())
            simdevice.set_memory_limit("sim:0", used + 32 * kib)
            outcomes = await together(fn, items)
            assert [outcome.item() for outcome in outcomes] == [*range(16)]
    assert sizes[0] == 16
    assert max(sizes[-2:]) < 8
    del items, outcomes
    simdevice.reset()
    await until(lambda: torch.accelerator.memory_allocated(0) <= used)
