"""Opening a `ReplicaPool`: the workers that it takes, and the warm-up of its replicas."""

import importlib
import threading
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import PoolStats, ReplicaPool
from aiopar.testing import Gate

from .replicas import CPUS, BadInput, Scale, X

CPU = torch.device("cpu")


class TestBinding:
    @pytest.mark.asyncio
    async def test_the_default_executor_grows(self) -> None:
        pool = ReplicaPool(Scale(2.0), ["cpu"] * 5)
        assert (pool.devices, pool._replicas, pool.stats()) == ((CPU,) * 5, (), PoolStats(()))
        async with pool:
            assert len({replica.worker for replica in pool._replicas}) == 5
            assert [replica.index for replica in pool._replicas] == list(range(5))

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
            assert len({r.worker for pool in (one, two) for r in pool._replicas}) == 3

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
        assert (pool.ready, pool._replicas) == (False, ())
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
        assert (gate.count, pool._replicas) == (1, ())
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
