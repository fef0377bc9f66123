"""`ReplicaPool` when a replica breaks: no call is lost, it is rebuilt."""

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Any
from weakref import WeakMethod

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch
import trio
from torch import Tensor

import aiopar
from aiopar.errors import ReplicaFailed
from aiopar.serve import ReplicaPool
from aiopar.serve._replica_pool import retry_delays
from aiopar.testing import Gate

from .replicas import (
    CPUS,
    BadInput,
    Broken,
    Fragile,
    X,
    in_service,
    open_pool,
    poison,
    states,
    until,
)

RUNNERS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "asyncio": lambda main: asyncio.run(main()),
    "trio": trio.run,
}
BAD = -X - 1
WARMUP = torch.zeros(1, 2)


def expected(module: Fragile) -> Tensor:
    """What it answers to `X` on the CPU, whole."""
    with torch.inference_mode():
        return module.linear(X)  # type: ignore[no-any-return]


def warmups(module: Fragile) -> int:
    """How often the warm-up input was run."""
    return sum(x is WARMUP for x in module.calls)


class Seen:
    """Listens to a pool."""

    pool: ReplicaPool

    def __init__(self) -> None:
        self.in_service: list[list[int]] = []

    def look(self) -> None:
        self.in_service.append(in_service(self.pool))


class TestBroken:
    @pytest.mark.anyio
    async def test_its_call_is_answered_by_another_and_it_comes_back(self) -> None:
        module, seen = Fragile(), Seen()
        async with open_pool(module, warmup=WARMUP) as pool:
            seen.pool = pool
            pool._listeners.add(WeakMethod(seen.look))
            poison(pool._replicas[0])
            assert torch.equal(await pool(X), expected(module))
            await until(pool, lambda: in_service(pool) == [0, 1])
            assert torch.equal(await pool(X), expected(module))
            first, second = pool.stats().replicas
        assert (first.completed, first.failed, first.rebuilds) == (1, 1, 1)
        assert (second.completed, second.failed, second.rebuilds) == (1, 0, 0)
        assert seen.in_service == [[1], [0, 1], []]

    @pytest.mark.anyio
    async def test_under_load_no_call_is_lost(self) -> None:
        module, done = Fragile(), False

        async def client() -> None:
            while not done:
                assert torch.equal(await pool(X), expected(module))

        async with open_pool(module, warmup=WARMUP) as pool:
            async with anyio.create_task_group() as tasks:
                for _ in range(64):
                    tasks.start_soon(client)
                for times in range(1, 6):
                    poison(pool._replicas[0])
                    await until(pool, lambda: pool._replicas[0].rebuilds == times)  # noqa: B023
                done = True
            assert in_service(pool) == [0, 1]
            assert pool.stats().replicas[1].failed == 0

    @pytest.mark.anyio
    async def test_a_call_is_retried_on_another_though_the_first_is_back_and_has_less_to_do(
        self,
    ) -> None:
        async with open_pool(Fragile(), warmup=WARMUP) as pool:
            first, second = pool._replicas
            with second.in_flight:
                assert pool._set.pick() is first
                assert pool._set.pick(failed=first) is second

    @pytest.mark.anyio
    async def test_what_waited_for_it_is_answered_by_another_without_being_run(self) -> None:
        module, gate, answers = Fragile(), Gate(), []
        async with open_pool(module, warmup=WARMUP) as pool:

            async def call() -> None:
                answers.append(await pool(X))

            module.on_call.append(gate)
            with gate:
                async with anyio.create_task_group() as tasks:
                    for _ in range(4):
                        tasks.start_soon(call)
                        await anyio.wait_all_tasks_blocked()
                    await gate.entered(2)
                    assert [r.in_flight for r in pool.stats().replicas] == [2, 2]
                    poison(pool._replicas[0])
                    gate.open()
            assert all(torch.equal(answer, expected(module)) for answer in answers)
            assert [stats.failed for stats in pool.stats().replicas] == [1, 0]

    @pytest.mark.anyio
    async def test_the_only_one(self) -> None:
        module, gate = Fragile(), Gate()
        async with open_pool(module, on=["cpu"], warmup=WARMUP) as pool:
            poison(pool._replicas[0])
            module.on_call.append(lambda: pool._replicas[0].in_service or gate())
            with gate:
                with pytest.raises(aiopar.ReplicaUnavailable) as caught:
                    await pool(X)
                assert type(caught.value.__cause__) is Broken
                assert caught.value.__cause__.__notes__ == ["in replica 0 on device cpu"]
                await gate.entered()
                assert (states(pool), pool.ready, pool.alive) == (["rebuilding"], False, True)
                with pytest.raises(aiopar.ReplicaUnavailable, match="1 rebuilding, 0 retired"):
                    await pool(X)
                gate.open()
            await until(pool, lambda: pool.ready)
            assert torch.equal(await pool(X), expected(module))

    @pytest.mark.anyio
    async def test_when_the_second_try_fails_as_well_its_error_is_raised(self) -> None:
        async with open_pool(Fragile(), warmup=WARMUP) as pool:
            for replica in pool._replicas:
                poison(replica)
            with pytest.raises(Broken) as caught:
                await pool(X)
            assert caught.value.__notes__ == ["in replica 1 on device cpu"]
            await until(pool, lambda: in_service(pool) == [0, 1])

    @pytest.mark.anyio
    async def test_reported_from_another_thread_once_or_more(self) -> None:
        async with open_pool(Fragile(), warmup=WARMUP) as pool:
            replica = pool._replicas[1]
            failed = ReplicaFailed("seen by a batcher", replica.module)
            for _ in range(3):
                await anyio.to_thread.run_sync(pool._failed, replica, failed)
            await until(pool, lambda: in_service(pool) == [0, 1])
            await anyio.to_thread.run_sync(pool._failed, replica, failed)  # it has another by now
            assert in_service(pool) == [0, 1]
            assert replica.rebuilds == 1


