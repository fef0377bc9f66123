"""Loops that end or are closed while a batch of a coroutine function runs there, or waits to."""

import asyncio
import gc
import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import anyio
import pytest

from aiopar.serve import Batcher
from tests.lost_loops import Left, closed_under_tasks, left_on_a_closed_loop

from .batches import until
from .test_batcher_loops import RUNNERS


class Lasting:
    """A coroutine function whose first batch with "lost" never ends; other batches are returned."""

    def __init__(self) -> None:
        self.runs: list[list[Any]] = []
        self.may_end: Callable[[], bool] = lambda: True
        """Whether batches without "lost" may end."""

    async def __call__(self, items: list[Any]) -> list[Any]:
        lost = "lost" in items and not any("lost" in run for run in self.runs)
        self.runs.append(sorted(items))
        await until(lambda: not lost and self.may_end())
        return items


def lost_behind_others(
    loop: asyncio.AbstractEventLoop, fn: Lasting, batcher: Batcher[Any, Any], concurrency: int = 1
) -> asyncio.Task[Any]:
    """Call on `loop`, behind as many batches as run at once; these end when two items wait."""
    fn.may_end = lambda: batcher.stats().queued == 2 or len(fn.runs) > concurrency
    tasks = []
    for _ in range(concurrency):
        tasks.append(loop.create_task(batcher("first")))
        loop.run_until_complete(until(lambda: len(fn.runs) == len(tasks)))
    lost = loop.create_task(batcher("lost"))
    loop.run_until_complete(until(lambda: batcher.stats().queued == 1))
    return lost


@pytest.mark.parametrize("other", RUNNERS)
def test_a_batch_whose_loop_was_closed_does_not_delay_the_next(other: str) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list)
    with closed_under_tasks() as loop:
        lost = loop.create_task(batcher("lost"))
        loop.run_until_complete(until(lambda: fn.runs == [["lost"]]))
    assert batcher.stats().in_flight == 1, "nobody has looked yet"

    async def main() -> None:
        assert await batcher("next", timeout=30) == "next"
        await batcher.aclose(timeout=30)

    RUNNERS[other](main)
    assert fn.runs == [["lost"], ["next"]]
    assert not lost.done()
    assert batcher.stats().queued == batcher.stats().in_flight == 0


@pytest.mark.parametrize("other", RUNNERS)
def test_a_request_behind_a_batch_whose_loop_was_closed_needs_no_other_request(other: str) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list, read_timeout=0.05)
    with ThreadPoolExecutor(1) as threads:
        with closed_under_tasks() as loop:
            lost = loop.create_task(batcher("lost"))
            loop.run_until_complete(until(lambda: fn.runs == [["lost"]]))
            waiting = threads.submit(RUNNERS[other], lambda: call(batcher, "waits"))
            loop.run_until_complete(until(lambda: batcher.stats().queued == 1))
        assert waiting.result(30) == "waits"
    assert not lost.done()


async def call(batcher: Batcher[Any, Any], item: str) -> Any:
    return await batcher(item)


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_batcher_whose_loop_was_closed_can_be_closed(drain: bool, begun: bool) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list, max_batch_size=1)
    with closed_under_tasks() as loop:
        lost = [loop.create_task(batcher(item)) for item in ("lost", "queued")]
        count = 1 if begun else 0
        loop.run_until_complete(until(lambda: len(fn.runs) == count))

    async def main() -> None:
        with anyio.fail_after(30):
            await batcher.aclose(drain=drain)

    asyncio.run(main())
    assert not any(task.done() for task in lost)
    assert fn.runs == [["lost"]] * begun
    assert batcher.stats().queued == batcher.stats().in_flight == 0


@pytest.mark.parametrize("other", RUNNERS)
def test_a_batcher_whose_loop_was_closed_while_it_drained_opens_again(other: str) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list, max_batch_size=1)
    with closed_under_tasks() as loop:
        lost = [loop.create_task(batcher(item)) for item in ("lost", "queued")]
        loop.run_until_complete(until(lambda: batcher.stats().queued == 1))
        lost.append(loop.create_task(batcher.aclose()))
        loop.run_until_complete(until(lambda: not batcher.ready))

    async def main() -> None:
        with anyio.fail_after(30):
            async with batcher:
                assert await batcher("next") == "next"

    RUNNERS[other](main)
    assert not any(task.done() for task in lost)
    assert batcher.stats().completed == 1


