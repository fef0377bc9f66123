"""`ReplicaPool.swap` and `load_state_dict`: no answer is lost, late, or from mixed weights."""

import asyncio
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import ReplicaPool
from aiopar.testing import Gate
from tests.lost_loops import closed_under_tasks
from tests.workers import Workers

from .batches import on_asyncio, until
from .replicas import (
    BadInput,
    Broken,
    Fragile,
    Scale,
    X,
    answers_of_all,
    break_copy,
    held,
    in_service,
    is_idle,
    named,
    open_pool,
    states,
)

pytestmark = pytest.mark.anyio


Devices = tuple[torch.device, ...]

ON_RAY = True


def hold_rebuild(module: Fragile, gate: Gate) -> None:
    """Hold the first rebuild of two replicas at the gate, in its warm-up with one row."""
    copies = module.runs.fn.copies
    module.on_call.append(lambda x: len(x) == 1 and len(copies) == 3 and gate())


def weights(value: float) -> dict[str, Tensor]:
    return {"weight": torch.tensor(value), "twin": torch.tensor(value)}


def factor(answer: tuple[Tensor, Tensor]) -> float:
    """The weight that an answer comes from."""
    first, second = (float(part[0, 1]) for part in answer)
    assert first == second
    return first


async def test_answer_comes_wholly_from_old_or_wholly_from_new_weights(workers: Workers) -> None:
    gate = Gate()
    answers: dict[str, float] = {}

    async def call(name: str) -> None:
        answers[name] = factor(await pool(X))

    async with open_pool(Scale(1.0, lambda _: gate()), executor=workers, on=["cpu"]) as pool:
        async with held(gate) as tasks:
            tasks.start_soon(call, "held between its two halves")
            await gate.entered()
            tasks.start_soon(pool.load_state_dict, weights(2.0))
            await anyio.wait_all_tasks_blocked()
        await call("after")
    assert answers == {"held between its two halves": 1.0, "after": 2.0}


@pytest.mark.parametrize("verb", ["load_state_dict", "swap"])
async def test_no_answer_is_lost_or_late_under_load(workers: Workers, verb: str) -> None:
    latest = [0.0]
    answered = 0

    async def client() -> None:
        nonlocal answered
        while latest[0] < 4:
            at_least = latest[0]  # from the latest swap that ended before this call
            value = factor(await pool(X))
            assert value in range(1, 5)
            assert value >= at_least
            answered += 1

    async with open_pool(Scale(1.0), executor=workers, warmup=X) as pool:
        async with anyio.create_task_group() as tasks:
            for _ in range(64):
                tasks.start_soon(client)
            for value in (2.0, 3.0, 4.0):
                given: Any = weights(value) if verb == "load_state_dict" else Scale(value)
                await getattr(pool, verb)(given)
                latest[0] = value
        replicas = pool.stats().replicas
    assert sum(stats.completed for stats in replicas) == answered
    assert sum(stats.failed for stats in replicas) == 0
    assert sum(stats.in_flight for stats in replicas) == 0


@on_asyncio
async def test_every_replica_gets_the_new_weights(devices: Devices) -> None:
    module = Scale(1.0)
    async with ReplicaPool(module, devices, warmup=X) as pool:

        async def found(serving: Scale) -> list[tuple[str, float]]:
            answers = await answers_of_all(pool, serving, X)
            return sorted(
                (str(first.device), factor((first.cpu(), second.cpu())))
                for first, second in answers
            )

        await pool.swap(new := Scale(2.0).to(devices[-1]))
        assert await found(new) == sorted((str(device), 2.0) for device in devices)
        await pool.load_state_dict(weights(3.0))
        for _ in devices:
            first, second = await pool(X)
            assert factor((first.cpu(), second.cpu())) == 3.0


