"""`Batcher` over a `ReplicaPool`: a batch to each replica, and none lost with one."""

import operator
from collections import UserDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import Batcher, BatchInfo, BatchObserver, collate
from aiopar.testing import Gate
from tests.home import AtHome
from tests.workers import Workers

from .batches import Callers, outcomes_of, until
from .replicas import BadInput, Fragile, Scale, break_copy, in_service, open_pool

pytestmark = pytest.mark.anyio

GOOD, BAD = torch.ones(2), -torch.ones(2)
WARMUP = torch.ones(1, 2)

ON_RAY = True


def same(outputs: list[Any], model: Fragile) -> bool:
    """Whether all answers are those of the model for `GOOD`."""
    with torch.no_grad():
        expected = model.linear(GOOD)
    return all(torch.allclose(output, expected) for output in outputs)


@pytest.mark.parametrize("concurrency", [1, None, 4])
async def test_each_replica_has_a_batch_of_its_own_within_concurrency(
    workers: Workers, concurrency: int | None
) -> None:
    model, gate, most = Fragile(), Gate(), 2 if concurrency is None else min(concurrency, 2)
    async with (
        open_pool(model, executor=workers) as pool,
        Batcher(pool, concurrency=concurrency) as batcher,
        anyio.create_task_group() as tasks,
    ):
        with gate:
            model.on_call.append(gate)
            callers = Callers(batcher, tasks)
            for count in range(1, most + 1):
                callers.call(GOOD + count)
                await gate.entered(count)
            await callers.queue(GOOD, GOOD + 3, GOOD + 4)
            assert batcher.stats().in_flight == most
            assert [one.in_flight for one in pool.stats().replicas].count(1) == most
            gate.let_on()
            await gate.entered(most + 1)
            await until(lambda: batcher.stats().in_flight == most - 1 + 3)


