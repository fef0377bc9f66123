"""`AsyncDataLoader`: how far it runs ahead, what runs at once, and its statistics."""

import gc
from functools import partial

import anyio
import pytest
import torch

from aiopar.data import AsyncDataLoader
from aiopar.testing import Gate
from tests.data.datasets import Held, same
from tests.data.loaders import no_threads, read, values
from tests.data.streams import SOURCES, Source, iterable, until

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
@SOURCES
async def test_a_slow_consumer_holds_up_an_endless_source(asynchronous: bool) -> None:
    source = Source()
    numbers = iterable(asynchronous, source)
    loader = AsyncDataLoader(numbers, 3, num_workers=2, prefetch_factor=2, collate_fn=same)
    async with loader as stream:
        for n in range(1, 50):
            assert len(await anext(stream)) == 3
            assert source.taken <= 3 * (n + 4)


# What runs at once.


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
