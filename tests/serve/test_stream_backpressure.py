"""Slow readers: a step is made only when every caller has room."""

from contextlib import AsyncExitStack
from typing import Any

import pytest

from aiopar.serve import Batcher

from .batches import until
from .streams import ENDLESS, Counting, counted, full, idle, one_worker, reading, settled

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("buffer", [1, 3, 16])
async def test_a_step_runs_when_every_caller_has_room(kind: str, buffer: int) -> None:
    counting = Counting(ENDLESS)
    async with one_worker() as executor:
        options: Any = {} if buffer == 16 else {"buffer": buffer}
        async with reading(Batcher(counting.of(kind), **full(2))) as readers:
            readers.read("fast")
            parts = readers.parts["fast"]
            async with readers.batcher.stream("slow", **options) as slow:
                for number in range(5):
                    wanted = buffer + number
                    await until(lambda wanted=wanted: len(parts) == wanted)  # type: ignore[misc]
                    await settled(executor)
                    assert len(counting.steps) == wanted
                    assert await anext(slow) == ("slow", number)
                readers.cancel("fast")
    assert readers.parts["fast"][:5] == counted("fast", 5)


async def test_who_reads_nothing_at_all_holds_its_batch_up(kind: str) -> None:
    counting = Counting(ENDLESS)
    async with one_worker() as executor, Batcher(counting.of(kind), collate_fn=list) as batcher:
        async with batcher.stream("a", buffer=2):
            await until(lambda: len(counting.steps) == 2)
            async with batcher.stream("b") as stream:
                await settled(executor)
                assert len(counting.steps) == 2
                assert batcher.stats().queued == 1, "a batch runs until all have left it"
                await stream.aclose()
        await idle(batcher)
    assert counting.batches == [["a"]]


@pytest.mark.parametrize("concurrency", [1, 2, 3])
async def test_as_many_batches_stream_at_once_as_concurrency_says(
    kind: str, concurrency: int
) -> None:
    counting = Counting(ENDLESS)
    options: dict[str, Any] = {"max_batch_size": 1, "concurrency": concurrency}
    batcher = Batcher(counting.of(kind), collate_fn=list, **options)
    async with batcher, AsyncExitStack() as streams:
        for item in range(4):
            await streams.enter_async_context(batcher.stream(item, buffer=1))
        await until(lambda: len(counting.steps) == concurrency)
        stats = batcher.stats()
        assert (stats.in_flight, stats.queued) == (concurrency, 4 - concurrency)
