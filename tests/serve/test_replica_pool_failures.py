"""`ReplicaPool`: broken replicas are rebuilt, lost devices retired, and no call is lost."""

import time
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.serve import ReplicaPool
from aiopar.testing import Gate
from tests.workers import Workers

from .batches import on_asyncio, until
from .replicas import (
    CPUS,
    RUNNERS,
    BadInput,
    Broken,
    Fragile,
    Scale,
    X,
    break_copy,
    held,
    in_service,
    named,
    open_pool,
    states,
)

pytestmark = pytest.mark.anyio


BAD = -X - 1
WARMUP = torch.zeros(1, 2)

ON_RAY = True


def expected(module: Fragile) -> Tensor:
    """The answer to `X` of a replica that is not broken."""
    with torch.inference_mode():
        return module.linear(X)  # type: ignore[no-any-return]


def is_warmup(x: Tensor) -> bool:
    """Whether it is the warm-up input; in a process it is a copy."""
    return torch.equal(x, WARMUP)


class Warmups:
    """Counts how often a module has run the warm-up input."""

    def __init__(self, module: Fragile) -> None:
        self.count = 0
        module.on_call.append(self._note)

    def _note(self, x: Tensor) -> None:
        self.count += is_warmup(x)


class TestBrokenReplica:
    async def test_its_call_is_tried_on_another_replica_and_it_is_rebuilt(
        self, workers: Workers
    ) -> None:
        module, rebuild = Fragile(), Gate()
        async with open_pool(module, executor=workers, warmup=WARMUP) as pool:
            break_copy(module, 0)

            def hold_rebuild(x: Tensor) -> None:
                if is_warmup(x) and in_service(pool) == [1]:
                    rebuild()

            module.on_call.append(hold_rebuild)
            with rebuild:
                assert torch.equal(await pool(X), expected(module))
                await rebuild.entered()
                assert in_service(pool) == [1]
            await until(lambda: in_service(pool) == [0, 1])
            assert torch.equal(await pool(X), expected(module))
            first, second = pool.stats().replicas
        assert (first.completed, first.failed, first.rebuilds) == (1, 1, 1)
        assert (second.completed, second.failed, second.rebuilds) == (1, 0, 0)

    async def test_calls_in_its_queue_go_to_another_replica_without_a_run(
        self, workers: Workers
    ) -> None:
        module, gate, answers = Fragile(), Gate(), []
        async with open_pool(module, executor=workers, warmup=WARMUP) as pool:

            async def call() -> None:
                answers.append(await pool(X))

            module.on_call.append(gate)
            async with held(gate) as tasks:
                for _ in range(4):
                    tasks.start_soon(call)
                    await anyio.wait_all_tasks_blocked()
                await gate.entered(2)
                assert [r.in_flight for r in pool.stats().replicas] == [2, 2]
                break_copy(module, 0)
            assert all(torch.equal(answer, expected(module)) for answer in answers)
            assert [stats.failed for stats in pool.stats().replicas] == [1, 0]

    async def test_only_replica_is_unavailable_until_it_is_rebuilt(self, workers: Workers) -> None:
        module, gate = Fragile(), Gate()
        async with open_pool(module, executor=workers, on=["cpu"], warmup=WARMUP) as pool:
            break_copy(module, 0)
            module.on_call.append(lambda _: pool.ready or gate())
            with gate:
                with pytest.raises(aiopar.ReplicaUnavailable) as caught:
                    await pool(X)
                assert type(caught.value.__cause__) is Broken
                assert caught.value.__cause__.__notes__[-1] == f"in {named(pool, 0)}"
                await gate.entered()
                assert (states(pool), pool.ready, pool.alive) == (["rebuilding"], False, True)
                with pytest.raises(aiopar.ReplicaUnavailable, match="1 rebuilding, 0 retired"):
                    await pool(X)
                gate.open()
            await until(lambda: pool.ready)
            assert torch.equal(await pool(X), expected(module))

    async def test_error_of_the_second_try_is_raised(self, workers: Workers) -> None:
        module = Fragile()
        async with open_pool(module, executor=workers, warmup=WARMUP) as pool:
            break_copy(module, 0)
            break_copy(module, 1)
            with pytest.raises(Broken) as caught:
                await pool(X)
            assert caught.value.__notes__[-1] == f"in {named(pool, 1)}"
            await until(lambda: in_service(pool) == [0, 1])


