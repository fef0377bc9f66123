"""Streams that end early: by a caller that leaves, by `aclose`, the executor, or another party."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest

import aiopar
from aiopar.serve import Batcher
from tests.scopes import HELD, Holding, cut_off, errors_logged

from .batches import LONG, running, until
from .streams import ENDLESS, Counting, Readers, counted, full, idle, one_worker, read_all, settled

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
        await until(lambda: running(batcher) == 0)
    assert set(counting.closed) == set(counting.steps), "where its steps were made"


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


# `aclose`, the executor, and other parties.


async def test_aclose_lets_streams_end(kind: str) -> None:
    counting = Counting(50)
    batcher = Batcher(counting.of(kind), collate_fn=list)
    ended: list[str] = []

    async def close() -> None:
        await batcher.aclose()
        ended.append("closed")

    async with batcher.stream("a", buffer=1) as running, anyio.create_task_group() as tasks:
        await anext(running)
        async with batcher.stream("b") as queued:
            tasks.start_soon(close)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(aiopar.ServiceClosed):
                await anext(batcher.stream("c"))
            assert ended == []
            assert [part async for part in running] == counted("a", 50)[1:]
            assert [part async for part in queued] == counted("b", 50)
    assert ended == ["closed"]
    assert len(counting.closed) == 2


@pytest.mark.parametrize("how", [{"drain": False}, {"timeout": 0.01}], ids=["at once", "timeout"])
async def test_aclose_ends_streams(kind: str, how: dict[str, Any]) -> None:
    counting = Counting(ENDLESS)
    batcher = Batcher(counting.of(kind), collate_fn=list)
    async with one_worker() as executor, batcher.stream("a", buffer=2) as running:
        await until(lambda: len(counting.steps) == 2)
        await settled(executor)  # both parts have come
        async with batcher.stream("b") as queued:
            await batcher.aclose(**how)
            if "drain" in how:
                assert len(counting.closed) == 1, "it waits for that"
            with pytest.raises(aiopar.ServiceClosed):
                await anext(queued)
        assert [await anext(running), await anext(running)] == counted("a", 2)
        with pytest.raises(aiopar.ServiceClosed):
            await anext(running)
        await until(lambda: len(counting.closed) == 1)
    assert counting.batches == [["a"]]


@HELD
async def test_what_an_async_generator_holds_is_left_in_order(
    held: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    holding = Holding(held)
    async with Batcher(holding, collate_fn=list) as batcher:
        async with batcher.stream("left") as stream:
            assert await anext(stream) == "left"
        await until(lambda: holding.closed == 1)
        async with batcher.stream("cancelled", buffer=1) as stream:
            assert await anext(stream) == "cancelled"
            await batcher.aclose(timeout=0.01)
    assert holding.closed == 2
    assert errors_logged(caplog) == []


async def test_a_scope_of_an_async_generator_that_is_cancelled_ends_nothing_else() -> None:
    async with Batcher(cut_off, collate_fn=list) as batcher:
        with pytest.raises(RuntimeError, match=r"was cancelled|raised a cancellation"):
            await read_all(batcher.stream("left", buffer=1))
        await anyio.wait_all_tasks_blocked()  # trio's run would end by a `Cancelled` of nobody's


async def test_an_error_in_the_block_of_the_batcher_ends_them(kind: str) -> None:
    counting = Counting(ENDLESS)
    with suppress(ZeroDivisionError):
        async with Batcher(counting.of(kind), collate_fn=list, read_timeout=LONG) as batcher:
            stream = batcher.stream("a")
            await anext(stream)
            raise ZeroDivisionError
    assert len(counting.closed) == 1


@pytest.mark.parametrize("read", [True, False])
async def test_the_executor_is_shut_down_between_two_steps(read: bool) -> None:
    counting = Counting(ENDLESS)
    async with one_worker() as executor:
        batcher = await Batcher(counting.generate, **full(2)).__aenter__()
        async with batcher.stream("a", buffer=1) as a, batcher.stream("b", buffer=1) as b:
            await until(lambda: len(counting.steps) == 1)
            await executor.aclose()
            if read:
                for item, stream in (("a", a), ("b", b)):
                    assert await anext(stream) == (item, 0)
                for stream in (a, b):
                    with pytest.raises(aiopar.ExecutorShutdown):
                        await anext(stream)
    assert len(counting.closed) == 1
    await batcher.aclose()


async def test_an_async_generator_that_is_being_closed_is_not_cancelled() -> None:
    closing, closed = anyio.Event(), anyio.Event()

    async def generate(batch: list[Any]) -> AsyncIterator[list[Any]]:
        try:
            while True:
                yield batch
        finally:
            closing.set()
            with anyio.move_on_after(0.05):
                await anyio.sleep_forever()
            closed.set()

    batcher = Batcher(generate, collate_fn=list)
    async with batcher.stream("a") as stream:
        await anext(stream)
    await closing.wait()
    await batcher.aclose(timeout=0.001)
    assert closed.is_set()


@pytest.mark.parametrize("parts", [0, 1])
def test_a_stream_whose_task_another_party_cancels_fails(parts: int) -> None:
    events: list[str] = []

    async def generate(batch: list[Any]) -> AsyncIterator[list[Any]]:
        try:
            for _ in range(parts):
                yield batch
            events.append("waits")
            await anyio.sleep_forever()
        finally:
            events.append("closed")

    async def main() -> None:
        before = asyncio.all_tasks()
        async with Batcher(generate, collate_fn=list) as batcher:
            for item in "ab":  # the batcher goes on
                async with batcher.stream(item, buffer=2) as stream:
                    await until(lambda: events == ["waits"])
                    [task] = asyncio.all_tasks() - before
                    task.cancel()
                    for _ in range(parts):
                        assert await anext(stream) == item
                    with pytest.raises(RuntimeError, match="cancelled from outside"):
                        await anext(stream)
                assert events == ["waits", "closed"]
                events.clear()

    asyncio.run(main())
