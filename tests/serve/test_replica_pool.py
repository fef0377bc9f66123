"""`ReplicaPool`: whole batches, each to the least loaded replica; opening it and closing it."""

import asyncio
import importlib
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import PoolStats, ReplicaPool
from aiopar.testing import Gate

from .replicas import CPUS, BadInput, Scale, X, in_service, module_of, open_pool, states

Devices = tuple[torch.device, ...]
CPU = torch.device("cpu")


class Where(nn.Module):
    """Tells what thread it runs in, when the gate lets it."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, _: object) -> str:
        self.gate()
        return threading.current_thread().name


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 4)

    def forward(self, batch: dict[str, Tensor], *, shift: list[Tensor]) -> dict[str, Any]:
        return {"y": self.linear(batch["x"]) + shift[0], "device": batch["x"].device}


class Broad(nn.Module):
    """Has statistics that a forward in training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result


async def call_all(pool: ReplicaPool, inputs: list[Any]) -> list[Any]:
    """The answers to calls made at the same time."""
    answers: list[Any] = [None] * len(inputs)

    async def call(index: int) -> None:
        answers[index] = await pool(inputs[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(inputs)):
            tasks.start_soon(call, index)
    return answers


class TestCalls:
    @pytest.mark.asyncio
    async def test_an_answer_is_the_modules(self, devices: Devices) -> None:
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

    @pytest.mark.asyncio
    async def test_each_replica_has_its_device_and_its_inputs_come_there(
        self, devices: Devices
    ) -> None:
        async with ReplicaPool(Structured(), devices) as pool:
            assert tuple(replica.device for replica in pool.replicas) == devices
            for replica in pool.replicas:
                assert module_of(replica, Structured).linear.weight.device == replica.device
                run = replica.executor.run_sync(
                    lambda forward: forward({"x": X}, shift=[torch.ones(4)]), replica.forward
                )
                assert (await run)["device"] == replica.device

    @pytest.mark.anyio
    async def test_a_batch_goes_whole_to_the_least_loaded_replica(self) -> None:
        gate = Gate()
        async with open_pool(Where(gate)) as pool:
            with gate:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(pool, "held")
                    await gate.entered()
                    tasks.start_soon(pool, "elsewhere")
                    await gate.entered(2)
                    loads = [stats.in_flight for stats in pool.stats().replicas]
                    gate.open()
            assert loads == [1, 1]
            names = {await pool("x") for _ in range(4)}
            assert names == {"aiopar-cpu-0"}

    @pytest.mark.anyio
    async def test_all_calls_of_a_replica_run_on_its_worker_one_at_a_time(self) -> None:
        running: list[int] = []
        most: list[int] = []

        def count(_: Tensor) -> None:
            running.append(0)
            most.append(len(running))
            running.pop()

        async with open_pool(Scale(2.0, count), on=["cpu"]) as pool:
            await call_all(pool, [X] * 32)
        assert most == [1] * 32

    @pytest.mark.asyncio
    async def test_a_users_error_keeps_its_type_and_names_the_replica(self) -> None:
        def fail(_: Tensor) -> None:
            raise BadInput("no")

        async with open_pool(Scale(2.0, fail)) as pool:
            with pytest.raises(BadInput) as caught:
                await pool(X)
            assert caught.value.__notes__ == ["in replica 0 on device cpu"]
            assert in_service(pool) == [0, 1]

    @pytest.mark.anyio
    async def test_cancelled_in_the_queue_it_is_dropped(self) -> None:
        gate = Gate()
        async with open_pool(Where(gate), on=["cpu"]) as pool:
            with gate:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(pool, "held")
                    await gate.entered()
                    with anyio.CancelScope() as scope:
                        async with anyio.create_task_group() as inner:
                            inner.start_soon(pool, "queued")
                            await anyio.wait_all_tasks_blocked()
                            scope.cancel()
                    assert pool.stats().replicas[0].in_flight == 1
                    gate.open()
            assert gate.count == 1
            assert pool.stats().replicas[0].completed == 1

    @pytest.mark.asyncio
    async def test_in_a_worker_a_model_may_wait_for_a_pool(self) -> None:
        async with ReplicaPool(Scale(2.0), CPUS) as pool:
            first, _ = await aiopar.run_sync(lambda: aiopar.wait(pool(X)))
            assert torch.equal(first, 2 * X)
        closed = ReplicaPool(Scale(2.0), CPUS)
        with pytest.raises(RuntimeError, match="open the pool in an event loop first"):
            await aiopar.run_sync(lambda: aiopar.wait(closed(X)))


_tag: ContextVar[str] = ContextVar("tag", default="none")


class TestCallersState:
    @pytest.mark.asyncio
    async def test_grad_mode_is_the_callers_without_inference_mode(self) -> None:
        x = X.clone().requires_grad_()
        async with ReplicaPool(Scale(2.0), CPUS, inference_mode=False) as pool:
            with torch.no_grad():
                quiet = pool(x)
            loud = pool(x)
            assert not (await quiet)[0].requires_grad
            first, _ = await loud
            assert first.requires_grad
            assert not first.is_inference()
            assert not module_of(pool.replicas[0], Scale).weight.requires_grad

    @pytest.mark.asyncio
    async def test_under_inference_mode_replicas_are_made_of_normal_tensors(self) -> None:
        with torch.inference_mode():
            first_use = ReplicaPool(Scale(2.0), CPUS, inference_mode=False)(X)
        assert (await first_use)[0].is_inference()
        pool = ReplicaPool(Scale(2.0), CPUS, inference_mode=False)
        with torch.inference_mode():
            first_use = pool(X)
        await first_use
        assert not module_of(pool.replicas[1], Scale).twin.is_inference()
        await pool.aclose()

    @pytest.mark.anyio
    async def test_it_is_captured_when_the_call_is_made(self) -> None:
        async with open_pool(Scale(2.0, lambda _: seen.append(_tag.get()))) as pool:
            seen: list[str] = []
            token = _tag.set("mine")
            call = pool(X)
            _tag.reset(token)
            await call
            assert seen == ["mine"]

    @pytest.mark.asyncio
    async def test_the_executor_is_that_of_who_opens(self) -> None:
        gate = Gate()
        gate.open()
        async with aiopar.DeviceExecutor(CPUS, thread_name_prefix="mine") as executor:
            pool = ReplicaPool(Where(gate), CPUS)
            with aiopar.use_executor(executor):
                call = pool("x")
            assert await call == "mine-cpu-0"
            await pool.aclose()
            assert await executor.run_sync(len, "ab") == 2


class TestBinding:
    @pytest.mark.asyncio
    async def test_the_default_executor_grows(self) -> None:
        pool = ReplicaPool(Scale(2.0), ["cpu"] * 5)
        assert (pool.devices, pool.replicas, pool.stats()) == ((CPU,) * 5, (), PoolStats(()))
        async with pool:
            assert len({replica.worker for replica in pool.replicas}) == 5
            assert [replica.index for replica in pool.replicas] == list(range(5))

    def test_an_executor_with_too_few_workers(self) -> None:
        with aiopar.DeviceExecutor(["cpu"]) as executor:
            with pytest.raises(ValueError, match=r"need 2 workers there.*the executor has 1"):
                ReplicaPool(Scale(2.0), CPUS, executor=executor)
            assert ReplicaPool(Scale(2.0), executor=executor).devices == (CPU,)

    @pytest.mark.asyncio
    async def test_a_current_executor_with_too_few_workers(self) -> None:
        with aiopar.DeviceExecutor(["cpu"]) as executor, aiopar.use_executor(executor):
            call = ReplicaPool(Scale(2.0), CPUS)(X)
        with pytest.raises(ValueError, match=r"need 2 workers there.*the executor has 1"):
            await call

    @pytest.mark.asyncio
    async def test_two_pools_on_one_executor_take_different_workers(self) -> None:
        async with (
            aiopar.DeviceExecutor(["cpu"] * 3) as executor,
            ReplicaPool(Scale(2.0), ["cpu"], executor=executor) as one,
            ReplicaPool(Scale(2.0), CPUS, executor=executor) as two,
        ):
            assert len({r.worker for pool in (one, two) for r in pool.replicas}) == 3

    @pytest.mark.parametrize(
        ("given", "error", "match"),
        [
            ({"module": len}, TypeError, "expected a torch.nn.Module"),
            ({"module": nn.LazyLinear(2)}, ValueError, "uninitialized parameters"),
            ({"devices": "cpu"}, TypeError, "sequence of devices"),
            ({"devices": []}, ValueError, "devices is empty"),
            ({"executor": 3}, TypeError, "executor must be a DeviceExecutor"),
            ({"max_failures": 0}, ValueError, "max_failures must be at least 1"),
            ({"max_failures": 1.5}, TypeError, "max_failures must be an int"),
        ],
        ids=str,
    )
    def test_bad_arguments(self, given: dict[str, Any], error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            ReplicaPool(**{"module": Scale(1.0), **given})


@pytest.fixture
def _dynamo() -> None:
    """Load Dynamo: from here on any module may compile."""
    importlib.import_module("torch._dynamo")


class TestOpening:
    @pytest.mark.anyio
    async def test_the_first_use_opens_and_others_wait_for_it(self) -> None:
        gate, warmed = Gate(), []

        def on_call(x: Tensor) -> None:
            if x is not X:
                warmed.append(gate(threading.current_thread().name))

        pool = ReplicaPool(Scale(2.0, on_call), CPUS, warmup=torch.zeros(1))
        assert (pool.ready, pool.alive) == (False, True)
        with gate:
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(pool, X)
                await gate.entered()
                await anyio.wait_all_tasks_blocked()
                assert not pool.ready
                gate.open()
        assert len(warmed) == len(set(warmed)) == 2
        assert pool.ready
        assert sum(stats.completed for stats in pool.stats().replicas) == 8
        await pool.aclose()

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("warmup", "expected"),
        [
            (None, []),
            (X, [(X,)]),
            ((X, 1), [(X, 1)]),
            ([X, (X, 2), "text"], [(X,), (X, 2), ("text",)]),
        ],
        ids=["none", "batch", "arguments", "several"],
    )
    async def test_every_replica_runs_the_warmup(self, warmup: Any, expected: list[Any]) -> None:
        class Record(nn.Module):
            seen: list[Any] = []  # noqa: RUF012  # one for all copies

            def forward(self, *inputs: Any) -> None:
                self.seen.append(inputs)

        async with ReplicaPool(Record(), CPUS, warmup=warmup):
            assert Record.seen == expected * 2

    @pytest.mark.anyio
    async def test_a_warmup_that_fails_is_raised_and_the_next_use_tries_again(self) -> None:
        failing = [True]

        def on_call(_: Tensor) -> None:
            if failing:
                raise BadInput("cold")

        pool = ReplicaPool(Scale(2.0, on_call), CPUS, warmup=X)
        with pytest.raises(BadInput) as caught:
            async with pool:
                pytest.fail("it is not open")
        assert caught.value.__notes__ == ["in the warm-up of replica 0 on device cpu"]
        assert (pool.ready, pool.replicas) == (False, ())
        failing.clear()
        assert torch.equal((await pool(X))[0], 2 * X)
        await pool.aclose()

    @pytest.mark.anyio
    async def test_who_gives_up_waiting_leaves_it_to_the_others(self) -> None:
        gate = Gate()
        pool = ReplicaPool(Scale(2.0, lambda _: gate()), CPUS, warmup=torch.zeros(1))
        answers: list[Any] = []

        async def call() -> None:
            answers.append(await pool(X))

        with gate:
            async with anyio.create_task_group() as tasks:
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as impatient:
                        impatient.start_soon(pool, X)
                        await gate.entered()
                        tasks.start_soon(call)
                        await anyio.wait_all_tasks_blocked()
                        scope.cancel()
                assert not answers
                gate.open()
        assert len(answers) == 1
        await pool.aclose()

    @pytest.mark.anyio
    async def test_a_cancelled_async_with_leaves_nothing_under_way(self) -> None:
        gate = Gate()
        pool = ReplicaPool(Scale(2.0, lambda _: gate()), CPUS, warmup=torch.zeros(1))

        async def enter() -> None:
            async with pool:
                pytest.fail("it is not open")

        with gate:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(enter)
                await gate.entered()
                tasks.cancel_scope.cancel()
            await anyio.wait_all_tasks_blocked()
        await pool._upkeep._running.ended()
        assert (gate.count, pool.replicas) == (1, ())
        gate.open()
        await pool(X)  # and may be opened after all
        await pool.aclose()

    @pytest.mark.anyio
    @pytest.mark.usefixtures("_dynamo")
    async def test_replicas_that_may_compile_are_warmed_up_one_at_a_time(self) -> None:
        gate, running, most, held = Gate(), [0], [], []

        def on_call(_: Tensor) -> None:
            held.append(threading.current_thread().name)
            running[0] += 1
            most.append(running[0])
            gate()
            running[0] -= 1

        with gate:
            async with (
                aiopar.DeviceExecutor(CPUS) as executor,
                anyio.create_task_group() as tasks,
            ):
                pools = [
                    ReplicaPool(Scale(2.0, on_call), ["cpu"], executor=executor, warmup=X)
                    for _ in range(2)
                ]
                for pool in pools:
                    tasks.start_soon(pool._open)
                await gate.entered()
                # The other one's worker waits for its turn, and hands its queue to another thread.
                other = executor.on(worker=int(held == ["aiopar-cpu-0"]))
                assert await other.run_sync(len, "ab") == 2
                gate.open()
        assert most == [1, 1]
        for pool in pools:
            await pool.aclose()


class TestClosing:
    @pytest.mark.anyio
    async def test_calls_in_flight_are_awaited_and_new_ones_refused(self) -> None:
        gate, answers = Gate(), []

        async def call(pool: ReplicaPool) -> None:
            answers.append(await pool("x"))

        async with open_pool(Where(gate), on=["cpu"]) as pool:
            with gate:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call, pool)
                    tasks.start_soon(call, pool)
                    await gate.entered()
                    tasks.start_soon(pool.aclose)
                    await anyio.wait_all_tasks_blocked()
                    assert (pool.ready, states(pool)) == (False, ["ready"])
                    with pytest.raises(aiopar.ServiceClosed):
                        await pool("late")
                    gate.open()
            assert len(answers) == 2
            assert (pool.ready, pool.alive, states(pool)) == (False, True, ["closed"])
            await pool.aclose()
            for verb in (pool(X), pool.swap(Scale(1.0)), pool.load_state_dict({})):
                with pytest.raises(aiopar.ServiceClosed):
                    await verb

    @pytest.mark.anyio
    @pytest.mark.parametrize("how", [{"timeout": 0}, {"drain": False}], ids=str)
    async def test_without_waiting(self, how: dict[str, Any]) -> None:
        gate, outcomes = Gate(), []

        async def call(pool: ReplicaPool, name: str) -> None:
            try:
                outcomes.append((name, await pool("x")))
            except aiopar.ServiceClosed:
                outcomes.append((name, "closed"))

        async with open_pool(Where(gate), on=["cpu"]) as pool:
            with gate:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call, pool, "running")
                    await gate.entered()
                    tasks.start_soon(call, pool, "queued")
                    await anyio.wait_all_tasks_blocked()
                    await pool.aclose(**how)
                    assert outcomes == []
                    assert pool.replicas[0].module is None
                    gate.open()
            assert dict(outcomes) == {"running": "aiopar-cpu-0", "queued": "closed"}

    @pytest.mark.anyio
    async def test_left_by_an_error_it_waits_for_nobody(self) -> None:
        gate, outcomes = Gate(), []

        async def call(pool: ReplicaPool) -> None:
            try:
                outcomes.append(await pool("x"))
            except aiopar.ServiceClosed:
                outcomes.append("closed")

        async def fail(pool: ReplicaPool, tasks: anyio.abc.TaskGroup) -> None:
            async with pool:
                tasks.start_soon(call, pool)
                await gate.entered()
                tasks.start_soon(call, pool)
                await anyio.wait_all_tasks_blocked()
                raise LookupError

        async with open_pool(Where(gate), on=["cpu"]) as pool:
            with gate:
                async with anyio.create_task_group() as tasks:
                    with pytest.raises(LookupError):
                        await fail(pool, tasks)
                    assert (outcomes, states(pool)) == ([], ["closed"])
                    gate.open()
        assert sorted(outcomes) == ["aiopar-cpu-0", "closed"]

    @pytest.mark.anyio
    async def test_while_it_is_being_opened(self) -> None:
        gate = Gate()
        pool = ReplicaPool(Scale(2.0, lambda _: gate()), CPUS, warmup=X)
        refused: list[str] = []

        async def call() -> None:
            try:
                await pool(X)
            except aiopar.ServiceClosed:
                refused.append("closed")

        with gate:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                tasks.start_soon(call)
                await gate.entered()
                tasks.start_soon(pool.aclose)
                await anyio.wait_all_tasks_blocked()
                gate.open()
        assert refused == ["closed"] * 2
        assert gate.count == 1

    @pytest.mark.asyncio
    async def test_one_that_was_never_opened(self) -> None:
        pool = ReplicaPool(Scale(2.0))
        await pool.aclose()
        with pytest.raises(aiopar.ServiceClosed):
            async with pool:
                pytest.fail("it is closed")


@pytest.mark.asyncio
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
    assert tuple(stats.device for stats in replicas) == devices
    assert {stats.state for stats in replicas} == {"ready"}
    assert sum(stats.completed for stats in replicas) == 1
    assert sum(stats.failed for stats in replicas) == 1
    assert {(stats.in_flight, stats.rebuilds) for stats in replicas} == {(0, 0)}
    assert sum(stats.busy_seconds for stats in replicas) > 0


@pytest.mark.asyncio
async def test_the_users_module_is_never_changed() -> None:
    module = Broad()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    async with ReplicaPool(module, CPUS) as pool:
        await call_all(pool, [X + 5] * 4)
        await pool.load_state_dict({name: tensor + 1 for name, tensor in before.items()})
        await call_all(pool, [X + 5] * 4)
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_loops_that_come_and_go() -> None:
    pool = ReplicaPool(Scale(2.0), CPUS)

    async def call() -> Tensor:
        first: Tensor = (await pool(X))[0]
        return first

    for run in (asyncio.run, asyncio.run):
        runner: Callable[..., Tensor] = run
        assert torch.equal(runner(call()), 2 * X)
    asyncio.run(pool.aclose())