class TestLoadStateDict:
    async def test_state_dict_that_does_not_fit_changes_nothing(self, workers: Workers) -> None:
        module = Scale(1.0)
        async with open_pool(module, executor=workers) as pool:
            with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
                await pool.load_state_dict({"weight": torch.tensor(2.0)})
            assert factor(await pool(X)) == 1.0
            with pytest.raises(TypeError, match="expected a state_dict, got list"):
                await pool.load_state_dict([])  # type: ignore[arg-type]  # what is tested
            assert float(module.twin) == 1.0

    @on_asyncio
    async def test_keeps_the_current_weights_of_missing_keys_and_returns_the_keys(self) -> None:
        async with open_pool(Scale(1.0), inference_mode=False) as pool:
            await pool.swap(Scale(2.0))
            with torch.inference_mode():
                given = {"twin": torch.tensor(7.0), "more": X}
                load = pool.load_state_dict(given, strict=False)
            keys = await load
            assert (keys.missing_keys, keys.unexpected_keys) == (["weight"], ["more"])
            first, second = await pool(X)
            assert torch.equal(first, 2 * X)
            assert torch.equal(second, 7 * X)
            x = X.clone().requires_grad_()
            (await pool(x))[0].sum().backward()  # an error if the weights were inference tensors
            assert x.grad is not None
            assert torch.equal(x.grad, torch.full_like(X, 2.0))


