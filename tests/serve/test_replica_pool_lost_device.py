"""`ReplicaPool` when a device is lost: all its replicas are retired for good."""

import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.errors import ReplicaFailed
from aiopar.serve import ReplicaPool

from .replicas import CPUS, Fragile, Scale, X, open_pool, states, until

BAD = -X - 1
WARMUP = torch.zeros(1, 2)


def lose_device() -> None:
    raise torch.AcceleratorError("the device is lost")


class TestLostDevice:
    @pytest.mark.anyio
    async def test_all_its_replicas_are_retired_for_good(self) -> None:
        module = Fragile()
        async with open_pool(module, warmup=WARMUP) as pool:
            module.on_call.append(lose_device)
            with pytest.raises(aiopar.ReplicaUnavailable) as caught:
                await pool(X)
            assert type(caught.value.__cause__) is torch.AcceleratorError
            assert states(pool) == ["retired"] * 2
            assert (pool.ready, pool.alive) == (False, False)
            module.on_call.clear()
            with pytest.raises(aiopar.ReplicaUnavailable, match="0 rebuilding, 2 retired"):
                await pool(X)
            with pytest.raises(aiopar.ReplicaUnavailable, match="all are retired"):
                await pool.swap(Fragile())
        assert (states(pool), pool.alive) == (["retired"] * 2, False)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("moment", ["blaming", "rebuilding", "swap"])
    async def test_in_a_warmup(self, moment: str) -> None:
        module = Fragile()

        def lose_later() -> None:
            if module.calls[-1] is WARMUP:
                lose_device()

        async with open_pool(module, warmup=WARMUP) as pool:
            module.on_call.append(lose_later)
            if moment == "blaming":
                with pytest.raises(aiopar.ReplicaUnavailable):
                    await pool(BAD)
            elif moment == "rebuilding":
                replica = pool._replicas[0]
                pool._failed(replica, ReplicaFailed("seen by a batcher", replica.module))
                await until(pool, lambda: not pool.alive)
            else:
                with pytest.raises(torch.AcceleratorError):
                    await pool.swap(module)
            assert states(pool) == ["retired"] * 2

    @pytest.mark.asyncio
    async def test_when_it_is_opened_it_is_raised(self) -> None:
        module = Fragile()
        module.on_call.append(lose_device)
        with pytest.raises(torch.AcceleratorError):
            await ReplicaPool(module, CPUS, warmup=WARMUP)(X)

    @pytest.mark.sim
    @pytest.mark.anyio
    async def test_another_device_answers(self) -> None:
        lost: list[int] = []

        def lose(x: Tensor) -> None:
            if x.device.index in lost:
                lose_device()

        async with open_pool(Scale(2.0, lose), on=["sim:0", "sim:0", "sim:1"]) as pool:
            lost.append(0)
            first, _ = await pool(X)
            assert first.device == torch.device("sim:1")
            assert torch.equal(first.cpu(), 2 * X)
            assert states(pool) == ["retired", "retired", "ready"]
            assert (pool.ready, pool.alive) == (True, True)
            await pool.swap(Scale(3.0, lose))
            assert torch.equal((await pool(X))[0].cpu(), 3 * X)
            await pool.load_state_dict({"weight": torch.tensor(4.0), "twin": torch.tensor(4.0)})
            assert torch.equal((await pool(X))[0].cpu(), 4 * X)
            lost.append(1)
            with pytest.raises(aiopar.ReplicaUnavailable):
                await pool(X)
            assert (pool.ready, pool.alive) == (False, False)
