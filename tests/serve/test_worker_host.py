"""The seam of workers in serving: replicas and batches run on a host that gets pickled tasks."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import Batcher, ReplicaPool
from tests.executor.hosts import HostExecutor

from .batches import outcomes_of


class Doubling(nn.Module):
    """Returns its input times a parameter, and the name of the thread."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, *, plus: float = 0.0) -> tuple[Tensor, str]:
        if x.ndim == 0:
            raise KeyError("of the module")
        return x * self.factor + plus, threading.current_thread().name


@pytest.mark.anyio
async def test_modules_of_a_pool_run_on_the_hosts() -> None:
    async with (
        HostExecutor(["cpu", "cpu"]) as executor,
        ReplicaPool(Doubling(), executor=executor, warmup=torch.ones(1)) as pool,
    ):
        output, name = await pool(torch.ones(2), plus=1.0)
        assert output.tolist() == [3.0, 3.0]
        assert name in {"hosted-cpu-0-host", "hosted-cpu-1-host"}
        await pool.load_state_dict({"factor": torch.tensor(5.0)})
        output, _ = await pool(torch.ones(1))
        assert output.tolist() == [5.0]
        with pytest.raises(KeyError, match="of the module") as caught:
            await pool(torch.tensor(1.0))
        assert caught.value.__notes__ == ["in replica 0 on device cpu"]


def double(batch: Tensor) -> list[tuple[float, str]]:
    if batch.isnan().any():
        raise KeyError("of the function")
    return [(x.item() * 2, threading.current_thread().name) for x in batch]


def count_down(batch: Tensor) -> Iterator[Tensor]:
    yield batch


@pytest.mark.anyio
async def test_batches_run_on_the_hosts() -> None:
    names = {"hosted-cpu-0-host", "hosted-cpu-1-host"}
    async with HostExecutor(["cpu", "cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(double, max_batch_size=3, max_queue_delay=1000) as batcher:
                good, bad, other = await outcomes_of(
                    batcher, [torch.tensor(1.0), torch.tensor(torch.nan), torch.tensor(2.0)]
                )
    assert good[0] == 2
    assert other[0] == 4
    assert {good[1], other[1]} <= names
    assert isinstance(bad, KeyError)


@pytest.mark.anyio
async def test_a_pool_batches_on_the_hosts() -> None:
    async with (
        HostExecutor(["cpu", "cpu"]) as executor,
        ReplicaPool(Doubling(), executor=executor) as pool,
        Batcher(pool) as batcher,
    ):
        output, _ = await batcher(torch.ones(2))
    assert output.tolist() == [2.0, 2.0]


@pytest.mark.anyio
async def test_generators_are_refused_before_they_run() -> None:
    async with HostExecutor(["cpu"]) as executor:
        refused = pytest.raises(NotImplementedError, match="generator function needs the capab")
        with aiopar.use_executor(executor), refused:
            await anext(Batcher(count_down).stream(torch.ones(1)))
