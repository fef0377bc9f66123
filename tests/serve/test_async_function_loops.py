"""`Batcher` of a coroutine function used from several event loops, one of which may end."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from aiopar.serve import Batcher

from .batches import until
from .coroutines import called, double
from .test_batcher_loops import RUNNERS


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
