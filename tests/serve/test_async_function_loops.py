"""A coroutine function and many event loops: on which it is awaited, and what if that ends."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from aiopar.serve import Batcher
from aiopar.serve._request import Request
from aiopar.serve._scheduler import LoopScheduler

from .batches import until
from .coroutines import called, double
from .stand_ins import Loop, Waiting
from .test_batcher_loops import RUNNERS
from .test_scheduler import runners_for, settings_with


@pytest.mark.parametrize("runner", RUNNERS)
def test_one_loop_after_the_other(runner: str) -> None:
    batcher = Batcher(double)

    async def main() -> None:
        assert await batcher(torch.ones(1)) == 2

    for _ in range(3):
        RUNNERS[runner](main)
    RUNNERS[runner](batcher.aclose)
    assert batcher.stats().completed == 3


def test_several_loops_at_once() -> None:
    runs: list[int] = []

    async def fn(batch: list[Any]) -> list[Any]:
        runs.append(len(batch))
        await anyio.lowlevel.checkpoint()
        return batch

    batcher = Batcher(fn, collate_fn=list, max_batch_size=16, concurrency=2)
    together = threading.Barrier(6)

    def run(number: int) -> dict[Any, Any]:
        outcomes: dict[Any, Any] = {}

        async def main() -> None:
            outcomes.update(await called(batcher, *((number, n) for n in range(100))))

        together.wait(30)
        RUNNERS[["asyncio", "uvloop", "trio"][number % 3]](main)
        return outcomes

    with ThreadPoolExecutor(6) as threads:
        for number, outcomes in enumerate(threads.map(run, range(6))):
            assert outcomes == {(number, n): (number, n) for n in range(100)}
    assert sum(runs) >= 600
    assert batcher.stats().queued == batcher.stats().in_flight == 0


@pytest.mark.parametrize("other", RUNNERS)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("together", [False, True])
def test_a_loop_that_ends_leaves_others_theirs(runner: str, other: str, together: bool) -> None:
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
        """Run a batch on this loop, and let the loop end under it."""
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


def test_what_waits_is_started_on_the_loop_of_one_that_waits() -> None:
    scheduler = LoopScheduler(settings_with())
    [runner] = runners_for(scheduler)
    loops = [Loop(), Loop(), Loop()]
    first, second, third = (Request(n, Waiting(loop)) for n, loop in enumerate(loops))
    scheduler.put(first)
    assert runner.take() == [0]
    scheduler.put(second)
    scheduler.put(third)
    scheduler.released(runner, runner.batch, [])
    assert [len(loop.posted) for loop in loops] == [0, 1, 0]
    # Its loop may end now, and never see what was posted to it.
    scheduler.discard(second)
    assert [len(loop.posted) for loop in loops] == [0, 1, 1]
    # If it does, there is nobody any more for whom it is kept running.
    loops[1].posted.pop().deliver()
    assert runner.starts == 1
    assert [len(loop.posted) for loop in loops] == [0, 0, 2]
    loops[2].posted.pop().deliver()
    loops[2].posted.pop().deliver()
    assert runner.starts == 2
    assert runner.take() == [2]


def test_what_waits_behind_one_whose_loop_was_closed_is_started_on_another() -> None:
    scheduler = LoopScheduler(settings_with())
    [runner] = runners_for(scheduler)
    loops = [Loop(), Loop(), Loop(), Loop()]
    requests = [Request(n, Waiting(loop)) for n, loop in enumerate(loops)]
    for request in requests:
        scheduler.put(request)
        if request is requests[0]:
            assert runner.take() == [0]
    loops[1].closed = True
    scheduler.released(runner, runner.batch, [])
    assert [len(loop.posted) for loop in loops[2:]] == [1, 0]
    loops[2].posted.pop().deliver()
    assert runner.starts == 2
    assert runner.take() == [1, 2, 3]
