"""`ReplicaPool` and `Batcher` on Ray actors: lost actors and nodes, other sizes and weights."""

import operator
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import psutil
import pytest
import torch

from aiopar import Batcher, ReplicaPool
from aiopar.ray import RayExecutor
from tests.remote.test_ray import pids
from tests.remote.test_serving import Scale, until

pytestmark = [pytest.mark.ray, pytest.mark.asyncio]


class Load:
    """Clients of a pool and of its batcher, which check every answer."""

    def __init__(self, pool: ReplicaPool[Any], batcher: Batcher[Any, Any]) -> None:
        self.longest = 0.0
        """The longest wait for an answer, in seconds."""
        self.factors = {2.0}
        """By what the replicas may multiply."""
        self._calls: list[Any] = [pool, batcher] * 4
        self._answered = [0] * len(self._calls)
        self._goes_on = True

    async def client(self, number: int) -> None:
        x = torch.tensor([float(number)])
        while self._goes_on:
            began, factors = anyio.current_time(), self.factors
            output, _ = await self._calls[number](x if number % 2 == 0 else x[0].expand(1))
            self.longest = max(self.longest, anyio.current_time() - began)
            assert output.item() in {factor * number for factor in factors | self.factors}
            self._answered[number] += 1

    async def all_answered(self, times: int = 3) -> None:
        """Wait until every client has got some more answers."""
        before = [count + times - 1 for count in self._answered]
        await until(lambda: all(map(operator.gt, self._answered, before)))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            for number in range(len(self._calls)):
                tasks.start_soon(self.client, number)
            await self.all_answered()
            yield
            await self.all_answered()
            self._goes_on = False


def replaced(victim: int, executor: RayExecutor) -> bool:
    return victim not in pids(executor) and len(pids(executor)) == 2


def all_ready(pool: ReplicaPool[Any]) -> bool:
    return all(replica.state == "ready" for replica in pool.stats().replicas)


async def test_no_request_is_lost_when_actors_are_killed_or_weights_or_sizes_change(
    cluster: Any,
) -> None:
    async with (
        RayExecutor(2) as executor,
        ReplicaPool(Scale(), executor=executor, warmup=torch.ones(1)) as pool,
        Batcher(pool, max_batch_size=4) as batcher,
    ):
        load = Load(pool, batcher)
        async with load.running():
            for victim in pids(executor):
                os.kill(victim, signal.SIGKILL)
                await until(partial(replaced, victim, executor))
                await until(lambda: all_ready(pool))
            assert load.longest < 1
            load.factors = {2.0, 3.0}
            await pool.swap(Scale(3.0))
            load.factors = {3.0, 4.0}
            await pool.load_state_dict({"factor": torch.tensor(4.0)})
            load.factors = {4.0}
            for count in (3, 1):
                await executor.resize(count)
                assert len(pids(executor)) == count
                assert len(pool.stats().replicas) == 2 * count
                await load.all_answered()


@pytest.fixture
def nodes(cluster: Any) -> Iterator[list[Any]]:
    """Two nodes with the resource "spot", each for two actors."""
    nodes = [_add_node(cluster) for _ in range(2)]
    yield nodes
    for node in nodes:
        for process in _processes(node):
            process.send_signal(signal.SIGCONT)
        cluster.remove_node(node, allow_graceful=False)


def _add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=2, resources={"spot": 2}, object_store_memory=100 << 20)


def _processes(node: Any) -> list[psutil.Process]:
    """The raylet of a node and its actors."""
    raylets = [psutil.Process(one.process.pid) for one in node.all_processes["raylet"]]
    return [process for raylet in raylets for process in (raylet, *raylet.children(recursive=True))]


def _freeze(node: Any) -> None:
    for process in _processes(node):
        process.send_signal(signal.SIGSTOP)


@pytest.mark.may_block("starts a node, which Ray does on the main thread only")
async def test_no_request_is_lost_when_nodes_end_or_stop(cluster: Any, nodes: list[Any]) -> None:
    executor = RayExecutor(4, ray_actor_options={"resources": {"spot": 1}})
    async with (
        ReplicaPool(Scale(), executor=executor, warmup=torch.ones(1)) as pool,
        Batcher(pool, max_batch_size=4) as batcher,
    ):
        load = Load(pool, batcher)
        async with load.running():
            await until(lambda: len(pids(executor)) == 4)
            cluster.remove_node(nodes.pop(), allow_graceful=False)
            await until(lambda: len(pids(executor)) == 2)
            await load.all_answered()
            # A new node takes the place of the lost one.
            nodes.append(_add_node(cluster))
            await until(lambda: len(pids(executor)) == 4 and all_ready(pool))
            load.longest = 0.0
            _freeze(nodes[-1])
            await load.all_answered()
            assert load.longest < 5
    await executor.aclose(timeout=5)
