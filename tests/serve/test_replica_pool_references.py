"""Who keeps the weights of a `ReplicaPool`: nobody, once they are replaced or it is closed."""

import asyncio
import weakref
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.serve import ReplicaPool
from aiopar.testing import Gate
from tests import simdevice
from tests.freeing import survivors, without_gc

from .replicas import CPUS, Fragile, Scale, X, module_of, open_pool, poison, until

WARMUP = torch.zeros(1, 2)


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    with without_gc():
        yield


def watched(pool: ReplicaPool, *others: object) -> list[weakref.ref[Any]]:
    """All modules of the pool."""
    modules = [pool._set.module, *(replica.module for replica in pool._replicas)]
    return [weakref.ref(module) for module in (*modules, *others)]


@pytest.mark.anyio
async def test_a_closed_pool_has_let_go() -> None:
    pool = ReplicaPool(Scale(1.0), CPUS, warmup=X)
    async with pool:
        refs = watched(pool)
        await pool(X)
    assert await survivors(refs) == []


@pytest.mark.anyio
async def test_a_pool_that_is_dropped_unclosed_has_let_go() -> None:
    pool = ReplicaPool(Scale(1.0), CPUS, warmup=X)
    await pool(X)
    refs = watched(pool, pool)
    del pool
    assert await survivors(refs) == []


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["swap", "load_state_dict"])
async def test_replaced_weights_are_let_go(verb: str) -> None:
    async with open_pool(Scale(1.0), warmup=X) as pool:
        refs = watched(pool)
        new = Scale(2.0)
        await (pool.swap(new) if verb == "swap" else pool.load_state_dict(new.state_dict()))
        await pool(X)
        assert await survivors(refs) == []


@pytest.mark.anyio
async def test_what_has_failed_is_let_go() -> None:
    async with open_pool(Fragile(), warmup=WARMUP) as pool:
        refs = watched(pool)[1:2]  # the one that breaks
        poison(pool._replicas[0])
        await pool(X)
        assert await survivors(refs) == []
        await until(pool, lambda: pool._replicas[0].rebuilds == 1)


class Failure(Exception):
    """Can be weakly referenced."""


@pytest.mark.anyio
@pytest.mark.parametrize("blamed", ["the input", "two replicas", "the only replica", "the warm-up"])
async def test_an_error_goes_with_who_caught_it(blamed: str) -> None:
    failing = [False]

    def fail(_: Tensor) -> None:
        if failing[0]:
            failing[0] = blamed != "the input"  # the warm-up of who is to be blamed passes
            raise Failure

    devices = ["cpu"] if blamed == "the only replica" else CPUS
    async with open_pool(Scale(1.0, fail), on=devices, warmup=WARMUP) as pool:
        failing[0] = True
        refs: list[weakref.ref[Any]] = []
        try:
            await (pool.swap(Scale(2.0, fail)) if blamed == "the warm-up" else pool(X))
        except (Failure, aiopar.ReplicaUnavailable) as error:
            refs += [weakref.ref(one) for one in (error, error.__cause__) if one is not None]
        failing[0] = False
        assert len(refs) == 1 + (blamed == "the only replica")
        assert await survivors(refs) == []


@pytest.mark.anyio
async def test_an_error_of_opening_goes_with_who_caught_it() -> None:
    def fail(_: Tensor) -> None:
        raise Failure

    pool = ReplicaPool(Scale(1.0, fail), CPUS, warmup=X)
    refs: list[weakref.ref[Any]] = []

    async def call() -> None:
        try:
            await pool(X)
        except Failure as error:
            refs.append(weakref.ref(error))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(call)
    assert len(refs) == 3
    assert await survivors(refs) == []
    await pool.aclose()


@pytest.mark.sim
class TestOnAnAccelerator:
    @pytest.mark.asyncio
    async def test_weights_that_are_replaced_live_until_kernels_have_read_them(self) -> None:
        x = torch.ones(2, device="sim:1")
        gate, warmed = Gate(), []

        def hold_the_last(_: Tensor) -> None:
            warmed.append(0)
            if len(warmed) == 3:
                gate()

        async with open_pool(
            Scale(2.0), on=["sim:0", "sim:1", "sim:0"], warmup=torch.ones(1)
        ) as pool:
            replica = pool._replicas[1]
            old = weakref.ref(module_of(replica, Scale))
            stream = replica.worker.stream  # type: ignore[attr-defined]  # it is a thread's
            with gate:
                swap = asyncio.ensure_future(pool.swap(Scale(3.0, hold_the_last)))
                await gate.entered()  # replica 1 is ready for the new ones
                with simdevice.paused(stream):
                    late = asyncio.ensure_future(replica.executor.run_sync(replica.forward, x))
                    while not simdevice.pending_streams("sim:1"):
                        await anyio.lowlevel.checkpoint()
                    gate.open()
                    assert await survivors([old]) == []
                    assert not late.done()
                first, second = await late
                await swap
            assert first.tolist() == second.tolist() == [2.0, 2.0]

    @pytest.mark.asyncio
    async def test_replicas_on_one_device_share_their_weights(self) -> None:
        async with open_pool(Scale(2.0), on=["sim:0", "sim:0", "sim:1"]) as pool:
            modules = [module_of(replica, Scale) for replica in pool._replicas]
            weights = [module.weight.data_ptr() for module in modules]
            twins = [module.twin.data_ptr() for module in modules]
        assert weights[0] == weights[1] != weights[2]
        assert len(set(twins)) == 3
