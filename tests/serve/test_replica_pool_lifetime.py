"""The lifetime of a `ReplicaPool`: workers, opening with warm-up, closing."""

import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import Batcher, PoolStats, ReplicaPool
from aiopar.testing import Gate
from tests.home import AtHome, labels, places
from tests.programs import run
from tests.workers import MakeWorkers, Workers

from .batches import on_asyncio
from .replicas import CPUS, RUNNERS, BadInput, Scale, Where, X, held, open_pool, states

pytestmark = pytest.mark.anyio


CPU = torch.device("cpu")


async def _places(gate: Gate, *pools: ReplicaPool[Any]) -> set[Any]:
    """The places in which the replicas of these pools run, all at the same time."""
    names: set[Any] = set()

    async def call(pool: ReplicaPool[Any]) -> None:
        names.add(await pool("x"))

    async with held(gate) as tasks:
        for pool in pools:
            for _ in pool.devices:
                tasks.start_soon(call, pool)
        await gate.entered(sum(len(pool.devices) for pool in pools))
    return names


class TestWorkers:
    @on_asyncio
    async def test_default_executor_grows(self) -> None:
        gate = Gate()
        pool = ReplicaPool(Where(gate), ["cpu"] * 5)
        assert (pool.devices, pool.stats()) == ((CPU,) * 5, PoolStats(()))
        async with pool:
            assert [stats.index for stats in pool.stats().replicas] == list(range(5))
            assert len(await _places(gate, pool)) == 5

    @on_asyncio
    async def test_executor_with_too_few_workers(self) -> None:
        too_few = pytest.raises(ValueError, match=r"need 2 workers there.*the executor has 1")
        with aiopar.DeviceExecutor(["cpu"]) as executor:
            with too_few:
                ReplicaPool(Scale(2.0), CPUS, executor=executor)
            assert ReplicaPool(Scale(2.0), executor=executor).devices == (CPU,)
            with aiopar.use_executor(executor):
                call = ReplicaPool(Scale(2.0), CPUS)(X)
            with too_few:
                await call

    @on_asyncio
    async def test_two_pools_on_one_executor_take_different_workers(
        self, make_workers: MakeWorkers
    ) -> None:
        gate = Gate()
        async with (
            make_workers(3) as executor,
            ReplicaPool(Where(gate), ["cpu"], executor=executor) as one,
            ReplicaPool(Where(gate), CPUS, executor=executor) as two,
        ):
            assert len(await _places(gate, one, two)) == 3

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
    def test_wrong_arguments_are_refused(
        self, given: dict[str, Any], error: type[Exception], match: str
    ) -> None:
        with pytest.raises(error, match=match):
            ReplicaPool(**{"module": Scale(1.0), **given})


@pytest.fixture
def _dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Dynamo look loaded, so that any module may compile. To load it takes seconds."""
    if "torch._dynamo" not in sys.modules:
        monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))


class Record(nn.Module):
    """Notes its inputs."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.note = AtHome(seen.append)

    def forward(self, *inputs: Any) -> None:
        self.note(inputs)


