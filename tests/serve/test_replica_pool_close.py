"""Closing a `ReplicaPool`: who is awaited, and who is refused."""

from typing import Any

import anyio
import pytest

import aiopar
from aiopar.serve import Batcher, ReplicaPool
from aiopar.testing import Gate

from .replicas import CPUS, Scale, Where, X, open_pool, states


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
    async def test_a_batch_of_a_batcher_is_awaited(self) -> None:
        gate, outputs = Gate(), []

        async def call(batcher: Batcher) -> None:
            outputs.append(await batcher(X[0]))

        async with open_pool(Scale(2.0, gate), on=["cpu"]) as pool:
            batcher = Batcher(pool)
            with gate:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call, batcher)
                    await gate.entered()
                    tasks.start_soon(pool.aclose)
                    await anyio.wait_all_tasks_blocked()
                    assert states(pool) == ["ready"]
                    gate.open()
            assert states(pool) == ["closed"]
            assert len(outputs) == 1

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
                    assert pool._replicas[0].module is None
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
