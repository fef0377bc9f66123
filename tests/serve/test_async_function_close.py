"""`Batcher.aclose` with a coroutine function: which batches it awaits, and which it cancels."""

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest
import torch

import aiopar
from aiopar.serve import Batcher

from .batches import LONG, Callers, until
from .coroutines import Held, called, double
from .streams import full


@pytest.mark.anyio
@pytest.mark.parametrize("drain", [True, False])
async def test_aclose_waits_for_running_batches_and_drains_the_queue(drain: bool) -> None:
    held = Held()
    async with anyio.create_task_group() as tasks:
        batcher = Batcher(held, collate_fn=list)
        callers = Callers(batcher, tasks)
        callers.call(1)
        await until(lambda: len(held.runs) == 1)
        await callers.queue(2)
        tasks.start_soon(functools.partial(batcher.aclose, drain=drain))
        await until(lambda: not batcher.ready)
        with pytest.raises(aiopar.ServiceClosed):
            await batcher(3)
        held.let_on()
        await until(lambda: 1 in callers.outcomes)
        await until(lambda: 2 in callers.outcomes or len(held.runs) == 2)
        held.let_on()
    assert held.runs == ([[1], [2]] if drain else [[1]])
    assert callers.outcomes[1] == "1"
    assert type(callers.outcomes[2]) is (str if drain else aiopar.ServiceClosed)


@pytest.mark.anyio
async def test_aclose_cancels_after_its_timeout_and_waits() -> None:
    held = Held()
    async with anyio.create_task_group() as tasks:
        batcher = Batcher(held, collate_fn=list)
        callers = Callers(batcher, tasks)
        callers.call(1)
        await until(lambda: len(held.runs) == 1)
        await callers.queue(2)
        await batcher.aclose(timeout=0.01)
        assert held.ended == [[1]]
        assert batcher.stats().in_flight == 0
    assert {type(error) for error in callers.outcomes.values()} == {aiopar.ServiceClosed}
    assert held.runs == [[1]]


@pytest.mark.asyncio
async def test_no_task_is_left() -> None:
    before = asyncio.all_tasks()
    async with Batcher(double, concurrency=2) as batcher:
        await batcher(torch.ones(1))
    async with Batcher(Held(), collate_fn=list) as batcher:
        with pytest.raises(aiopar.DeadlineExceeded):
            await batcher(1, timeout=0.01)
        await batcher.aclose(timeout=0.01)
    assert asyncio.all_tasks() == before


def test_aclose_does_not_wait_for_another_loop() -> None:
    runs: list[list[str]] = []
    blocked, may_go_on = threading.Event(), threading.Event()

    async def fn(batch: list[str]) -> list[str]:
        runs.append(sorted(batch))
        await anyio.sleep_forever()
        return batch

    batcher = Batcher(fn, **full(2))

    async def block() -> None:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            await callers.queue("there")
            blocked.set()
            await until(lambda: bool(runs))
            may_go_on.wait(30)  # of all that is posted to this loop, nothing is seen yet
        assert isinstance(callers.outcomes["there"], aiopar.ServiceClosed)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            await until(blocked.is_set)
            callers.call("here")
            await until(lambda: bool(runs))
            await batcher.aclose(timeout=0.01)
        assert isinstance(callers.outcomes["here"], aiopar.ServiceClosed)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(asyncio.run, block())
        asyncio.run(main())
        may_go_on.set()
        other.result(30)
    assert runs == [["here", "there"]]


@pytest.mark.anyio
async def test_the_executor_is_shut_down_under_it() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            batcher = await Batcher(double, max_batch_size=4, max_queue_delay=LONG).__aenter__()
    outcomes = await called(batcher, *torch.ones(4, 1).unbind())
    assert {type(error) for error in outcomes.values()} == {aiopar.ExecutorShutdown}
    assert not any(hasattr(error, "__notes__") for error in outcomes.values())
    await batcher.aclose()
