"""Callers that leave a stream: its generator, and its other callers."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest

import aiopar
from aiopar.serve import Batcher

from .batches import until
from .streams import ENDLESS, Counting, Readers, counted, full, idle

pytestmark = pytest.mark.anyio


async def broken_off(stream: Any, _: Counting) -> None:
    async for _part in stream:
        break


async def closed(stream: Any, _: Counting) -> None:
    await anext(stream)
    await stream.aclose()
    assert [part async for part in stream] == [], "it has ended"
    await stream.aclose()


async def left(stream: Any, _: Counting) -> None:
    async with stream:
        await anext(stream)


async def failed(stream: Any, _: Counting) -> None:
    with suppress(ZeroDivisionError):
        async with stream:
            await anext(stream)
            raise ZeroDivisionError


async def cancelled(stream: Any, _: Counting) -> None:
    with anyio.CancelScope() as scope:
        async for _part in stream:
            scope.cancel()
    # If the stream just ended, the output would look complete.
    for _again in range(2):
        with pytest.raises(RuntimeError, match="a read of this stream was cancelled"):
            await anext(stream)


async def never_read(stream: Any, counting: Counting) -> None:
    await stream.__aenter__()
    await until(lambda: bool(counting.steps))


LEAVING = [broken_off, closed, left, failed, cancelled, never_read]


@pytest.mark.parametrize("leave", LEAVING)
async def test_when_nobody_is_left_the_generator_is_closed(
    kind: str, leave: Callable[[Any, Counting], Any]
) -> None:
    counting = Counting(ENDLESS)
    async with Batcher(counting.of(kind), collate_fn=list) as batcher:
        await leave(batcher.stream("a", buffer=1), counting)
        await until(lambda: len(counting.closed) == 1)
        await until(lambda: batcher.stats().in_flight == 0)
    assert set(counting.closed) == set(counting.steps), "where its steps were made"


@pytest.mark.parametrize("leave", LEAVING)
async def test_who_leaves_does_not_slow_the_others(
    kind: str, leave: Callable[[Any, Counting], Any]
) -> None:
    counting = Counting(100)
    async with Batcher(counting.of(kind), **full(2)) as batcher:
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read("stays")
            await leave(batcher.stream("leaves", buffer=1), counting)
        assert readers.parts == {"stays": counted("stays", 100)}
        assert len(counting.batches) == len(counting.closed) == 1


async def test_a_stream_that_leaves_the_queue_is_not_computed(kind: str) -> None:
    counting = Counting(1)
    async with Batcher(counting.of(kind), **full(2)) as batcher:
        async with batcher.stream("gone") as stream:
            assert batcher.stats().queued == 1
            await stream.aclose()
            assert batcher.stats().queued == 0
        async with anyio.create_task_group() as tasks:
            Readers(batcher, tasks).read("a", "b")
    assert list(map(sorted, counting.batches)) == [["a", "b"]]


async def test_a_deadline_is_that_of_the_whole_stream(kind: str) -> None:
    counting = Counting(ENDLESS)
    async with Batcher(counting.of(kind), collate_fn=list, timeout=0.05) as batcher:
        with pytest.raises(aiopar.DeadlineExceeded):
            async for _ in batcher.stream("a"):
                pass
        await idle(batcher)
        async with batcher.stream("b", timeout=0.05) as stream:
            await idle(batcher)
            with pytest.raises(aiopar.DeadlineExceeded):
                await anext(stream)  # not the parts that wait
            assert [part async for part in stream] == []
    assert len(counting.closed) == len(counting.batches)
