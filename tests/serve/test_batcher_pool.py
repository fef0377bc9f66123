"""`Batcher` over a `ReplicaPool`: a batch to each replica, and none lost with one."""

from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar.serve import Batcher
from aiopar.serve._replica import Replica
from aiopar.serve._runner import WorkerRunner
from aiopar.testing import Gate

from .batches import Callers, outcomes_of, until
from .replicas import (
    BadInput,
    Broken,
    Fragile,
    in_service,
    open_pool,
    poison,
    until as until_pool,
)

pytestmark = pytest.mark.anyio

GOOD, BAD = torch.ones(2), -torch.ones(2)
WARMUP = torch.ones(1, 2)


def same(outputs: list[Any], model: Fragile) -> bool:
    """Whether all are what the model has for `GOOD`."""
    with torch.no_grad():
        expected = model.linear(GOOD)
    return all(torch.allclose(output, expected) for output in outputs)


async def test_each_replica_has_a_batch_of_its_own() -> None:
    model, gate = Fragile(), Gate()
    async with (
        open_pool(model) as pool,
        Batcher(pool) as batcher,
        anyio.create_task_group() as tasks,
    ):
        with gate:
            model.on_call.append(gate)
            callers = Callers(batcher, tasks)
            for count in (1, 2):
                callers.call(GOOD + count)
                await gate.entered(count)
            await callers.queue(GOOD, GOOD + 3, GOOD + 4)
            assert batcher.stats().in_flight == 2
            assert [one.in_flight for one in pool.stats().replicas] == [1, 1]
            gate.let_on()
            await gate.entered(3)
            assert batcher.stats().in_flight == 1 + 3


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_concurrency_is_of_all_replicas_together(concurrency: int) -> None:
    model = Fragile()
    async with open_pool(model) as pool, Batcher(pool, concurrency=concurrency) as batcher:
        assert len(batcher._scheduler._runners) == concurrency
        assert same(await outcomes_of(batcher, [GOOD] * 50), model)


async def test_a_bad_item_is_no_replicas_fault() -> None:
    model = Fragile()
    async with open_pool(model, warmup=WARMUP) as pool, Batcher(pool) as batcher:
        outcomes = await outcomes_of(batcher, [GOOD, BAD, GOOD])
        error = outcomes.pop(1)
        assert isinstance(error, BadInput)
        assert any("in replica" in note for note in error.__notes__)
        assert same(outcomes, model)
        assert in_service(pool) == [0, 1]


def next_replica(batcher: Batcher) -> Replica:
    """The one that gets the next batch."""
    runner = batcher._scheduler._idle[-1]
    assert isinstance(runner, WorkerRunner)
    assert runner.replica is not None
    return runner.replica


async def test_a_batch_is_not_lost_with_its_replica() -> None:
    model = Fragile()
    async with open_pool(model, warmup=WARMUP) as pool, Batcher(pool) as batcher:
        for rebuilds in (1, 2):
            poison(next_replica(batcher))
            assert same(await outcomes_of(batcher, [GOOD] * 9), model)
            await until_pool(pool, lambda: in_service(pool) == [0, 1])
            assert sum(replica.rebuilds for replica in pool.stats().replicas) == rebuilds
            assert batcher.stats().in_flight == 0


async def test_with_no_replica_left_all_are_told_and_later_ones_served() -> None:
    model = Fragile()
    async with open_pool(model, warmup=WARMUP) as pool, Batcher(pool) as batcher:
        with Gate() as gate:  # the fresh copies wait in their warm-up
            for replica in pool.replicas:
                poison(replica)
            model.on_call.append(lambda: None if batcher.ready else gate())
            for outcome in await outcomes_of(batcher, [GOOD] * 40):
                assert isinstance(outcome, aiopar.ReplicaUnavailable | Broken)
            await until_pool(pool, lambda: in_service(pool) == [])
            assert not batcher.ready
            with pytest.raises(aiopar.ReplicaUnavailable, match="the last one failed with Broken"):
                await batcher(GOOD)
        await until_pool(pool, lambda: in_service(pool) == [0, 1])
        assert batcher.ready
        assert same(await outcomes_of(batcher, [GOOD] * 9), model)


async def test_replicas_that_break_again_and_again_under_load() -> None:
    """No item is lost: each gets its own answer."""
    model = Fragile()
    load, answered = True, 0

    async def client(number: int) -> None:
        nonlocal answered
        while load:
            item = torch.tensor([float(number), float(answered)])
            output = await batcher(item)
            with torch.no_grad():
                assert torch.allclose(output, model.linear(item), atol=1e-3)
            answered += 1

    async with open_pool(model, warmup=WARMUP) as pool, Batcher(pool, max_batch_size=8) as batcher:
        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(client, number)
            for turn in range(6):
                poison(pool.replicas[turn % 2])
                await until_pool(pool, lambda: len(in_service(pool)) < 2)
                await until_pool(pool, lambda: len(in_service(pool)) == 2)
            load = False
        assert answered > 100
        assert [replica.rebuilds for replica in pool.stats().replicas] == [3, 3]
        await until(lambda: not batcher._scheduler._busy)
        assert batcher.stats().queued == batcher.stats().in_flight == 0
        assert len(batcher._scheduler._idle) == 2
        assert batcher._scheduler._called == 0