class TestBlame:
    @pytest.mark.anyio
    async def test_of_the_input(self) -> None:
        module = Fragile()
        async with open_pool(module, warmup=WARMUP) as pool:
            before = warmups(module)
            for _ in range(3):
                with pytest.raises(BadInput) as caught:
                    await pool(BAD)
                assert caught.value.__notes__ == ["in replica 0 on device cpu"]
            assert warmups(module) == before + 3
            assert in_service(pool) == [0, 1]

    @pytest.mark.asyncio
    async def test_after_max_failures_in_a_row(self) -> None:
        module = Fragile()
        async with open_pool(module, on=["cpu"], warmup=WARMUP, max_failures=3) as pool:
            for x in (BAD, BAD, X, BAD, BAD):
                if x is X:
                    await pool(x)
                    continue
                with pytest.raises(BadInput):
                    await pool(x)
            assert warmups(module) == 1  # when it was opened
            poison(pool._replicas[0])
            with pytest.raises(aiopar.ReplicaUnavailable):
                await pool(X)

    @pytest.mark.asyncio
    async def test_without_a_warmup_a_replica_is_never_blamed(self) -> None:
        async with open_pool(Fragile()) as pool:
            poison(pool._replicas[0])
            for _ in range(4):
                with pytest.raises(Broken):
                    await pool(X)
            assert in_service(pool) == [0, 1]

    @pytest.mark.asyncio
    async def test_out_of_memory_is_nobodys(self) -> None:
        module = Fragile()

        def run_out() -> None:
            if module.calls[-1] is X:
                raise torch.OutOfMemoryError("full")

        async with open_pool(module, on=["cpu"], warmup=WARMUP) as pool:
            poison(pool._replicas[0])
            module.on_call.append(run_out)
            with pytest.raises(torch.OutOfMemoryError):
                await pool(X)
            assert in_service(pool) == [0]
            with pytest.raises(aiopar.ReplicaUnavailable):
                await pool(X + 1)

    @pytest.mark.asyncio
    async def test_a_warmup_without_memory_tells_nothing(self) -> None:
        module = Fragile()

        def run_out() -> None:
            if module.calls[-1] is WARMUP:
                raise torch.OutOfMemoryError("full")

        async with open_pool(module, on=["cpu"], warmup=WARMUP) as pool:
            module.on_call.append(run_out)
            with pytest.raises(BadInput):
                await pool(BAD)
            assert in_service(pool) == [0]

    @pytest.mark.asyncio
    async def test_as_a_batcher_asks(self) -> None:
        async with open_pool(Fragile(), on=["cpu"], warmup=WARMUP) as pool:
            [replica] = pool._replicas
            poison(replica)

            def run(*, probe: bool) -> Any:
                return replica.run((X,), {}, probe=probe)

            with pytest.raises(Broken):
                await replica.executor.submit(run, probe=False)
            with pytest.raises(ReplicaFailed, match="fails on the warm-up as well") as caught:
                await replica.executor.submit(run, probe=True)
            assert type(caught.value.__cause__) is Broken
            assert caught.value.module is replica.module
            pool._failed(replica, caught.value)
            await until(pool, lambda: pool.ready)
            assert pool.stats().replicas[0].failed == 2
        with pytest.raises(aiopar.ServiceClosed):
            replica.forward(X)

    @pytest.mark.asyncio
    async def test_out_of_service_there_is_no_cause(self) -> None:
        module, gate = Fragile(), Gate()
        async with open_pool(module, on=["cpu"], warmup=WARMUP) as pool:
            [replica] = pool._replicas
            with gate:
                module.on_call.append(gate)
                pool._failed(replica, ReplicaFailed("seen by a batcher", replica.module))
                await gate.entered()
                with pytest.raises(ReplicaFailed, match="out of service") as caught:
                    replica.forward(X)
                assert caught.value.__cause__ is None


