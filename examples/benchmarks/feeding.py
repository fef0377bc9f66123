"""`Pipeline` and `map` against torchdata, torch's `DataLoader`, SPDL and a plain loop."""

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import torch
from spdl.pipeline import PipelineBuilder
from torch.utils.data import DataLoader, Dataset
from torchdata.nodes import IterableWrapper, ParallelMapper

import aiopar
from examples.benchmarks.harness import Plan, Result, Rivals, compare

WORKERS = 2
PREFETCH = 8
WAIT = 0.001
WAITS_AT_ONCE = 64
Reading = Callable[[], Awaitable[int]]
"""Reads all items and returns their number."""


def same(item: int) -> int:
    """The no-op stage."""
    return item


def multiply(item: torch.Tensor) -> torch.Tensor:
    return torch.mm(item, item)


def wait(number: int) -> int:
    time.sleep(WAIT)
    return number


class Numbers(Dataset[int]):
    """`function(n)` for each n."""

    def __init__(self, count: int, function: Callable[[int], int]) -> None:
        self._count = count
        self._function = function

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return self._function(index)


async def wait_async(number: int) -> int:
    """Wait like a request to a database with an asynchronous client."""
    await asyncio.sleep(WAIT)
    return number


async def read_pipeline(source: Iterable[Any], function: Callable[[Any], Any]) -> int:
    pipeline = aiopar.data.Pipeline(source).map(function, concurrency=WORKERS).prefetch(PREFETCH)
    async with pipeline as stream:
        return await _length_of_async(stream)


async def read_waiting(count: int) -> int:
    pipeline = aiopar.data.Pipeline(range(count)).map(wait_async, concurrency=WAITS_AT_ONCE)
    async with pipeline as stream:
        return await _length_of_async(stream)


async def _length_of_async(items: AsyncIterable[Any]) -> int:
    count = 0
    async for _ in items:
        count += 1
    return count


def read_torchdata(count: int) -> int:
    node = ParallelMapper(IterableWrapper(range(count)), same, num_workers=WORKERS, method="thread")
    node.reset()
    return _length(node)


def read_spdl(count: int) -> int:
    builder = PipelineBuilder[int, int]().add_source(range(count))
    builder = builder.pipe(same, concurrency=WORKERS, output_order="input").add_sink(PREFETCH)
    pipeline = builder.build(num_threads=WORKERS)
    with pipeline.auto_stop():
        return _length(pipeline)


def make_dataloader(count: int, function: Callable[[int], int], workers: int) -> DataLoader[int]:
    return DataLoader(
        Numbers(count, function),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=PREFETCH // WORKERS,
        persistent_workers=True,  # the start of the processes is not measured
        # A process forked from one with threads may inherit a lock that stays locked for ever.
        multiprocessing_context="forkserver",
    )


def read_serially(count: int, item: torch.Tensor) -> int:
    return _length(map(multiply, [item] * count))


def _length(items: Iterable[Any]) -> int:
    return sum(1 for _ in items)


async def seconds_per_item(read: Reading, count: int) -> float:
    began = time.perf_counter()
    if await read() != count:
        raise RuntimeError(f"expected {count} items")
    return (time.perf_counter() - began) / count


async def peak_of_map(count: int) -> float:
    """The peak of allocated bytes while a no-op stage reads `count` items."""
    tracemalloc.start()
    try:
        await _length_of_async(aiopar.map(same, range(count), concurrency=WORKERS))
        return float(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def rivals(
    what: str,
    ours: Reading,
    against: str,
    theirs: Reading,
    *,
    count: int,
    bound: float | None = None,
) -> Rivals:
    return Rivals(
        what=what,
        ours=partial(seconds_per_item, ours, count),
        against=against,
        theirs=partial(seconds_per_item, theirs, count),
        bound=bound,
    )


async def measure(plan: Plan) -> list[Result]:
    """Synchronous rivals run in a thread, as they must beside an event loop."""
    count, few = plan.calls, max(1, plan.calls // 8)
    in_thread = partial(partial, asyncio.to_thread)
    title, ours = "Pipeline, no-op stage, 2 workers", partial(read_pipeline, range(count), same)
    loader = make_dataloader(count, same, WORKERS)
    item = await asyncio.to_thread(torch.ones, 256, 256)
    multiplied = partial(read_pipeline, [item] * few, multiply)
    waiting = make_dataloader(count, wait, plan.processes)
    with_count = partial(rivals, count=count)
    rows = [
        with_count(title, ours, "torch DataLoader", in_thread(_length, loader)),
        with_count(title, ours, "SPDL", in_thread(read_spdl, count)),
        rivals(
            "Pipeline, 256x256 matmul, 2 workers",
            multiplied,
            "a plain loop",
            in_thread(read_serially, few, item),
            count=few,
        ),
        with_count(
            f"Pipeline, 1 ms waits, {WAITS_AT_ONCE} at once",
            partial(read_waiting, count),
            f"torch DataLoader, {plan.processes} processes",
            in_thread(_length, waiting),
        ),
        # Last: torchdata's threads set torch's number of threads to 1 for all later threads.
        with_count(title, ours, "torchdata.nodes", in_thread(read_torchdata, count), bound=0.30),
    ]
    results = [await compare(row, plan.pairs) for row in rows]
    return [*results, await measure_memory(plan)]


async def measure_memory(plan: Plan) -> Result:
    """Compare peaks over a few samples: the number of items in flight at the peak varies."""
    lengths = Rivals(
        what=f"peak memory of map, {100 * plan.items:,} items",
        ours=partial(peak_of_map, 100 * plan.items),
        against=f"{plan.items:,} items",
        theirs=partial(peak_of_map, plan.items),
        bound=1.05,
        unit="kB",
    )
    return await compare(lengths, max(3, plan.pairs // 5))  # a sample takes half a minute