@pytest.mark.parametrize("other", RUNNERS)
@pytest.mark.parametrize("concurrency", [1, 2])
def test_items_of_other_loops_in_a_batch_whose_loop_was_closed_run_again(
    concurrency: int, other: str
) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list, concurrency=concurrency)
    firsts = [["first"]] * concurrency
    outcomes: list[Any] = []

    async def call(item: str) -> None:
        outcomes.append(await batcher(item, timeout=30))

    with ThreadPoolExecutor(1) as threads:
        with closed_under_tasks() as loop:
            lost = lost_behind_others(loop, fn, batcher, concurrency)
            staying = threads.submit(RUNNERS[other], lambda: call("stays"))
            loop.run_until_complete(until(lambda: fn.runs == [*firsts, ["lost", "stays"]]))
        asyncio.run(call("next"))
        staying.result(30)
    assert not lost.done()
    assert sorted(outcomes) == ["next", "stays"]
    assert sorted(itertools.chain.from_iterable(fn.runs[concurrency + 1 :])) == ["next", "stays"], (
        "nobody waits for the other"
    )


@pytest.mark.parametrize("in_the_next_batch", [True, False])
def test_tasks_of_a_closed_loop_may_be_collected_on_another_loop(in_the_next_batch: bool) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list)
    with closed_under_tasks() as loop:
        left = [loop.create_task(batcher("lost"))]
        loop.run_until_complete(until(lambda: fn.runs == [["lost"]]))

    looks = itertools.count()

    def collect() -> bool:
        left.clear()
        gc.collect()
        return next(looks) == 3  # the batch does not end at once: a cancellation would find it

    async def main() -> None:
        assert await batcher("next", timeout=30) == "next"
        asyncio.get_running_loop().call_soon(collect)  # where no task runs
        await until(lambda: not left)

    if in_the_next_batch:
        fn.may_end = collect
    with mock.patch.object(sys, "unraisablehook") as ignored:
        asyncio.run(main())
    assert ignored.mock_calls == []
    assert fn.runs == [["lost"], ["next"]]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_batch_that_had_not_begun_on_a_closed_loop_fails_no_request_of_another_loop() -> None:
    batcher = Batcher(Lasting(), collate_fn=list)
    outcomes: list[Any] = []

    async def call(item: str) -> None:
        outcomes.append(await batcher(item, timeout=30))

    with ThreadPoolExecutor(1) as threads:
        with closed_under_tasks() as loop:
            left = loop.create_task(batcher("left"))
            loop.stop()
            loop.run_forever()  # one turn: the batch has a task, which has not begun
            staying = threads.submit(asyncio.run, call("stays"))
            while batcher.stats().queued < 2:
                threading.Event().wait(0.001)
        asyncio.run(call("next"))
        staying.result(30)
    assert not left.done()
    assert sorted(outcomes) == ["next", "stays"]
    del left, loop
    gc.collect()  # here the warning is ignored


@pytest.mark.parametrize("waits", [True, False])
def test_an_async_generator_whose_loop_was_closed_is_collected(waits: bool) -> None:
    left = Left(waits)

    async def read() -> None:
        async for _ in Batcher(left, collate_fn=list).stream(0, buffer=1):
            await asyncio.Event().wait()

    assert left_on_a_closed_loop(read, left) == []


@pytest.mark.parametrize("other", RUNNERS)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("together", [False, True])
def test_a_loop_that_ends_does_not_take_items_of_other_loops_along(
    runner: str, other: str, together: bool
) -> None:
    runs: list[list[str]] = []
    may_come = threading.Event()

    async def fn(batch: list[str]) -> list[str]:
        runs.append(sorted(batch))
        if batch == ["first"]:
            await until(lambda: batcher.stats().queued == 2)
        elif "leaves" in batch:
            await anyio.sleep_forever()
        return batch

    batcher = Batcher(fn, collate_fn=list)

    async def leave() -> None:
        """Run a batch on this loop, and let the loop end before the batch."""
        async with anyio.create_task_group() as tasks:
            if together:
                tasks.start_soon(batcher, "first")
                await until(lambda: runs == [["first"]])
            tasks.start_soon(batcher, "leaves")
            await until(lambda: batcher.stats().queued == 1 or runs == [["leaves"]])
            may_come.set()
            if together:
                await until(lambda: runs[1:] == [["leaves", "stays"]])
            else:
                await until(lambda: batcher.stats().queued == 1)
            tasks.cancel_scope.cancel()

    async def stay() -> str:
        result: str = await batcher("stays")
        return result

    with ThreadPoolExecutor(2) as threads:
        leaving = threads.submit(RUNNERS[runner], leave)
        may_come.wait(30)
        assert threads.submit(RUNNERS[other], stay).result(30) == "stays"
        leaving.result(30)
    assert runs[-1] == ["stays"]
    assert batcher.stats().queued == batcher.stats().in_flight == 0