class TestRebuilding:
    def test_delays(self) -> None:
        assert list(islice(retry_delays(), 9)) == [1, 2, 4, 8, 16, 32, 60, 60, 60]

    @pytest.mark.asyncio
    async def test_one_that_fails_is_tried_again(self, caplog: pytest.LogCaptureFixture) -> None:
        module = Fragile()
        async with open_pool(module, on=["cpu"], warmup=WARMUP) as pool:
            module.shift.fill_(torch.nan)  # what replicas are made of
            poison(pool._replicas[0])
            with pytest.raises(aiopar.ReplicaUnavailable):
                await pool(X)
            while "next try in 1 s" not in caplog.text:
                await anyio.lowlevel.checkpoint()
            assert states(pool) == ["rebuilding"]
            module.shift.fill_(0)
            await until(pool, lambda: pool.ready)
            assert pool.stats().replicas[0].rebuilds == 1

    @pytest.mark.anyio
    @pytest.mark.parametrize("moment", ["warming up", "between two tries"])
    async def test_a_pool_that_is_closed_ends_it(
        self, moment: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        module, gate = Fragile(), Gate()
        async with open_pool(module, on=["cpu"], warmup=WARMUP) as pool:
            poison(pool._replicas[0])
            module.on_call.append(lambda: pool._replicas[0].in_service or gate())
            module.shift.fill_(torch.nan)
            with pytest.raises(aiopar.ReplicaUnavailable):
                await pool(X)
            with gate:
                await gate.entered()
                if moment == "between two tries":
                    gate.open()
                    while "next try" not in caplog.text:
                        await anyio.lowlevel.checkpoint()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(pool.aclose)
                    await anyio.wait_all_tasks_blocked()
                    gate.open()
            assert moment != "warming up" or gate.count == 1
            assert states(pool) == ["closed"]
            assert pool._upkeep._running.count == 0


@pytest.mark.anyio
@pytest.mark.parametrize("batched", [True, False])
async def test_an_error_that_is_false(batched: bool) -> None:
    """Some carry a collection, and are false when it is empty."""

    class Falsy(Exception):
        def __bool__(self) -> bool:
            return False

    class Fails(torch.nn.Module):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                raise Falsy
            return x

    async with ReplicaPool(Fails(), CPUS, warmup=WARMUP) as pool, aiopar.Batcher(pool) as batcher:
        await batcher(X)
        Fails.broken = True
        with pytest.raises(Falsy):
            await (batcher(X) if batched else pool(X))


@pytest.mark.parametrize("first", RUNNERS)
@pytest.mark.parametrize("second", RUNNERS)
def test_in_a_loop_that_is_not_the_one_that_opened_the_pool(first: str, second: str) -> None:
    module = Fragile()
    with aiopar.DeviceExecutor(CPUS) as executor:
        pool = ReplicaPool(module, executor=executor, warmup=WARMUP)

        async def call() -> Tensor:
            answer: Tensor = await pool(X)
            return answer

        # On one thread: where the first loop has run, the second runs now.
        RUNNERS[first](call)
        poison(pool._replicas[0])
        for _ in range(2):
            assert torch.equal(RUNNERS[second](call), expected(module))
        assert in_service(pool) == [1]


@pytest.mark.anyio
async def test_an_input_that_is_called_invalid_costs_no_warm_up() -> None:
    module = Fragile()

    def refuse() -> None:
        raise aiopar.InvalidInput("too long")

    async with open_pool(module, warmup=WARMUP, on=CPUS[:1]) as pool:
        module.on_call.append(refuse)
        before = warmups(module)
        for _ in range(3):
            with pytest.raises(aiopar.InvalidInput):
                await pool(X)
        assert warmups(module) == before
        assert in_service(pool) == [0]
