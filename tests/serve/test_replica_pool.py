"""`ReplicaPool`: calls, the caller's state, statistics."""

import asyncio
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import ReplicaPool
from aiopar.testing import Gate
from tests.home import places
from tests.lost_loops import closed_under_tasks
from tests.nn.sample_modules import WithAttributes
from tests.workers import Workers

from .batches import on_asyncio, outcomes_of
from .replicas import CPUS, BadInput, Scale, Where, X, held, in_service, named, open_pool

pytestmark = pytest.mark.anyio


Devices = tuple[torch.device, ...]
ON_RAY = True


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 4)

    def forward(self, batch: dict[str, Tensor], *, shift: list[Tensor]) -> dict[str, Any]:
        return {"y": self.linear(batch["x"]) + shift[0], "device": batch["x"].device}


def refuse(_: Tensor) -> None:
    raise BadInput("no")


class Modes(nn.Module):
    """Returns the modes that it runs under."""

    def forward(self, _: Tensor) -> tuple[bool, bool, bool]:
        return (
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
        )


class Statistical(nn.Module):
    """A module whose forward in training writes statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result


class TestCalls:
    @on_asyncio
    async def test_answer_is_that_of_the_module(self, devices: Devices) -> None:
        module = Structured()
        with torch.inference_mode():
            expected = module({"x": X}, shift=[torch.ones(4)])["y"]
        async with ReplicaPool(module, devices) as pool:
            for _ in range(4):
                answer = await pool({"x": X}, shift=[torch.ones(4)])
                assert answer["device"] == answer["y"].device
                assert answer["y"].device in devices
                assert torch.allclose(answer["y"].cpu(), expected, atol=1e-6)
                assert answer["y"].is_inference()

    async def test_arguments_and_answer_may_be_nested(self, workers: Workers) -> None:
        module = Structured()
        async with open_pool(module, executor=workers) as pool:
            answer = await pool({"x": X}, shift=[torch.ones(4)])
        assert torch.equal(answer["y"], module({"x": X}, shift=[torch.ones(4)])["y"])
        assert answer["device"] == torch.device("cpu")

    @on_asyncio
    async def test_parameters_are_parameters_with_their_attributes(self, workers: Workers) -> None:
        async with open_pool(WithAttributes(), executor=workers) as pool:
            assert await pool() == [True, True, True, False]
            await pool.load_state_dict(WithAttributes().state_dict())
            assert await pool() == [True, True, True, False]

    async def test_batch_goes_whole_to_the_least_loaded_replica(self, workers: Workers) -> None:
        gate = Gate()
        async with open_pool(Where(gate), executor=workers) as pool:
            async with held(gate) as tasks:
                tasks.start_soon(pool, "held")
                await gate.entered()
                tasks.start_soon(pool, "elsewhere")
                await gate.entered(2)
                loads = [stats.in_flight for stats in pool.stats().replicas]
            assert loads == [1, 1]
            assert len({await pool("x") for _ in range(4)}) == 1

    async def test_replica_runs_one_call_at_a_time(self, workers: Workers) -> None:
        running: list[int] = []
        most: list[int] = []

        def count(_: Tensor) -> None:
            running.append(0)
            most.append(len(running))
            running.pop()

        async with open_pool(Scale(2.0, count), on=["cpu"], executor=workers) as pool:
            await outcomes_of(pool, [X] * 32)
        assert most == [1] * 32

    async def test_error_of_the_module_keeps_its_type_and_names_the_replica(
        self, workers: Workers
    ) -> None:
        async with open_pool(Scale(2.0, refuse), executor=workers) as pool:
            with pytest.raises(BadInput, match="no") as caught:
                await pool(X)
            assert caught.value.__notes__[-1] == f"in {named(pool, 0)}"
            assert in_service(pool) == [0, 1]

    async def test_call_that_is_cancelled_in_the_queue_is_dropped(self, workers: Workers) -> None:
        gate = Gate()
        async with open_pool(Where(gate), on=["cpu"], executor=workers) as pool:
            async with held(gate) as tasks:
                tasks.start_soon(pool, "held")
                await gate.entered()
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as inner:
                        inner.start_soon(pool, "queued")
                        await anyio.wait_all_tasks_blocked()
                        scope.cancel()
                assert pool.stats().replicas[0].in_flight == 1
            assert gate.count == 1
            assert pool.stats().replicas[0].completed == 1

    @on_asyncio
    async def test_function_on_a_worker_may_wait_for_an_open_pool(self) -> None:
        async with ReplicaPool(Scale(2.0), CPUS) as pool:
            first, _ = await aiopar.run_sync(lambda: aiopar.wait(pool(X)))
            assert torch.equal(first, 2 * X)
        closed = ReplicaPool(Scale(2.0), CPUS)
        with pytest.raises(RuntimeError, match="open the pool in an event loop first"):
            await aiopar.run_sync(lambda: aiopar.wait(closed(X)))


class TestCallersState:
    @on_asyncio
    async def test_grad_mode_is_the_callers_without_inference_mode(self) -> None:
        x, module = X.clone().requires_grad_(), Scale(2.0)
        async with ReplicaPool(module, CPUS, inference_mode=False) as pool:
            with torch.no_grad():
                quiet = pool(x)
            loud = pool(x)
            assert not (await quiet)[0].requires_grad
            first, _ = await loud
            assert first.requires_grad
            assert not first.is_inference()
            assert not module.copies[0].weight.requires_grad

    @on_asyncio
    async def test_replicas_made_under_inference_mode_have_normal_tensors(self) -> None:
        with torch.inference_mode():
            first_use = ReplicaPool(Scale(2.0), CPUS, inference_mode=False)(X)
        assert (await first_use)[0].is_inference()
        module = Scale(2.0)
        pool = ReplicaPool(module, CPUS, inference_mode=False, warmup=X)
        with torch.inference_mode():
            first_use = pool(X)
        await first_use
        assert not module.copies[1].twin.is_inference()
        await pool.aclose()

    async def test_executor_is_the_current_one_of_the_first_use(self, workers: Workers) -> None:
        gate = Gate()
        gate.open()
        pool = ReplicaPool(Where(gate), CPUS)
        with aiopar.use_executor(workers):
            call = pool("x")
        assert await call in await places(workers)
        await pool.aclose()
        assert await workers.run_sync(len, "ab") == 2

    @pytest.mark.parametrize("inference_mode", [True, False])
    async def test_modes_are_those_of_the_call(
        self, workers: Workers, inference_mode: bool
    ) -> None:
        async with open_pool(Modes(), executor=workers, inference_mode=inference_mode) as pool:
            with torch.no_grad(), torch.autocast("cpu"):
                call = pool(X)
            assert await call == (inference_mode, False, True)
            assert await pool(X) == (inference_mode, not inference_mode, False)


@on_asyncio
async def test_stats(devices: Devices) -> None:
    def fail(x: Tensor) -> None:
        if x.ndim == 1:
            raise BadInput("a vector")

    async with ReplicaPool(Scale(2.0, fail), devices) as pool:
        await pool(X)
        with pytest.raises(BadInput):
            await pool(torch.zeros(2))
        replicas = pool.stats().replicas
    assert [stats.index for stats in replicas] == list(range(len(devices)))
    assert [stats.device for stats in replicas] == list(map(str, devices))
    assert {stats.state for stats in replicas} == {"ready"}
    assert sum(stats.completed for stats in replicas) == 1
    assert sum(stats.failed for stats in replicas) == 1
    assert {(stats.in_flight, stats.rebuilds) for stats in replicas} == {(0, 0)}
    assert sum(stats.busy_seconds for stats in replicas) > 0


async def test_module_of_the_user_is_never_changed(workers: Workers) -> None:
    module = Statistical()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    async with open_pool(module, executor=workers) as pool:
        torch.stack(await outcomes_of(pool, [X + 5] * 4))
        await pool.load_state_dict({name: tensor + 1 for name, tensor in before.items()})
        torch.stack(await outcomes_of(pool, [X + 5] * 4))
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("opened_again", [True, False])
def test_loop_that_is_closed_while_it_opens_the_pool(opened_again: bool) -> None:
    gate = Gate()
    module = Scale(2.0)
    module.register_forward_pre_hook(lambda *_: gate())
    pool = ReplicaPool(module, CPUS, warmup=X)

    async def main() -> None:
        with anyio.fail_after(30):
            if opened_again:
                assert torch.equal((await pool(X))[0], 2 * X)
                assert torch.equal((await waits)[0], 2 * X)
            await pool.aclose(drain=False)
            if not opened_again:
                with pytest.raises(aiopar.ServiceClosed):
                    await waits

    with asyncio.Runner() as other:
        with closed_under_tasks() as loop:
            call = loop.create_task(pool(X))
            loop.run_until_complete(gate.entered())
            waits = other.get_loop().create_task(pool(X))
            other.run(asyncio.sleep(0))
        gate.open()
        other.run(main())
    assert not call.done()
