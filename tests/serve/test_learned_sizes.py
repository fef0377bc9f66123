"""`Batcher`: the batch sizes of a key that has run out of memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import groupby, pairwise
from typing import Any

import anyio
import pytest
import torch

from aiopar import DeviceExecutor
from aiopar.serve import Batcher
from aiopar.testing import Gate

from .batches import open_batcher, outcomes_of, until

pytestmark = pytest.mark.asyncio


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


async def test_a_batch_is_halved_until_it_fits_and_later_ones_keep_to_that(
    workers: DeviceExecutor,
) -> None:
    memory = Memory(lambda items: len(items) <= 9)
    async with memory.batcher(workers, max_batch_size=32) as batcher:
        assert await memory.run(batcher, range(32)) == [32, 16, 8, 8, 8, 8]
        assert await memory.run(batcher, range(32)) == [8, 8, 8, 8]


async def test_only_the_key_that_ran_out_of_memory_has_smaller_batches(
    workers: DeviceExecutor,
) -> None:
    memory = Memory(lambda items: len(items) <= 4 or items[0][0] == "b")
    async with memory.batcher(workers, max_batch_size=8, batch_key=lambda item: item[0]) as batcher:
        for _ in range(2):
            assert await memory.run(batcher, [("b", n) for n in range(8)]) == [8]
            sizes = await memory.run(batcher, [("a", n) for n in range(8)])
    assert sizes == [4, 4]


async def test_the_size_grows_by_an_eighth_after_32_batches_that_fit() -> None:
    memory = Memory(lambda _: len(memory.sizes) > 1)
    async with memory.batcher(max_batch_size=32) as batcher:
        sizes = await memory.run(batcher, range(5120))
    runs = [(size, len([*same])) for size, same in groupby(sizes[:-1])]
    assert runs[0] == (32, 1)
    assert [size for size, _ in runs[1:]] == [16, 18, 20, 22, 24, 27, 30, 32]
    # The two halves of the first batch count as well.
    assert [count for _, count in runs[1:-1]] == [32] * 7


async def test_a_size_that_fails_again_is_tried_after_twice_as_many_batches() -> None:
    memory = Memory(lambda items: len(items) <= 17)
    async with memory.batcher(max_batch_size=32) as batcher:
        sizes = await memory.run(batcher, range(5000))
    failures = [place for place, size in enumerate(sizes) if size == 18]
    assert set(sizes[1:-1]) == {16, 18, 9}
    # After each failure its two halves run, which are smaller and do not count.
    assert [b - a - 3 for a, b in pairwise(failures)] == [64, 128]


async def test_as_many_keys_are_remembered_as_items_may_wait() -> None:
    memory = Memory(lambda items: len(items) == 1)
    async with memory.batcher(max_batch_size=2, batch_key=lambda item: item[0]) as batcher:
        assert await memory.run(batcher, [(0, "a"), (0, "b")]) == [2, 1, 1]
        assert await memory.run(batcher, [(0, "a"), (0, "b")]) == [1, 1]
        await memory.run(batcher, [(key, "a") for key in range(1, 10_001)])
        assert await memory.run(batcher, [(0, "a"), (0, "b")]) == [2, 1, 1]
