"""Streams of one batch that are read in several event loops, which may end before their stream."""

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from aiopar.serve import Batcher

from .batches import running, until
from .streams import Counting, counted, full, idle
from .test_batcher_loops import RUNNERS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("other", RUNNERS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_one_batch_for_readers_in_several_loops(kind: str, runner: str, other: str) -> None:
    counting = Counting(50)
    batcher = Batcher(counting.of(kind), **full(2))

    async def read(item: str) -> list[Any]:
        return [part async for part in batcher.stream(item, buffer=2)]

    with ThreadPoolExecutor(2) as threads:
        reading = [
            threads.submit(RUNNERS[name], functools.partial(read, item))
            for item, name in (("a", runner), ("b", other))
        ]
        assert [future.result(30) for future in reading] == [counted("a", 50), counted("b", 50)]
    assert len(counting.batches) == 1
    assert batcher.stats().in_flight == 0


@pytest.mark.parametrize("module", ["asyncio", "uvloop"])
def test_an_interrupt_in_one_readers_step_leaves_the_others_each_part_once(
    kind: str, module: str
) -> None:
    loop = pytest.importorskip(module).new_event_loop()
    batcher = Batcher(Counting(4).of(kind), **full(3))

    async def read(item: str) -> list[Any]:
        parts = []
        async for part in batcher.stream(item):
            parts.append(part)
            if part == ("interrupted", 1):
                raise KeyboardInterrupt
        return parts

    tasks = [loop.create_task(read(item)) for item in ("a", "interrupted", "b")]
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(asyncio.wait(tasks))
    first, _, last = loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    assert (first, last) == (counted("a", 4), counted("b", 4))
    loop.run_until_complete(batcher.aclose())
    loop.close()


@pytest.mark.parametrize("other", RUNNERS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_loop_that_ends_under_a_stream(kind: str, runner: str, other: str) -> None:
    entered, gone = threading.Event(), threading.Event()
    batcher = Batcher(Counting(50).of(kind), **full(2))

    async def leave() -> None:
        async with batcher.stream("leaves") as stream:  # it is the second: here the batch starts
            await anext(stream)

    async def stay() -> tuple[list[Any], type[Exception]]:
        parts: list[Any] = []
        async with batcher.stream("stays", buffer=2) as stream:
            entered.set()
            await until(gone.is_set)
            try:
                while True:
                    parts.append(await anext(stream))
            except (StopAsyncIteration, RuntimeError) as end:
                return parts, type(end)

    with ThreadPoolExecutor(1) as threads:
        staying = threads.submit(RUNNERS[runner], stay)
        entered.wait(30)
        RUNNERS[other](leave)
        gone.set()
        parts, end = staying.result(30)
    # An async generator ends with its loop.
    count = 50 if kind == "generator" else len(parts)
    assert parts == counted("stays", count)
    assert end is (StopAsyncIteration if kind == "generator" else RuntimeError)
    assert batcher.stats().in_flight == 0


def test_a_stream_is_read_in_one_loop() -> None:
    batcher = Batcher(Counting().generate, **full(2))
    stream = batcher.stream("a")

    async def read() -> None:
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await anext(stream)
        assert [part async for part in stream] == []

    with pytest.raises(RuntimeError, match="none runs here"):
        anext(batcher.stream("b")).send(None)
    with asyncio.Runner() as runner:
        runner.run(stream.__aenter__())
        asyncio.run(read())
        runner.run(idle(batcher))


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_stream_that_outlives_its_loop_does_not_hold_up_the_next(
    runner: str, collected: bool
) -> None:
    options = full(1) if collected else full(1, read_timeout=0.05)
    batcher = Batcher(Counting(50).of("generator"), **options)
    left: list[Any] = []

    async def leave() -> None:
        left.append(batcher.stream("leaves", buffer=1))
        await anext(left[0])

    async def stay() -> list[Any]:
        return [part async for part in batcher.stream("stays")]

    RUNNERS[runner](leave)
    if collected:
        left.clear()
    assert RUNNERS[runner](stay) == counted("stays", 50)
    assert running(batcher) == 0
