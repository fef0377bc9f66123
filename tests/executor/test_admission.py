"""`max_pending`: bounded queues, requests that wait for room; no room is ever lost."""

import asyncio
import concurrent.futures
import random
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import pytest

import aiopar
from aiopar.testing import Gate
from tests.home import AtHome
from tests.interruptions import at_every_point
from tests.workers import MakeWorkers

Full: TypeAlias = tuple[aiopar.DeviceExecutor, Gate]


@pytest.fixture
def full(make_workers: MakeWorkers) -> Iterator[Full]:
    """An executor whose two workers are held, with one more call in the queue of each."""
    with make_workers(2, max_pending=1) as executor, Gate() as gate:
        for worker in range(2):  # a process that starts counts as load: the held one may get both
            executor.on(worker=worker).submit(int).result()
        for count in (1, 2):
            executor.submit(AtHome(gate))
            gate.wait_entered(count)
        for _ in range(2):
            executor.submit(AtHome(gate))
        yield executor, gate


def test_submit_raises_when_every_queue_is_full(full: Full) -> None:
    executor, gate = full
    with pytest.raises(aiopar.QueueFull, match="each of 2 workers has max_pending=1") as caught:
        executor.submit(str)
    assert isinstance(caught.value, asyncio.QueueFull)
    with pytest.raises(aiopar.QueueFull, match="each of 1 workers"):
        executor.on(worker=1).submit(str)
    gate.open()


@pytest.mark.anyio
async def test_run_sync_waits_for_room_in_order(full: Full) -> None:
    executor, gate = full
    one = executor.on(worker=0)
    ran: list[int] = []
    async with anyio.create_task_group() as tasks:
        for n in range(5):
            tasks.start_soon(one.run_sync, AtHome(ran.append), n)
            await anyio.wait_all_tasks_blocked()
        assert executor.stats().workers[0].queued == 1
        gate.open()
    assert ran == [0, 1, 2, 3, 4]


@pytest.mark.anyio
async def test_calls_made_by_a_call_are_exempt() -> None:
    async with aiopar.DeviceExecutor(["cpu"], max_pending=1) as executor:

        def nested() -> list[int]:
            futures = [executor.submit(pow, 2, n) for n in range(10)]
            return [future.wait() for future in futures] + [aiopar.wait(executor.run_sync(int))]

        assert await executor.run_sync(nested) == [2**n for n in range(10)] + [0]


@pytest.mark.anyio
async def test_a_gang_waits_until_every_worker_can_take_it(full: Full) -> None:
    executor, gate = full
    barrier = threading.Barrier(2)
    arrived: list[aiopar.Future[Any]] = executor.submit_all([AtHome(barrier.wait)] * 2)
    gate.let_on()
    await gate.entered(3)
    # One queue has room. It is reserved for the gang, not for later calls.
    with pytest.raises(aiopar.QueueFull):
        executor.submit(str)
    assert not any(future.running() for future in arrived)
    gate.open()
    assert sorted([await future for future in arrived]) == [0, 1]


@pytest.mark.anyio
async def test_a_cancelled_gang_does_not_hold_up_later_calls(full: Full) -> None:
    executor, gate = full
    gang: list[aiopar.Future[Any]] = executor.submit_all([str, str])
    gate.let_on()
    await gate.entered(3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(executor.run_sync, abs, -1)
        await anyio.wait_all_tasks_blocked()
        assert sum(worker.queued for worker in executor.stats().workers) == 1
        assert gang[0].cancel()
        with anyio.fail_after(30):
            while [worker.queued for worker in executor.stats().workers] != [1, 1]:
                await anyio.lowlevel.checkpoint()
        gate.open()
    with pytest.raises(concurrent.futures.CancelledError):
        await gang[1]
    for _ in range(3):  # no room was lost
        await executor.run_sync(str)


@pytest.mark.anyio
async def test_a_full_worker_does_not_hold_up_other_workers(make_workers: MakeWorkers) -> None:
    async with make_workers(2, max_pending=1) as executor:
        first, second = executor.on(worker=0), executor.on(worker=1)
        with Gate() as gate:
            first.submit(AtHome(gate))
            await gate.entered()
            first.submit(AtHome(gate))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first.run_sync, abs, -1)
                await anyio.wait_all_tasks_blocked()
                assert await second.run_sync(pow, 2, 5) == 32
                assert await second.submit(pow, 2, 6) == 64
                gate.open()


@pytest.mark.anyio
async def test_a_gang_that_waits_for_room_runs_after_shutdown(full: Full) -> None:
    executor, gate = full
    gang: list[aiopar.Future[Any]] = executor.submit_all([(pow, 2, 5), (pow, 2, 6)])
    async with anyio.create_task_group() as tasks:

        async def refused() -> None:
            with pytest.raises(aiopar.ExecutorShutdown):
                await executor.run_sync(str)

        for _ in range(300):  # more than would fit on the stack one inside the other
            tasks.start_soon(refused)
        await anyio.wait_all_tasks_blocked()
        executor.shutdown(wait=False)
    gate.open()
    assert [await future for future in gang] == [32, 64]


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(4))
async def test_no_room_is_lost_when_callers_come_and_go(seed: int) -> None:
    """Calls and gangs are cancelled while they wait for room, in a queue, or while they run."""
    choose = random.Random(seed)
    async with aiopar.DeviceExecutor(["cpu"] * 2, max_pending=2) as executor:
        views = [executor, executor.on(worker=0), executor.on(worker=1)]

        async def one(view: aiopar.DeviceExecutor) -> None:
            await view.run_sync(abs, -1)

        async def gang() -> None:
            futures = executor.submit_all([str, str])
            try:
                await aiopar.collect_all(futures)
            finally:
                futures[choose.randrange(2)].cancel()

        tasks = []
        for _ in range(200):
            body = gang() if choose.random() < 0.3 else one(choose.choice(views))
            tasks.append(asyncio.create_task(body))
            if choose.random() < 0.3:
                await asyncio.sleep(0)
            if choose.random() < 0.4:
                choose.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        with Gate() as gate:
            for count in (1, 2):
                executor.submit(gate)
                await gate.entered(count)
            for view in views[1:]:
                for _ in range(2):
                    view.submit(str)
                with pytest.raises(aiopar.QueueFull):
                    view.submit(str)


@pytest.mark.asyncio
async def test_a_destructor_may_give_room_back_at_any_point() -> None:
    """The collector may close an awaited call anywhere: here a cancelled call stands for it."""
    for interruption in at_every_point():
        async with aiopar.DeviceExecutor(["cpu"], max_pending=2) as executor:
            with Gate() as gate:
                executor.submit(gate)
                await gate.entered()
                first, second = (executor.submit(str) for _ in range(2))
                waiting = [asyncio.create_task(executor.run_sync(abs, -1)) for _ in range(3)]
                await anyio.wait_all_tasks_blocked()
                with interruption.by(second.cancel):
                    first.cancel()
                assert second.cancel()
            assert await asyncio.gather(*waiting) == [1, 1, 1]