@pytest.mark.parametrize("concurrency", [2, 4])
@pytest.mark.parametrize("busy", [0, 1])
async def test_a_free_replica_gets_the_batch(workers: Workers, busy: int, concurrency: int) -> None:
    with Gate() as gate, Gate() as other:
        async with (
            open_pool(Scale(2.0), executor=workers) as pool,
            Batcher(pool, concurrency=concurrency) as batcher,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(workers.on(worker=busy).run_sync, AtHome(gate))
            await gate.entered()
            assert torch.equal((await batcher(GOOD))[0], 2 * GOOD)
            # No replica is free: the first that becomes free takes the batch.
            tasks.start_soon(workers.on(worker=1 - busy).run_sync, AtHome(other))
            await other.entered()
            callers = Callers(batcher, tasks)
            await callers.queue(GOOD)
            other.open()
            await until(lambda: GOOD in callers.outcomes)
            gate.open()


async def test_two_batchers_use_both_replicas(workers: Workers) -> None:
    model, gate = Scale(2.0), Gate()
    async with (
        open_pool(model, executor=workers) as pool,
        Batcher(pool) as first,
        Batcher(pool) as second,
        anyio.create_task_group() as tasks,
    ):
        with gate:
            model.on_call.append(lambda _: gate())
            tasks.start_soon(first, GOOD)
            await gate.entered()
            tasks.start_soon(second, GOOD)
            await gate.entered(2)
            assert [one.in_flight for one in pool.stats().replicas] == [1, 1]


async def test_a_bad_item_is_no_replicas_fault(workers: Workers) -> None:
    model = Fragile()
    async with open_pool(model, executor=workers, warmup=WARMUP) as pool, Batcher(pool) as batcher:
        outcomes = await outcomes_of(batcher, [GOOD, BAD, GOOD])
        error = outcomes.pop(1)
        assert isinstance(error, BadInput)
        assert any("in replica" in note for note in error.__notes__)
        assert same(outcomes, model)
        assert in_service(pool) == [0, 1]


async def test_with_no_replica_left_all_are_told_and_later_ones_served(workers: Workers) -> None:
    model, gate = Fragile(), Gate()
    async with (
        open_pool(model, executor=workers, on=["cpu"], warmup=WARMUP) as pool,
        Batcher(pool) as batcher,
    ):
        break_copy(model, 0)
        model.on_call.append(lambda _: pool.ready or gate())
        with gate:  # the fresh copy waits in its warm-up
            for outcome in await outcomes_of(batcher, [GOOD] * 40):
                assert isinstance(outcome, aiopar.ReplicaUnavailable)
                assert "the last one failed with Broken: the weights" in str(outcome)
            assert not batcher.ready
            with pytest.raises(aiopar.ReplicaUnavailable):
                await batcher(GOOD)
            assert batcher.stats().refused["unavailable"] >= 1
        await until(lambda: in_service(pool) == [0])
        assert batcher.ready
        assert same(await outcomes_of(batcher, [GOOD] * 9), model)


async def test_an_item_that_has_not_run_on_its_second_replica_is_not_failed_by_it(
    workers: Workers,
) -> None:
    broken = [False]

    def check(_: torch.Tensor) -> None:
        if broken[0]:
            raise BadInput("broken")

    async with open_pool(Scale(1.0, check), executor=workers, warmup=WARMUP) as pool:
        runs: list[int] = []

        class Break(BatchObserver):
            def compute(self, batch: BatchInfo, size: int) -> None:
                runs.append(size)
                broken[0] = True  # the first replica fails, and its rebuilds
                if len(runs) == 2:
                    with pytest.raises(aiopar.ReplicaUnavailable):
                        aiopar.wait(pool(WARMUP))  # runs here: the second replica fails

        async with Batcher(pool) as batcher:
            batcher.add_observer(Break())
            with pytest.raises(
                aiopar.ReplicaUnavailable, match="the last one failed with BadInput"
            ):
                await batcher(GOOD)
        assert runs == [1, 1]


async def test_replicas_that_break_again_and_again_under_load(workers: Workers) -> None:
    """No item is lost: each gets its own answer."""
    model = Fragile()
    answered, load = [0] * 30, True

    def rebuilds() -> list[int]:
        return [replica.rebuilds for replica in pool.stats().replicas]

    async def client(number: int) -> None:
        while load:
            item = torch.tensor([float(number), float(answered[number])])
            output = await batcher(item)
            with torch.no_grad():
                assert torch.allclose(output, model.linear(item), atol=1e-3)
            answered[number] += 1

    async def break_once(turn: int) -> None:
        # An item is tried on two replicas: both must not be broken when it comes.
        before = answered.copy()
        await until(lambda: all(map(operator.gt, answered, before)))
        break_copy(model, turn)  # of replica turn % 2: each rebuild makes one more copy
        await until(lambda: sum(rebuilds()) > turn)

    async with (
        open_pool(model, executor=workers, warmup=WARMUP) as pool,
        Batcher(pool, max_batch_size=8) as batcher,
    ):
        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(client, number)
            for turn in range(6):
                await break_once(turn)
            load = False
        assert rebuilds() == [3, 3]
        await until(lambda: not batcher.stats().in_flight)
        assert (batcher.stats().queued, batcher.stats().answered) == (0, sum(answered))


# Batches that are mappings.


class Named(nn.Module):
    """Takes its tensors by name; returns a dict."""

    def forward(self, *, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"sums": (ids * mask).sum(1)}


NAMED = {"ids": torch.tensor([1, 2, 3]), "mask": torch.tensor([1, 1, 0])}
BATCH = {name: tensor.unsqueeze(0) for name, tensor in NAMED.items()}


def to_user_dict(items: list[Any]) -> UserDict[str, Tensor]:
    return UserDict(collate(items))


def to_proxy(items: list[Any]) -> Mapping[str, Tensor]:
    return MappingProxyType(collate(items))


@pytest.mark.parametrize("collate_fn", [collate, to_user_dict, to_proxy])
@pytest.mark.parametrize("warmup", [BATCH, UserDict(BATCH), [BATCH, BATCH], None])
async def test_a_mapping_becomes_keyword_arguments(
    workers: Workers, collate_fn: Callable[[list[Any]], Any], warmup: Any
) -> None:
    async with (
        open_pool(Named(), executor=workers, warmup=warmup) as pool,
        Batcher(pool, collate_fn=collate_fn) as batcher,
    ):
        assert await outcomes_of(batcher, [NAMED] * 3) == [{"sums": torch.tensor(3)}] * 3
