"""A `ReplicaPool` frees weights that it does not serve with, and errors; without the collector."""

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

from .replicas import CPUS, Fragile, Scale, X, break_copy, open_pool, until

WARMUP = torch.zeros(1, 2)


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    with without_gc():
        yield


@pytest.mark.anyio
@pytest.mark.parametrize("end", ["closed", "dropped"])
async def test_pool_that_is_closed_or_dropped_frees_its_replicas(end: str) -> None:
    module = Scale(1.0)
    pool = ReplicaPool(module, CPUS, warmup=X)
    await pool(X)
    refs: list[weakref.ref[Any]] = [weakref.ref(module), *module.copies.refs()]
    assert len(refs) == 3
    del module
    if end == "closed":
        await pool.aclose()
        refs = refs[1:]  # it may be opened again
    else:
        del pool
    assert await survivors(refs) == []


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["swap", "load_state_dict"])
async def test_replaced_weights_are_freed(verb: str) -> None:
    module, new = Scale(1.0), Scale(2.0)
    refs: list[weakref.ref[Any]] = [weakref.ref(module)]
    copies = module.copies
    pool = ReplicaPool(module, CPUS, warmup=X)
    del module
    async with pool:
        refs += copies.refs()
        await (pool.swap(new) if verb == "swap" else pool.load_state_dict(new.state_dict()))
        await pool(X)
        assert await survivors(refs) == []


@pytest.mark.anyio
async def test_broken_replica_is_freed() -> None:
    module = Fragile()
    async with open_pool(module, warmup=WARMUP) as pool:
        break_copy(module, 0)
        await pool(X)
        assert await survivors(module.copies.refs()[:1]) == []
        await until(pool, lambda: pool.stats().replicas[0].rebuilds == 1)


class Failure(Exception):
    """An error that can be weakly referenced."""


@pytest.mark.anyio
@pytest.mark.parametrize(
    "fault", ["the input", "two replicas", "the only replica", "the warm-up", "the opening"]
)
async def test_pool_keeps_no_error(fault: str) -> None:
    failing = [False]
    refs: list[weakref.ref[Any]] = []

    def fail(_: Tensor) -> None:
        if failing[0]:
            failing[0] = fault != "the input"  # then the warm-up of the health check passes
            raise Failure

    async def call() -> None:
        try:
            await (pool.swap(Scale(2.0, fail)) if fault == "the warm-up" else pool(X))
        except (Failure, aiopar.ReplicaUnavailable) as error:
            refs.extend(weakref.ref(one) for one in (error, error.__cause__) if one is not None)

    devices = ["cpu"] if fault == "the only replica" else CPUS
    pool = ReplicaPool(Scale(1.0, fail), devices, warmup=WARMUP)
    if fault != "the opening":
        await pool.__aenter__()
    failing[0] = True
    async with anyio.create_task_group() as tasks:
        for _ in range(3 if fault == "the opening" else 1):
            tasks.start_soon(call)
    failing[0] = False
    assert len(refs) == {"the only replica": 2, "the opening": 3}.get(fault, 1)
    assert await survivors(refs) == []
    await pool.aclose()


@pytest.mark.sim
class TestOnAnAccelerator:
    @pytest.mark.asyncio
    async def test_replaced_weights_live_until_kernels_have_read_them(self) -> None:
        x, module, gate = torch.ones(2, device="sim:1"), Scale(2.0), Gate()
        warmed: list[torch.device] = []

        def hold_the_second(x: Tensor) -> None:
            warmed.append(x.device)
            if len(warmed) == 2:
                gate()

        async with (
            aiopar.DeviceExecutor(["sim:1", "sim:0"]) as executor,
            ReplicaPool(module, executor=executor, warmup=torch.ones(1)) as pool,
        ):
            old = module.copies.refs()[:1]
            stream = await executor.on(worker=0).run_sync(torch.accelerator.current_stream, "sim:1")
            with gate:
                swap = asyncio.ensure_future(pool.swap(Scale(3.0, hold_the_second)))
                await gate.entered()  # the copy on sim:1 is ready; the worker of sim:0 is held
                with simdevice.paused(stream):
                    late = asyncio.ensure_future(pool(x))
                    while not simdevice.pending_streams("sim:1"):
                        await anyio.lowlevel.checkpoint()
                    gate.open()
                    assert await survivors(old) == []
                    assert not late.done()
                first, second = await late
                await swap
            assert first.tolist() == second.tolist() == [2.0, 2.0]

    @pytest.mark.asyncio
    async def test_replicas_on_one_device_share_their_weights(self) -> None:
        module = Scale(2.0)
        devices = ["sim:0", "sim:0", "sim:1"]
        async with open_pool(module, on=devices, warmup=torch.ones(1)):
            copies = [module.copies[index] for index in range(3)]
            weights = [copied.weight.data_ptr() for copied in copies]
            twins = [copied.twin.data_ptr() for copied in copies]
        assert weights[0] == weights[1] != weights[2]
        assert len(set(twins)) == 3
