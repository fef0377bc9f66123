"""`resize`: more or fewer worker processes while calls run; none is lost."""

import operator
import os
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar import Batcher, ProcessExecutor, ReplicaPool
from tests.remote.test_serving import Scale, pids, until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("batched", [True, False])
async def test_no_request_is_lost_when_a_pool_follows_its_executor(batched: bool) -> None:
    answered, load = [0] * 8, True

    async def client(number: int, call: Any) -> None:
        while load:
            x = torch.tensor([float(number)])
            output, _ = await call(x)
            assert output.flatten().tolist() == [2.0 * number]
            answered[number] += 1

    async def progress() -> None:
        before = answered.copy()
        await until(lambda: all(map(operator.gt, answered, before)))

    async with (
        ProcessExecutor(["cpu"]) as executor,
        ReplicaPool(Scale(), executor=executor, warmup=torch.ones(1)) as pool,
        Batcher(pool, max_batch_size=4) as batcher,
        anyio.create_task_group() as tasks,
    ):
        for number in range(8):
            tasks.start_soon(client, number, batcher if batched else pool)
        for count in (3, 1, 2):
            await executor.resize(count)
            assert len(executor.devices) == len(pids(executor)) == count
            assert [one.state for one in pool.stats().replicas] == ["ready"] * count
            await progress()
        # All replicas work: the batcher has taken up the new ones.
        await until(lambda: all(one.completed for one in pool.stats().replicas))
        await pool.swap(Scale(2.0))
        await progress()
        load = False


async def test_workers_that_go_run_their_queued_calls() -> None:
    async with ProcessExecutor(["cpu", "cpu"]) as executor:
        view = executor.on(worker=1)
        futures = [view.submit(os.getpid) for _ in range(100)]
        await executor.resize(1)
        assert {future.result() for future in futures}.isdisjoint(pids(executor))
        assert await executor.run_sync(os.getpid) in pids(executor)
        with pytest.raises(aiopar.ExecutorShutdown, match="process:1/cpu was removed"):
            await view.run_sync(os.getpid)


async def test_a_map_goes_on_while_its_executor_is_resized() -> None:
    async with ProcessExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            outputs = aiopar.map(Scale(), (torch.full((1,), float(n)) for n in range(60)))
        found = []
        async for output, _ in outputs:
            found.append(output.item())
            if len(found) == 5:
                await executor.resize(2)
            if len(found) == 30:
                await executor.resize(1)
    assert found == [2.0 * n for n in range(60)]


async def test_bad_sizes_are_refused() -> None:
    async with ProcessExecutor(["cpu"]) as executor:
        with pytest.raises(ValueError, match="count must be at least 1, got 0"):
            await executor.resize(0)
        with pytest.raises(TypeError, match="count must be an int, not float"):
            await executor.resize(1.5)  # type: ignore[arg-type]
    with pytest.raises(aiopar.ExecutorShutdown):
        await executor.resize(2)
