"""Readers of a batch that are slow or stop: whom they slow, and when they lose their streams."""

from contextlib import AsyncExitStack
from typing import Any

import pytest

import aiopar
from aiopar.serve import Batcher

from .batches import LONG, until
from .streams import ENDLESS, Counting, counted, full, idle, one_worker, read_all, reading, settled

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("buffer", [1, 3, 16])
async def test_a_lone_reader_may_be_slow(kind: str, buffer: int) -> None:
    counting = Counting(ENDLESS)
    options: Any = {} if buffer == 16 else {"buffer": buffer}
    batcher = Batcher(counting.of(kind), **full(1))
    async with one_worker() as executor, batcher, batcher.stream("slow", **options) as slow:
        for number in range(200):
            if number < 5:
                await until(lambda wanted=buffer + number: len(counting.steps) == wanted)  # type: ignore[misc]
                await settled(executor)
                assert len(counting.steps) == buffer + number
            assert await anext(slow) == ("slow", number)


async def test_a_reader_that_stops_slows_neither_its_batch_nor_the_next(kind: str) -> None:
    batcher = Batcher(Counting(50).of(kind), **full(2))
    async with one_worker(), batcher, batcher.stream("stops") as stops:
        assert await read_all(batcher.stream("reads")) == counted("reads", 50)
        async with batcher.stream("next, stops"):
            assert await read_all(batcher.stream("next")) == counted("next", 50)
        assert await read_all(stops) == counted("stops", 50), "as many parts may wait"


async def test_a_reader_with_too_many_unread_parts_loses_its_stream(kind: str) -> None:
    counting = Counting(ENDLESS)
    async with (
        one_worker(),
        reading(Batcher(counting.of(kind), **full(3))) as readers,
        readers.batcher.stream("slow", buffer=2) as slow,
        readers.batcher.stream("stops", buffer=1) as stops,
    ):
        readers.read("fast", buffer=1)
        parts = readers.parts["fast"]
        for number in range(100):
            await until(lambda wanted=number: len(parts) > wanted)  # type: ignore[misc]
            assert await anext(slow) == ("slow", number)
        await until(lambda: "with 0 ready" in repr(stops))  # its parts are dropped
        with pytest.raises(aiopar.ReaderTooSlow, match="has not read 64 outputs"):
            await anext(stops)
        assert await read_all(stops) == []
        assert parts[:100] == counted("fast", 100)
        readers.cancel("fast")
    assert len(counting.batches) == len(counting.closed) == 1


async def test_no_step_runs_while_no_reader_has_room(kind: str) -> None:
    counting = Counting(ENDLESS)
    async with (
        one_worker() as executor,
        Batcher(counting.of(kind), **full(2)) as batcher,
        batcher.stream("a", buffer=1) as a,
        batcher.stream("b", buffer=3) as b,
    ):
        await until(lambda: len(counting.steps) == 3)
        await settled(executor)
        assert len(counting.steps) == 3
        for number in range(2):
            assert await anext(a) == ("a", number)
        await settled(executor)
        assert len(counting.steps) == 3, "it has room for one, and one waits"
        await anext(a)
        await until(lambda: len(counting.steps) == 4)
        assert await anext(b) == ("b", 0)


@pytest.mark.parametrize("size", [1, 2])
async def test_readers_that_all_stop_lose_their_streams_if_others_wait(
    kind: str, size: int
) -> None:
    counting = Counting(50)
    options = full(size, read_timeout=0.05)
    batcher = Batcher(counting.of(kind), **options)
    async with one_worker(), batcher, AsyncExitStack() as stack:
        stopped = [
            await stack.enter_async_context(batcher.stream(f"stops {n}", buffer=1))
            for n in range(size)
        ]
        await until(lambda: len(counting.steps) == 1)
        readers = [batcher.stream(f"waits {n}") for n in range(size)]
        for reader in readers:
            await stack.enter_async_context(reader)
        for n, reader in enumerate(readers):
            assert await read_all(reader) == counted(f"waits {n}", 50)
        for stream in stopped:
            with pytest.raises(aiopar.ReaderTooSlow, match=r"has read for 0\.05 s"):
                await anext(stream)
    assert len(counting.closed) == 2


async def test_a_reader_that_stops_does_not_hold_up_the_closing_of_the_batcher(kind: str) -> None:
    counting = Counting(ENDLESS)
    async with one_worker():
        batcher = Batcher(counting.of(kind), collate_fn=list, read_timeout=0.05)
        async with batcher.stream("stops") as stops:
            await until(lambda: len(counting.steps) == 16)
            await batcher.aclose()
            with pytest.raises(aiopar.ReaderTooSlow):
                await anext(stops)
    assert len(counting.closed) == 1


async def test_a_batch_runs_until_all_readers_have_left_it(kind: str) -> None:
    counting = Counting(ENDLESS)
    async with (
        one_worker() as executor,
        Batcher(counting.of(kind), collate_fn=list, read_timeout=LONG) as batcher,
    ):
        async with batcher.stream("a", buffer=2):
            await until(lambda: len(counting.steps) == 2)
            async with batcher.stream("b") as stream:
                await settled(executor)
                assert len(counting.steps) == 2
                assert batcher.stats().queued == 1
                await stream.aclose()
        await idle(batcher)
    assert counting.batches == [["a"]]
