"""`AsyncDataLoader`: how far it runs ahead, what runs at once, and its statistics."""

import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import anyio
import pytest
import torch

from aiopar.data import AsyncDataLoader
from aiopar.testing import Gate
from tests.data.datasets import FailingAsync, Held, Item, same
from tests.data.loaders import no_threads, read, values
from tests.data.streams import until

pytestmark = pytest.mark.usefixtures("_threads_of_one_test_are_gone_before_the_next")


def _reached(gate: Gate, count: int) -> bool:
    return gate.count >= count


# How far it runs ahead.


@pytest.mark.anyio
@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (1, 3), (2, 1), (3, 2)])
async def test_at_most_prefetch_factor_batches_per_worker_are_ahead(
    workers: int, prefetch: int
) -> None:
    gate = Gate()
    gate.open()
    loader = AsyncDataLoader(
        Held(gate), 2, num_workers=workers, prefetch_factor=prefetch, collate_fn=same
    )
    bound = workers * prefetch
    async with loader as stream:
        for read_so_far in range(1, 8):
            await anext(stream)
            fetched = 2 * (read_so_far + bound)
            await until(partial(_reached, gate, fetched))
            assert gate.count == fetched
        stats = stream.stats()
        assert stats.bound == bound
        assert stats.buffered <= bound


@pytest.mark.anyio
async def test_a_slow_consumer_holds_up_an_endless_source() -> None:
    alive: list[weakref.ref[Item]] = []
    peak = 0

    def endless() -> Iterator[Item]:
        n = 0
        while True:
            item = Item(n)
            alive.append(weakref.ref(item))
            n += 1
            yield item

    loader = AsyncDataLoader(endless(), 4, num_workers=2, prefetch_factor=2, collate_fn=same)
    async with loader as stream:
        for _ in range(2000):
            batch = await anext(stream)
            assert len(batch) == 4
            alive = [ref for ref in alive if ref() is not None]
            peak = max(peak, len(alive))
    # The batches ahead, the one that is read, and one per worker that it is about to drop.
    assert peak <= 4 * (4 + 1 + 2) + 1


@pytest.mark.anyio
async def test_an_async_iterable_is_bounded() -> None:
    pulled = 0

    async def endless() -> AsyncIterator[int]:
        nonlocal pulled
        while True:
            pulled += 1
            yield pulled

    loader = AsyncDataLoader(endless(), 3, num_workers=2, prefetch_factor=2, collate_fn=same)
    async with loader as stream:
        for n in range(1, 50):
            assert len(await anext(stream)) == 3
            assert pulled <= 3 * (n + 4)


# What runs at once.


@pytest.mark.anyio
async def test_num_workers_fetches_at_once_in_threads() -> None:
    with Gate() as gate:
        loader = AsyncDataLoader(Held(gate), 1, num_workers=4, collate_fn=same)
        stream = aiter(loader)
        async with anyio.create_task_group() as group:
            group.start_soon(stream.__anext__)
            await gate.entered(4)
            assert gate.held == 4
            gate.open()
        await stream.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize(("batch_size", "limit"), [(1, 6), (4, 6), (8, 3), (None, 5)])
async def test_num_workers_samples_at_once_as_tasks(batch_size: int | None, limit: int) -> None:
    running = peak = 0
    all_in = anyio.Event()

    class Async:
        def __len__(self) -> int:
            return 40

        async def __getitem__(self, index: int) -> int:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            if running == limit:
                all_in.set()
            await all_in.wait()
            await anyio.lowlevel.checkpoint()
            running -= 1
            return index

    loader = AsyncDataLoader(Async(), batch_size, num_workers=limit, collate_fn=lambda x: x)
    batches = await read(loader)
    assert peak == limit
    size = batch_size or 40
    expected = [list(range(first, first + size)) for first in range(0, 40, size)]
    assert batches == (expected if batch_size else expected[0])


@pytest.mark.anyio
async def test_async_getitems_is_awaited_for_each_batch() -> None:
    asked: list[list[int]] = []

    class Async:
        def __len__(self) -> int:
            return 7

        async def __getitems__(self, indices: list[int]) -> list[int]:
            asked.append(indices)
            await anyio.lowlevel.checkpoint()
            return [-index for index in indices]

    assert await read(AsyncDataLoader(Async(), 3)) == [[0, -1, -2], [-3, -4, -5], [-6]]
    assert asked == [[0, 1, 2], [3, 4, 5], [6]]
    subset: Any = torch.utils.data.Subset(FailingAsync(set()), [3, 5, 7])  # type: ignore[arg-type]
    assert await read(AsyncDataLoader(subset, 2)) == [[3, 5], [7]]
    both: Any = torch.utils.data.ConcatDataset([subset, subset])
    assert await read(AsyncDataLoader(both, 4)) == [[3, 5, 7, 3], [5, 7]]


# Reading it.


@pytest.mark.anyio
async def test_one_iteration_at_a_time() -> None:
    loader = AsyncDataLoader(range(4), 2)
    async with loader as stream:
        assert values(await anext(stream)) == [0, 1]
        with pytest.raises(RuntimeError, match=r"iterated already.*or make another loader"):
            aiter(loader)
        with pytest.raises(RuntimeError, match="iterated already"):
            async with loader:
                pass
        assert values(await anext(stream)) == [2, 3]
    assert await read(loader) == [[0, 1], [2, 3]], "the first was closed"
    async for _ in loader:
        break
    assert await read(loader) == [[0, 1], [2, 3]], "the first was collected"


@pytest.mark.anyio
async def test_the_indices_of_a_batch_may_be_in_a_tuple() -> None:
    loader = AsyncDataLoader(torch.arange(4), batch_sampler=((0, 1), (3,)))
    assert [batch.tolist() async for batch in loader] == [[0, 1], [3]]


@pytest.mark.anyio
async def test_an_empty_dataset_has_no_batches() -> None:
    assert await read(AsyncDataLoader([])) == []
    assert await read(AsyncDataLoader(iter([]))) == []
    assert await read(AsyncDataLoader(range(3), 5, drop_last=True)) == []
    gc.collect()
    await no_threads()


# Statistics.


@pytest.mark.asyncio
async def test_the_statistics() -> None:
    loader = AsyncDataLoader(range(10), 4)
    assert loader.stats() is None
    async with loader as stream:
        await anext(stream)
        running = loader.stats()
        assert running is not None
        assert (running.batches, running.samples, running.bound) == (1, 4, 2)
        assert running.elapsed_seconds >= running.consumer_seconds >= 0
    await read(loader)
    stats = loader.stats()
    assert stats is not None
    assert (stats.batches, stats.samples, stats.failures, stats.buffered) == (3, 10, 0, 0)
    assert "is the bottleneck" in stats.bottleneck