class TestOpening:
    async def test_first_use_opens_the_pool_and_later_uses_wait(self, workers: Workers) -> None:
        gate = Gate()

        def on_call(x: Tensor) -> None:
            if x.ndim == 1:
                gate()

        module = Scale(2.0, on_call)
        pool = ReplicaPool(module, executor=workers, warmup=torch.zeros(1))
        assert (pool.ready, pool.alive) == (False, True)
        async with held(gate) as tasks:
            for _ in range(8):
                tasks.start_soon(pool, X)
            await gate.entered()
            await anyio.wait_all_tasks_blocked()
            assert not pool.ready
        assert gate.count == len(module.runs.fn.copies) == 2
        assert pool.ready
        assert sum(stats.completed for stats in pool.stats().replicas) == 8
        await pool.aclose()

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
    async def test_every_replica_runs_the_warmup(
        self, workers: Workers, warmup: Any, expected: list[Any]
    ) -> None:
        seen: list[Any] = []
        async with ReplicaPool(Record(seen), executor=workers, warmup=warmup):
            assert repr(seen) == repr(expected * 2)

    async def test_failing_warmup_is_raised_and_the_next_use_tries_again(
        self, workers: Workers
    ) -> None:
        failing = [True]

        def on_call(_: Tensor) -> None:
            if failing:
                raise BadInput("cold")

        pool = ReplicaPool(Scale(2.0, on_call), executor=workers, warmup=X)
        with pytest.raises(BadInput) as caught:
            async with pool:
                pytest.fail("it is not open")
        *_, note = caught.value.__notes__
        assert note in [f"in the warm-up of replica 0 on device {one}" for one in labels(workers)]
        assert (pool.ready, pool.stats()) == (False, PoolStats(()))
        failing.clear()
        assert torch.equal((await pool(X))[0], 2 * X)
        await pool.aclose()

    async def test_cancelled_call_does_not_stop_the_opening_for_others(
        self, workers: Workers
    ) -> None:
        gate = Gate()
        pool = ReplicaPool(Scale(2.0, lambda _: gate()), executor=workers, warmup=torch.zeros(1))
        answers: list[Any] = []

        async def call() -> None:
            answers.append(await pool(X))

        async with held(gate) as tasks:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as impatient:
                    impatient.start_soon(pool, X)
                    await gate.entered()
                    tasks.start_soon(call)
                    await anyio.wait_all_tasks_blocked()
                    scope.cancel()
            assert not answers
        assert len(answers) == 1
        await pool.aclose()

    async def test_cancelled_async_with_stops_the_opening(self, workers: Workers) -> None:
        gate = Gate()
        pool = ReplicaPool(Scale(2.0, lambda _: gate()), executor=workers, warmup=torch.zeros(1))

        async def enter() -> None:
            async with pool:
                pytest.fail("it is not open")

        with gate:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(enter)
                await gate.entered()
                tasks.cancel_scope.cancel()
            await anyio.wait_all_tasks_blocked()
        assert (gate.count, pool.stats()) == (1, PoolStats(()))
        await pool(X)  # it can still be opened
        await pool.aclose()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
    def test_a_child_that_is_forked_during_a_warmup_can_warm_up(self) -> None:
        code, out, err = run("""
            class Held(torch.nn.Module):
                def forward(self, x):
                    return gate(x) if os.getpid() == parent else x

            async def use():
                async with aiopar.ReplicaPool(Held(), ["cpu"], warmup=torch.ones(1)) as pool:
                    return await pool(torch.ones(1))

            sys.modules.setdefault("torch._dynamo", sys)  # now any module may compile
            parent, gate = os.getpid(), Gate()
            thread = threading.Thread(target=asyncio.run, args=[use()])
            thread.start()
            gate.wait_entered()
            if child := os.fork():
                print(os.waitpid(child, 0)[1])
                gate.open()
                thread.join()
            else:
                print(asyncio.run(use()), flush=True)
        """)
        assert (code, out) == (0, "tensor([1.])\n0\n"), err

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
            async with aiopar.DeviceExecutor(CPUS) as executor, anyio.create_task_group() as tasks:
                pools = [
                    ReplicaPool(Scale(2.0, on_call), ["cpu"], executor=executor, warmup=X)
                    for _ in range(2)
                ]
                for pool in pools:
                    tasks.start_soon(pool.__aenter__)
                await gate.entered()
                # The other worker waits for the lock, and another thread runs its queue.
                other = executor.on(worker=int(held == ["aiopar-cpu-0"]))
                assert await other.run_sync(len, "ab") == 2
                gate.open()
        assert most == [1, 1]
        for pool in pools:
            await pool.aclose()


class TestClosing:
    async def test_calls_and_batches_in_flight_are_awaited_and_new_calls_refused(
        self, workers: Workers
    ) -> None:
        module, answers = Scale(2.0), []

        async def call(how: Callable[[Tensor], Any], x: Tensor) -> None:
            answers.append(await how(x))

        async with open_pool(module, executor=workers, on=["cpu"]) as pool:
            for how, x, count in ((pool, X, 2), (Batcher(pool), X[0], 1)):
                module.on_call[:] = [gate := Gate()]
                async with pool, held(gate) as tasks:
                    for _ in range(count):
                        tasks.start_soon(call, how, x)
                    await gate.entered()
                    tasks.start_soon(pool.aclose)
                    await anyio.wait_all_tasks_blocked()
                    assert (pool.ready, states(pool)) == (False, ["ready"])
                    with pytest.raises(aiopar.ServiceClosed):
                        await pool(X)
                assert len(answers) == count
                answers.clear()
                assert (pool.ready, pool.alive, states(pool)) == (False, True, ["closed"])
            await pool.aclose()
            for verb in (pool(X), pool.swap(Scale(1.0)), pool.load_state_dict({})):
                with pytest.raises(aiopar.ServiceClosed):
                    await verb

    @pytest.mark.parametrize(
        "how",
        [
            lambda pool: pool.aclose(timeout=0),
            lambda pool: pool.aclose(drain=False),
            lambda pool: pool.__aexit__(LookupError, LookupError(), None),
        ],
        ids=["timeout", "no drain", "error in the block"],
    )
    async def test_close_without_waiting(self, workers: Workers, how: Any) -> None:
        gate, outcomes = Gate(), dict[str, Any]()
        pool = ReplicaPool(Where(gate), ["cpu"], executor=workers)

        async def call(name: str) -> None:
            try:
                outcomes[name] = await pool("x")
            except aiopar.ServiceClosed:
                outcomes[name] = "closed"

        await pool.__aenter__()
        async with held(gate) as tasks:
            tasks.start_soon(call, "running")
            await gate.entered()
            tasks.start_soon(call, "queued")
            await anyio.wait_all_tasks_blocked()
            await how(pool)
            assert (outcomes, states(pool)) == ({}, ["closed"])
        assert outcomes.pop("queued") == "closed"
        assert outcomes["running"] in await places(workers)

    async def test_close_while_the_pool_opens(self, workers: Workers) -> None:
        gate = Gate()
        pool = ReplicaPool(Scale(2.0, lambda _: gate()), executor=workers, warmup=X)
        refused: list[str] = []

        async def call() -> None:
            try:
                await pool(X)
            except aiopar.ServiceClosed:
                refused.append("closed")

        async with held(gate) as tasks:
            tasks.start_soon(call)
            tasks.start_soon(call)
            await gate.entered()
            tasks.start_soon(pool.aclose)
            await anyio.wait_all_tasks_blocked()
        assert refused == ["closed"] * 2
        assert gate.count == 1