class TestSwap:
    async def test_module_that_fails_the_warmup_is_not_put_in_place(self, workers: Workers) -> None:
        def fail(_: Tensor) -> None:
            raise BadInput("cold")

        async with open_pool(Scale(1.0), executor=workers, warmup=X) as pool:
            with pytest.raises(BadInput) as caught:
                await pool.swap(Scale(2.0, fail))
            assert caught.value.__notes__[-1] == f"in the warm-up of {named(pool, 0)}"
            assert factor(await pool(X)) == 1.0
            assert states(pool) == ["ready"] * 2
            await pool.swap(Scale(3.0))  # a later swap is not held up
            assert factor(await pool(X)) == 3.0

    async def test_wrong_modules_are_refused_at_once(self, workers: Workers) -> None:
        async with open_pool(Scale(1.0), executor=workers) as pool:
            with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got dict"):
                _ = pool.swap({})  # type: ignore[arg-type]  # what is tested
            with pytest.raises(ValueError, match="uninitialized parameters"):
                _ = pool.swap(nn.LazyLinear(2))

    async def test_concurrent_swaps_are_done_one_after_the_other(self, workers: Workers) -> None:
        warmed: list[float] = []
        gate = Gate()

        def module(value: float) -> Scale:
            return Scale(value, lambda _: warmed.append(gate(value)))

        async with open_pool(Scale(1.0), executor=workers, warmup=X) as pool:
            async with held(gate) as tasks:
                tasks.start_soon(pool.swap, module(2.0))
                await gate.entered()
                for value in (3.0, 4.0):
                    tasks.start_soon(pool.swap, module(value))
                    await anyio.wait_all_tasks_blocked()
            assert warmed == [2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
            warmed.clear()
            assert factor(await pool(X)) == 4.0

    async def test_swap_opens_the_pool_and_one_replica_serves_while_the_other_is_warmed_up(
        self, workers: Workers
    ) -> None:
        gate, pool = Gate(), ReplicaPool(Scale(1.0), executor=workers, warmup=X)
        await pool.swap(Scale(2.0))
        assert factor(await pool(X)) == 2.0
        async with pool:
            async with held(gate) as tasks:
                tasks.start_soon(pool.swap, Scale(3.0, lambda _: gate()))
                await gate.entered()
                assert factor(await pool(X)) == 2.0
            assert factor(await pool(X)) == 3.0

    async def test_swap_waits_for_a_rebuild(self, workers: Workers) -> None:
        gate, old, new = Gate(), Fragile(), Fragile()
        with torch.inference_mode():
            expected = new(X)
        async with open_pool(old, executor=workers, warmup=torch.zeros(1, 2)) as pool:
            with gate:
                break_copy(old, 0)
                hold_rebuild(old, gate)
                await pool(X)
                await gate.entered()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(pool.swap, new)
                    await anyio.wait_all_tasks_blocked()
                    assert in_service(pool) == [1]
                    gate.open()
            assert in_service(pool) == [0, 1]
            await until(lambda: is_idle(workers))  # also the worker that has rebuilt
            for answer in await answers_of_all(pool, new, X):
                assert torch.equal(answer, expected)

    @pytest.mark.parametrize("broken", [0, 1])
    async def test_replica_that_breaks_during_a_swap_gets_the_new_module(
        self, workers: Workers, broken: int
    ) -> None:
        gate, old, new = Gate(), Fragile(), Fragile()
        with torch.inference_mode():
            expected = new(X)
        new.on_call.append(gate)
        async with open_pool(old, executor=workers, warmup=torch.zeros(1, 2)) as pool:
            async with held(gate) as tasks:
                tasks.start_soon(pool.swap, new)
                await gate.entered()  # on one of the workers
                break_copy(old, broken)
                tasks.start_soon(pool, X)
                await anyio.wait_all_tasks_blocked()
            # A replica is in service a moment before its worker has ended the rebuild.
            await until(lambda: in_service(pool) == [0, 1] and is_idle(workers))
            for answer in await answers_of_all(pool, new, X):
                assert torch.equal(answer, expected)

    async def test_swap_brings_back_replicas_that_cannot_be_rebuilt(self, workers: Workers) -> None:
        broken = Fragile()

        def fail(_: Tensor) -> None:  # fresh copies fail too: a rebuild does not help
            raise Broken("for good")

        async with open_pool(broken, executor=workers, warmup=torch.zeros(1, 2)) as pool:
            broken.on_call.append(fail)
            with pytest.raises(Broken):  # on one replica, then on the other
                await pool(X)
            with pytest.raises(aiopar.ReplicaUnavailable):
                await pool(X)
            new = Fragile()
            await pool.swap(new)
            assert in_service(pool) == [0, 1]
            with torch.inference_mode():
                assert torch.equal(await pool(X), new(X))
            assert [stats.rebuilds for stats in pool.stats().replicas] == [0, 0]


class WithLock(Scale):
    """Has attributes that cannot be copied: a lock, and a tensor with a graph."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.lock = threading.Lock()
        self.doubled = self.weight * 2
        self.scales = [self]  # in a copy this refers to the copy

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with self.lock:
            return super(WithLock, self.scales[0]).forward(x)


async def test_attributes_that_cannot_be_copied_are_shared() -> None:
    module = WithLock(1.0)
    async with open_pool(nn.Sequential(module)) as pool:
        assert factor(await pool(X)) == 1
        await pool.load_state_dict({f"0.{name}": value for name, value in weights(2.0).items()})
        assert factor(await pool(X)) == 2
    assert module.weight == module.twin == 1


async def test_module_that_cannot_be_copied() -> None:
    module = Scale(1.0)
    module.twin = module.weight * 1  # a buffer: to share it would change the module
    async with open_pool(module) as pool:
        with pytest.raises(RuntimeError, match="deepcopy"):
            await pool.load_state_dict(weights(2.0))
        assert factor(await pool(X)) == 1


def test_swap_after_the_loop_was_closed_during_a_rebuild(workers: Workers) -> None:
    gate, old, new = Gate(), Fragile(), Scale(3.0)
    pool: ReplicaPool[Any] = ReplicaPool(old, executor=workers, warmup=torch.zeros(1, 2))

    async def break_replica() -> None:
        await pool(X)
        break_copy(old, 0)
        hold_rebuild(old, gate)
        await pool(X)
        await gate.entered()

    async def swap() -> None:
        with anyio.fail_after(30):
            await pool.swap(new)
            assert factor(await pool(X)) == 3.0
            await pool.aclose()

    with closed_under_tasks() as loop:
        loop.run_until_complete(break_replica())
    gate.open()
    asyncio.run(swap())
