"""The seam of workers in serving: replicas and batches run on a host that gets pickled tasks."""

import threading

import pytest
import torch
from torch import Tensor, nn

from aiopar.serve import ReplicaPool
from tests.executor.hosts import HostExecutor


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
