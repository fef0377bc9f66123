"""`ReplicaPool` and `Batcher` on Ray actors: lost actors and nodes, other sizes and weights."""

import ctypes
import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import psutil
import pytest
import torch
from torch import Tensor, nn

from aiopar import Batcher, ReplicaPool
from aiopar.ray import RayExecutor
from tests.remote.test_ray import pids
from tests.remote.test_serving import Load, Scale, replaced, until

pytestmark = [pytest.mark.ray, pytest.mark.asyncio]


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
                began, load.longest = anyio.current_time(), 0.0
                os.kill(victim, signal.SIGKILL)
                await until(partial(replaced, victim, executor))
                await until(lambda: all_ready(pool))
                took = anyio.current_time() - began
                await load.all_answered(1)
                assert load.longest < took, "no call waits for the new actor"
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
            assert load.longest < 30, "Ray takes a minute to notice"
    await executor.aclose(timeout=5)


class HoldsTheGil(nn.Module):
    """Takes long to load, and holds the GIL meanwhile, as some imports do."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        ctypes.PyDLL(None).sleep(4)
        self.__dict__.update(state)

    def forward(self, x: Tensor) -> Tensor:
        return torch.full((len(x),), os.getpid())


async def test_an_actor_that_loads_a_model_is_not_lost(cluster: Any) -> None:
    async with RayExecutor(1) as executor:
        pid = await executor.run_sync(os.getpid)
        async with ReplicaPool(HoldsTheGil(), executor=executor, warmup=torch.ones(1)) as pool:
            assert (await pool(torch.ones(1))).tolist() == [pid]
