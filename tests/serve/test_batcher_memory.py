"""A `Batcher` that runs out of memory: batches are halved, and each key learns its size."""

import gc
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import groupby, pairwise
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from aiopar import DeviceExecutor
from aiopar.serve import Batcher
from aiopar.testing import Gate
from tests import simdevice

from .batches import current_executor, on_asyncio, open_batcher, outcomes_of, together, until
from .streams import full

pytestmark = pytest.mark.anyio


class Memory:
    """A function that records the sizes of its batches, and runs out of memory for some."""

    def __init__(self, fits: Callable[[list[Any]], bool]) -> None:
        self.sizes: list[int] = []
        self._fits = fits
        self._gate = Gate()
        self._entered = 0

    def __call__(self, items: list[Any]) -> list[Any]:
        if items == ["hold"]:
            self._gate()
            return items
        self.sizes.append(len(items))
        if not self._fits(items):
            raise torch.OutOfMemoryError
        return items

    async def run(self, batcher: Batcher[Any, Any], items: Sequence[Any]) -> list[int]:
        """The sizes that run for items that come together, which all get their outputs."""
        before = len(self.sizes)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batcher, "hold")
            entered = self._entered = self._entered + 1
            await self._gate.entered(entered)
            tasks.start_soon(self._check, batcher, items)
            await until(lambda: batcher.stats().queued == len(items))
            self._gate.let_on()
        return self.sizes[before:]

    async def _check(self, batcher: Batcher[Any, Any], items: Sequence[Any]) -> None:
        assert await outcomes_of(batcher, items) == list(items)

    def batcher(
        self, workers: DeviceExecutor | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Batcher[Any, Any]]:
        return open_batcher(workers, self, max_pending=10_000, **options)


@on_asyncio
async def test_a_batch_is_halved_until_it_fits_and_later_ones_keep_to_that(
    workers: DeviceExecutor,
) -> None:
    memory = Memory(lambda items: len(items) <= 9)
    async with memory.batcher(workers, max_batch_size=32) as batcher:
        assert await memory.run(batcher, range(32)) == [32, 16, 8, 8, 8, 8]
        assert await memory.run(batcher, range(32)) == [8, 8, 8, 8]


@on_asyncio
async def test_only_the_key_that_ran_out_of_memory_has_smaller_batches(
    workers: DeviceExecutor,
) -> None:
    memory = Memory(lambda items: len(items) <= 4 or items[0][0] == "b")
    async with memory.batcher(workers, max_batch_size=8, batch_key=lambda item: item[0]) as batcher:
        for _ in range(2):
            assert await memory.run(batcher, [("b", n) for n in range(8)]) == [8]
            sizes = await memory.run(batcher, [("a", n) for n in range(8)])
    assert sizes == [4, 4]


@on_asyncio
async def test_the_size_grows_by_an_eighth_after_32_batches_that_fit() -> None:
    memory = Memory(lambda _: len(memory.sizes) > 1)
    async with memory.batcher(max_batch_size=32) as batcher:
        sizes = await memory.run(batcher, range(5120))
    runs = [(size, len([*same])) for size, same in groupby(sizes[:-1])]
    assert runs[0] == (32, 1)
    assert [size for size, _ in runs[1:]] == [16, 18, 20, 22, 24, 27, 30, 32]
    # The two halves of the first batch count as well.
    assert [count for _, count in runs[1:-1]] == [32] * 7


@on_asyncio
async def test_a_size_that_fails_again_is_tried_after_twice_as_many_batches() -> None:
    memory = Memory(lambda items: len(items) <= 17)
    async with memory.batcher(max_batch_size=32) as batcher:
        sizes = await memory.run(batcher, range(5000))
    failures = [place for place, size in enumerate(sizes) if size == 18]
    assert set(sizes[1:-1]) == {16, 18, 9}
    # After each failure its two halves run, which are smaller and do not count.
    assert [b - a - 3 for a, b in pairwise(failures)] == [64, 128]


@on_asyncio
async def test_as_many_keys_are_remembered_as_items_may_wait() -> None:
    memory = Memory(lambda items: len(items) == 1)
    async with memory.batcher(max_batch_size=2, batch_key=lambda item: item[0]) as batcher:
        assert await memory.run(batcher, [(0, "a"), (0, "b")]) == [2, 1, 1]
        assert await memory.run(batcher, [(0, "a"), (0, "b")]) == [1, 1]
        await memory.run(batcher, [(key, "a") for key in range(1, 10_001)])
        assert await memory.run(batcher, [(0, "a"), (0, "b")]) == [2, 1, 1]


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
        *_, where, note = error.__notes__
        assert "in fn" in where, "as text: frames would keep the tensors"
        assert "fn" not in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert note.startswith("raised by one item of a batch of 8")
        assert outcomes == [1, 2, 3, 5, 6, 7, 8]
        assert sorted(sizes) == [1, 1, 2, 2, 4, 4, 8]
        await outcomes_of(batcher, [*range(8)])
        assert sizes[7:] == [8]


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

    async with current_executor(["sim:0"]):
        items = list(torch.arange(16.0, device="sim:0").unbind())
        simdevice.set_memory_limit("sim:0", used + 32 * kib)
        outcomes = await together(fn, items)
        assert [outcome.item() for outcome in outcomes] == [*range(16)]
    assert sizes[0] == 16
    assert max(sizes[-2:]) < 8
    del items, outcomes
    simdevice.reset()
    await until(lambda: torch.accelerator.memory_allocated(0) <= used)
