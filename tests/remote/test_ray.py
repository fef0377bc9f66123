"""`RayExecutor`: calls in Ray actors."""

import math
import os
from collections.abc import Iterator

import pytest
import torch

from aiopar.ray import RayExecutor

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def executor(cluster: object) -> Iterator[RayExecutor]:
    """Two actors, for all tests that leave them alive."""
    with RayExecutor(2) as executor:
        yield executor


@pytest.mark.anyio
async def test_calls_run_in_the_actors(executor: RayExecutor) -> None:
    assert await executor.run_sync(math.factorial, 5) == 120
    assert (await executor.submit(torch.add, torch.ones(2), 1, alpha=2)).tolist() == [3.0, 3.0]
    assert await executor.run_sync(lambda x: x * 2, torch.ones(1)) == 2
    pid = await executor.run_sync(os.getpid)
    hosts = [stats.host for stats in executor.stats().workers]
    assert pid in {host.pid for host in hosts if host is not None}
    assert os.getpid() != pid


def test_map_runs_its_calls_in_the_actors(executor: RayExecutor) -> None:
    assert list(executor.map(lambda x: x**2, range(5))) == [0, 1, 4, 9, 16]