class TestHealthCheck:
    @on_asyncio
    @pytest.mark.parametrize("batched", [True, False])
    async def test_bad_inputs_are_not_the_replicas_fault_and_run_the_warmup_once(
        self, workers: Workers, batched: bool
    ) -> None:
        module = Fragile()
        warmups = Warmups(module)

        def last_long(x: Tensor) -> None:
            if is_warmup(x):
                time.sleep(0.1)

        async with (
            open_pool(module, executor=workers, on=["cpu"], warmup=[WARMUP] * 8) as pool,
            aiopar.Batcher(pool) as batcher,
        ):
            module.on_call.append(last_long)
            before = warmups.count
            for _ in range(20):
                with pytest.raises(BadInput) as caught:
                    await (batcher(BAD[0]) if batched else pool(BAD))
                assert f"in {named(pool, 0)}" in caught.value.__notes__
                assert torch.equal(await pool(X), expected(module))
            assert in_service(pool) == [0]
            # The 8 inputs run once; on a slow machine perhaps twice.
            assert 8 <= warmups.count - before <= 16

    async def test_a_replica_that_breaks_after_a_bad_input_is_found(self, workers: Workers) -> None:
        module = Fragile()
        async with open_pool(module, executor=workers, on=["cpu"], warmup=WARMUP) as pool:
            with pytest.raises(BadInput):
                await pool(BAD)
            break_copy(module, 0)

            async def call_again_and_again() -> None:
                while True:
                    with suppress(Broken):
                        await pool(X)

            with anyio.fail_after(60), pytest.raises(aiopar.ReplicaUnavailable):
                await call_again_and_again()
            await until(lambda: pool.ready)
            assert torch.equal(await pool(X), expected(module))

    @on_asyncio
    async def test_warmup_is_tried_after_max_failures_in_a_row(self, workers: Workers) -> None:
        module = Fragile()
        warmups = Warmups(module)
        async with open_pool(
            module, executor=workers, on=["cpu"], warmup=WARMUP, max_failures=3
        ) as pool:
            for x in (BAD, BAD, X, BAD, BAD):
                if x is X:
                    await pool(x)
                    continue
                with pytest.raises(BadInput):
                    await pool(x)
            assert warmups.count == 1  # at the opening
            break_copy(module, 0)
            with pytest.raises(aiopar.ReplicaUnavailable):
                await pool(X)

    @on_asyncio
    async def test_without_a_warmup_no_replica_counts_as_broken(self, workers: Workers) -> None:
        module = Fragile()
        async with open_pool(module, executor=workers) as pool:
            await pool(X)
            break_copy(module, 0)
            for _ in range(4):
                with pytest.raises(Broken):
                    await pool(X)
            assert in_service(pool) == [0, 1]

    @on_asyncio
    @pytest.mark.parametrize("error", [torch.OutOfMemoryError, aiopar.InvalidInput])
    async def test_errors_that_say_nothing_about_the_replica(
        self, workers: Workers, error: type[Exception]
    ) -> None:
        module = Fragile()
        warmups = Warmups(module)

        def fail(x: Tensor) -> None:
            if torch.equal(x, X):
                raise error("no fault of the replica")

        async with open_pool(module, executor=workers, on=["cpu"], warmup=WARMUP) as pool:
            break_copy(module, 0)
            module.on_call.append(fail)
            for _ in range(3):
                with pytest.raises(error):
                    await pool(X)
            assert (warmups.count, in_service(pool)) == (1, [0])
            with pytest.raises(aiopar.ReplicaUnavailable):
                await pool(X + 1)

    @on_asyncio
    async def test_warmup_that_runs_out_of_memory_proves_nothing(self, workers: Workers) -> None:
        module = Fragile()

        def run_out(x: Tensor) -> None:
            if is_warmup(x):
                raise torch.OutOfMemoryError("full")

        async with open_pool(module, executor=workers, on=["cpu"], warmup=WARMUP) as pool:
            module.on_call.append(run_out)
            with pytest.raises(BadInput):
                await pool(BAD)
            assert in_service(pool) == [0]


