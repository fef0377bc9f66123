"""`resize`: more or fewer worker processes while calls run; none is lost."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
import torch

import aiopar
from aiopar import Batcher, ProcessExecutor, ReplicaPool
from aiopar.testing import Gate
from tests.home import AtHome
from tests.remote.test_serving import Load, Scale, pids, until

pytestmark = pytest.mark.anyio


async def test_no_request_is_lost_when_a_pool_follows_its_executor() -> None:
    async with (
        ProcessExecutor(["cpu"]) as executor,
        ReplicaPool(Scale(), executor=executor, warmup=torch.ones(1)) as pool,
        Batcher(pool, max_batch_size=4) as batcher,
    ):
        load = Load(pool, batcher)
        async with load.running():
            for count in (3, 1, 2):
                await executor.resize(count)
                assert len(executor.devices) == len(pids(executor)) == count
                assert [one.state for one in pool.stats().replicas] == ["ready"] * count
                await load.all_answered(1)
            # All replicas work: the batcher has taken up the new ones.
            await until(lambda: all(one.completed for one in pool.stats().replicas))
            await pool.swap(Scale(2.0))


async def test_workers_that_go_run_their_queued_calls() -> None:
    async with ProcessExecutor(["cpu", "cpu"]) as executor:
        view = executor.on(worker=1)
        futures = [view.submit(os.getpid) for _ in range(100)]
        await executor.resize(1)
        assert {future.result() for future in futures}.isdisjoint(pids(executor))
        assert await executor.run_sync(os.getpid) in pids(executor)
        with pytest.raises(aiopar.ExecutorShutdown, match="process:1/cpu was removed"):
            await view.run_sync(os.getpid)


@asynccontextmanager
async def both_held(executor: ProcessExecutor) -> AsyncIterator[list[Gate]]:
    """Both workers are held, each at its gate, until the block is left."""
    with Gate() as first, Gate() as second:
        gates = [first, second]
        for number, gate in enumerate(gates):
            executor.on(worker=number).submit(AtHome(gate))
            await gate.entered()
        yield gates


async def test_a_worker_that_goes_leaves_the_calls_of_all_workers_to_the_others() -> None:
    async with ProcessExecutor(["cpu", "cpu"]) as executor:
        async with both_held(executor) as gates:
            futures = [executor.submit(os.getpid) for _ in range(10)]
            own = executor.on(worker=1).submit(os.getpid)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(executor.resize, 1)
                await until(lambda: len(executor.devices) == 1)
                gates[1].open()
            # It has ended, and the other worker is still held.
            assert await own not in pids(executor)
            assert [one.queued for one in executor.stats().workers] == [10]
        assert {await future for future in futures} == pids(executor)


async def test_a_call_that_waits_for_room_goes_to_a_worker_that_stays() -> None:
    found: list[int] = []

    async def call() -> None:
        found.append(await executor.run_sync(os.getpid))

    async with ProcessExecutor(["cpu", "cpu"], max_pending=1) as executor:
        stays, goes = [await executor.on(worker=n).run_sync(os.getpid) for n in (0, 1)]
        async with both_held(executor) as gates, anyio.create_task_group() as tasks:
            for _ in range(6):  # each worker has room for one
                tasks.start_soon(call)
            await until(lambda: sum(one.queued for one in executor.stats().workers) == 2)
            tasks.start_soon(executor.resize, 1)
            await until(lambda: len(executor.devices) == 1)
            gates[1].open()
            await until(lambda: bool(found))
            assert found == [goes]
            gates[0].open()
    assert found == [goes, *[stays] * 5]


async def test_bad_sizes_are_refused() -> None:
    async with ProcessExecutor(["cpu"]) as executor:
        with pytest.raises(ValueError, match="count must be at least 1, got 0"):
            await executor.resize(0)
        with pytest.raises(TypeError, match="count must be an int, not float"):
            await executor.resize(1.5)  # type: ignore[arg-type]
    with pytest.raises(aiopar.ExecutorShutdown):
        await executor.resize(2)