class TestReopening:
    async def test_new_replicas_of_the_latest_module_are_made_once(self, workers: Workers) -> None:
        warmed_up: list[str] = []
        pool = ReplicaPool(Scale(2.0), executor=workers, warmup=X)
        async with pool:
            await pool.swap(Scale(3.0, lambda _: warmed_up.append("replica")))
            first, _ = await pool(X)
        assert states(pool) == ["closed"] * 2
        assert warmed_up.count("replica") == 3
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(pool.__aenter__)
        assert states(pool) == ["ready"] * 2
        assert warmed_up.count("replica") == 5
        assert sum(replica.completed for replica in pool.stats().replicas) == 0
        second, _ = await pool(X)
        assert torch.equal(first, X * 3)
        assert torch.equal(second, X * 3)
        await pool.aclose()
        with pytest.raises(aiopar.ServiceClosed):
            await pool(X)

    @pytest.mark.parametrize("first", RUNNERS)
    @pytest.mark.parametrize("second", RUNNERS)
    def test_in_another_event_loop(self, workers: Workers, first: str, second: str) -> None:
        pool = ReplicaPool(Scale(2.0), executor=workers, warmup=X)
        batcher = Batcher(pool)

        async def main() -> None:
            async with pool, batcher:
                assert len(await pool(X)) == 2
                assert len(await batcher(X)) == 2

        async def leave_open() -> None:
            await pool.__aenter__()
            await batcher.__aenter__()
            await batcher(X)

        RUNNERS[first](main)
        RUNNERS[second](main)
        RUNNERS[first](leave_open)
        RUNNERS[second](pool.aclose)
        RUNNERS[second](main)

    async def test_while_calls_of_the_first_run_go_on(self, workers: Workers) -> None:
        gate, answers = Gate(), list[Any]()

        async def call(pool: ReplicaPool[Any]) -> None:
            answers.append(await pool("x"))

        async with open_pool(Where(gate), executor=workers, on=["cpu"]) as pool:
            with gate:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call, pool)
                    await gate.entered()
                    tasks.start_soon(pool.aclose)
                    await anyio.wait_all_tasks_blocked()
                    tasks.start_soon(pool.__aenter__)
                    await anyio.wait_all_tasks_blocked()
                    tasks.start_soon(call, pool)
                    gate.open()
                assert len(answers) == 2
                assert (pool.ready, states(pool)) == (True, ["ready"])

    async def test_a_swap_that_has_begun_before_the_end_fails(self, workers: Workers) -> None:
        gate, failed = Gate(), list[str]()
        old, new = Scale(2.0), Scale(3.0, lambda _: gate())
        pool = ReplicaPool(old, ["cpu"], executor=workers, warmup=X)

        async def swap() -> None:
            with pytest.raises(aiopar.ServiceClosed):
                await pool.swap(new)
            failed.append("swap")

        with gate:
            async with pool, anyio.create_task_group() as tasks:
                tasks.start_soon(swap)
                await gate.entered()
                await pool.aclose()
                tasks.start_soon(pool.__aenter__)
                await anyio.wait_all_tasks_blocked()
                gate.open()
                while not pool.ready:
                    await anyio.lowlevel.checkpoint()
                assert failed == ["swap"]
                assert torch.equal((await pool(X))[0], X * 2)