class TestRebuilding:
    @on_asyncio
    async def test_failed_rebuild_is_tried_again(
        self, workers: Workers, caplog: pytest.LogCaptureFixture
    ) -> None:
        module, failing = Fragile(), [True]

        def fail(_: Tensor) -> None:
            if failing and not pool.ready:
                raise Broken("not yet")

        async with open_pool(module, executor=workers, on=["cpu"], warmup=WARMUP) as pool:
            break_copy(module, 0)
            module.on_call.append(fail)
            with pytest.raises(aiopar.ReplicaUnavailable):
                await pool(X)
            while "next try in 1 s" not in caplog.text:
                await anyio.lowlevel.checkpoint()
            assert states(pool) == ["rebuilding"]
            failing.clear()
            await until(lambda: pool.ready)
            assert pool.stats().replicas[0].rebuilds == 1

    @pytest.mark.parametrize("moment", ["warming up", "between two tries"])
    async def test_closing_the_pool_ends_a_rebuild(
        self, workers: Workers, moment: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        module, gate = Fragile(), Gate()

        def hold_and_fail(_: Tensor) -> None:
            if not pool.ready:
                gate()
                raise Broken("not yet")

        async with open_pool(module, executor=workers, on=["cpu"], warmup=WARMUP) as pool:
            break_copy(module, 0)
            module.on_call.append(hold_and_fail)
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


@pytest.mark.parametrize("first", RUNNERS)
@pytest.mark.parametrize("second", RUNNERS)
def test_replica_breaks_in_another_loop_than_that_which_opened_the_pool(
    workers: Workers, first: str, second: str
) -> None:
    module = Fragile()
    pool = ReplicaPool(module, executor=workers, warmup=WARMUP)

    async def call() -> Tensor:
        answer: Tensor = await pool(X)
        return answer

    # Both loops run in one thread, one after the other.
    RUNNERS[first](call)
    break_copy(module, 0)
    for _ in range(2):
        assert torch.equal(RUNNERS[second](call), expected(module))
    assert in_service(pool) == [1]


def lose_device(_: Tensor) -> None:
    raise torch.AcceleratorError("the device is lost")


class TestLostDevice:
    async def test_all_replicas_on_the_device_are_retired(self) -> None:
        module = Fragile()
        async with open_pool(module, warmup=WARMUP) as pool:
            module.on_call.append(lose_device)
            with pytest.raises(aiopar.ReplicaUnavailable) as caught:
                await pool(X)
            assert type(caught.value.__cause__) is torch.AcceleratorError
            assert states(pool) == ["retired"] * 2
            assert (pool.ready, pool.alive) == (False, False)
            with pytest.raises(torch.AcceleratorError):
                await ReplicaPool(module, CPUS, warmup=WARMUP)(X)  # lost while the pool opens
            module.on_call.clear()
            with pytest.raises(aiopar.ReplicaUnavailable, match="0 rebuilding, 2 retired"):
                await pool(X)
            with pytest.raises(aiopar.ReplicaUnavailable, match="all are retired"):
                await pool.swap(Fragile())
        assert (states(pool), pool.alive) == (["retired"] * 2, False)

    @on_asyncio
    @pytest.mark.parametrize("moment", ["health check", "rebuilding", "swap"])
    async def test_device_that_is_lost_in_a_warmup(self, moment: str) -> None:
        module, answered = Fragile(), Gate()

        def lose_later(x: Tensor) -> None:
            rebuilds = "rebuilding" in states(pool)
            if is_warmup(x) and rebuilds == (moment == "rebuilding"):
                if rebuilds:
                    answered()  # the other replica must answer first
                lose_device(x)

        async with open_pool(module, warmup=WARMUP) as pool:
            module.on_call.append(lose_later)
            if moment == "health check":
                with pytest.raises(aiopar.ReplicaUnavailable):
                    await pool(BAD)
            elif moment == "rebuilding":
                break_copy(module, 0)
                with answered:
                    assert torch.equal(await pool(X), expected(module))
                await until(lambda: not pool.alive)
            else:
                with pytest.raises(torch.AcceleratorError):
                    await pool.swap(module)
            assert states(pool) == ["retired"] * 2

    @pytest.mark.sim
    async def test_another_device_answers(self) -> None:
        lost: list[int] = []

        def lose(x: Tensor) -> None:
            if x.device.index in lost:
                lose_device(x)

        async with open_pool(Scale(2.0, lose), on=["sim:0", "sim:0", "sim:1"]) as pool:
            lost.append(0)
            first, _ = await pool(X)
            assert first.device == torch.device("sim:1")
            assert torch.equal(first.cpu(), 2 * X)
            assert states(pool) == ["retired", "retired", "ready"]
            assert (pool.ready, pool.alive) == (True, True)
            await pool.swap(Scale(3.0, lose))
            assert torch.equal((await pool(X))[0].cpu(), 3 * X)
            await pool.load_state_dict({"weight": torch.tensor(4.0), "twin": torch.tensor(4.0)})
            assert torch.equal((await pool(X))[0].cpu(), 4 * X)
            lost.append(1)
            with pytest.raises(aiopar.ReplicaUnavailable):
                await pool(X)
            assert (pool.ready, pool.alive) == (False, False)
