"""`parallel_apply` and `fork_apply`: errors, cancellation, and that running calls are awaited."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
import pytest_asyncio
import torch

import aiopar
from aiopar import current_replica
from aiopar.testing import Gate

from ..freeing import survivors, without_gc

CPUS = ["cpu", "cpu"]


@pytest_asyncio.fixture
async def executor() -> AsyncIterator[aiopar.DeviceExecutor]:
    """Only the workers that the parallel calls in these tests need."""
    async with aiopar.DeviceExecutor(CPUS) as executor:
        yield executor


class Own(Exception):
    """An error of the user."""


class Untestable(Exception):
    """Errors that carry a tensor may have no truth value."""

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")


class TestErrors:
    @pytest.mark.asyncio
    async def test_errors_without_a_truth_value(self) -> None:
        def fail() -> None:
            raise Untestable

        with pytest.raises(Untestable):
            await aiopar.parallel_apply([fail, fail], [(), ()])

    @pytest.mark.anyio
    async def test_the_error_is_the_same_object_with_a_note(self) -> None:
        error = Own("why")

        def fail() -> None:
            raise error

        for _ in range(2):
            with pytest.raises(Own, match="why") as raised:
                await aiopar.parallel_apply([int, fail], [(), ()])
            assert raised.value is error
            assert error.__notes__ == ["in replica 1 on device cpu"], "once, however often"

    @pytest.mark.asyncio
    async def test_the_lowest_index_is_raised_and_the_others_are_noted(self) -> None:
        barrier = threading.Barrier(3)

        def fail(index: int) -> None:
            barrier.wait(timeout=30)
            raise Own(f"of {index}")

        with pytest.raises(Own, match="of 0") as raised:
            await aiopar.parallel_apply([fail] * 3, [0, 1, 2])
        assert raised.value.__notes__ == [
            "in replica 0 on device cpu",
            "replica 1 failed too: Own: of 1",
            "replica 2 failed too: Own: of 2",
        ]

    @pytest.mark.asyncio
    @pytest.mark.parametrize("failing", [0, 2])
    async def test_an_abort_never_hides_the_cause(self, failing: int) -> None:
        users = threading.Barrier(3)

        def meet(index: int) -> None:
            replica = current_replica()
            replica.on_abort(users.abort)
            replica.barrier()
            if index == failing:
                raise Own("the cause")
            if index == 1:
                users.wait(timeout=30)
            replica.barrier()

        with pytest.raises(Own) as raised:
            await aiopar.parallel_apply([meet] * 3, [0, 1, 2])
        # The replicas that were only released did not fail themselves.
        assert raised.value.__notes__ == [f"in replica {failing} on device cpu"]

    @pytest.mark.asyncio
    async def test_a_broken_barrier_may_be_the_cause(self) -> None:
        def meet(index: int) -> None:
            current_replica().barrier()
            if index == 1:
                raise threading.BrokenBarrierError("own")
            current_replica().barrier()

        with pytest.raises(threading.BrokenBarrierError, match="own"):
            await aiopar.parallel_apply([meet] * 2, [0, 1])

    @pytest.mark.asyncio
    async def test_queued_calls_are_dropped_when_another_fails(
        self, executor: aiopar.DeviceExecutor
    ) -> None:
        ran: list[str] = []

        def fail() -> None:
            raise Own

        with Gate() as gate, aiopar.use_executor(executor):
            held = executor.on(worker=1).submit(gate)
            await gate.entered()
            with pytest.raises(Own):
                await aiopar.parallel_apply([fail, ran.append], [(), "never"], devices=CPUS)
        await held
        assert await executor.on(worker=1).run_sync(ran.copy) == []

    @pytest.mark.asyncio
    async def test_a_dropped_call_does_not_count_as_the_lowest_index(self) -> None:
        barrier = threading.Barrier(2)

        def fail(index: int) -> None:
            barrier.wait(timeout=30)
            raise Own(f"of {index}")

        async with aiopar.DeviceExecutor(["cpu"] * 3) as executor:
            with Gate() as first, Gate() as others, aiopar.use_executor(executor):
                gates = enumerate((first, others, others))
                held = [executor.on(worker=n).submit(gate) for n, gate in gates]
                await asyncio.gather(first.entered(), others.entered(2))
                call = aiopar.parallel_apply([fail] * 3, [0, 1, 2], devices=["cpu"] * 3)
                waiter = asyncio.create_task(call)
                await asyncio.sleep(0)  # the calls are queued
                others.open()
                with pytest.raises(Own, match="of 1") as raised:
                    await waiter
            await asyncio.gather(*held)
        assert raised.value.__notes__ == [
            "in replica 1 on device cpu",
            "replica 2 failed too: Own: of 2",
        ]

    @pytest.mark.asyncio
    async def test_running_calls_are_awaited(self) -> None:
        ended: list[bool] = []
        with Gate() as gate:

            def slow() -> None:
                current_replica().barrier()
                gate()
                ended.append(True)

            def fail() -> None:
                current_replica().barrier()
                raise Own

            call = asyncio.create_task(aiopar.parallel_apply([fail, slow], [()] * 2))
            await gate.entered()
            done, _ = await asyncio.wait([call], timeout=0.01)
            assert not done
            gate.open()
            with pytest.raises(Own):
                await call
        assert ended

    @pytest.mark.asyncio
    async def test_base_exceptions_reach_the_awaiter(self) -> None:
        class Interrupt(BaseException):
            pass

        def fail() -> None:
            raise Interrupt

        with pytest.raises(Interrupt):
            await aiopar.parallel_apply([fail, int], [(), ()])
        assert await aiopar.parallel_apply([int], [()]) == [0]

    @pytest.mark.anyio
    async def test_freed_by_reference_counting(self) -> None:
        alive: list[weakref.ref[Any]] = []

        def fail(x: torch.Tensor) -> None:
            own = x + 1
            alive.append(weakref.ref(own))
            current_replica().barrier()
            if current_replica().index:
                raise Own
            current_replica().exchange(own)

        with without_gc():
            x = torch.ones(1)
            alive.append(weakref.ref(x))
            try:
                await aiopar.parallel_apply([fail] * 2, [x, x], devices=CPUS)
            except Own as error:
                alive.append(weakref.ref(error))
            del x
            assert len(alive) == 4
            assert await survivors(alive) == []


class TestCancellation:
    """Every way to cancel: queued calls are dropped, meetings released, running calls awaited."""

    @staticmethod
    async def run_cancelled(call: Callable[[], Any], entered: Callable[[], Any]) -> None:
        async with anyio.create_task_group() as tasks:

            async def awaiting() -> None:
                await call()
                pytest.fail("it was not cancelled")

            tasks.start_soon(awaiting)
            await entered()
            tasks.cancel_scope.cancel()

    @pytest.mark.anyio
    async def test_a_replica_that_waits_in_a_meeting_is_released(self) -> None:
        released: list[BaseException] = []
        started = threading.Event()
        with Gate() as gate:

            def meet(index: int) -> None:
                if index:
                    current_replica().on_abort(gate.open)
                    started.wait()  # else it may be dropped instead of released
                    gate()  # so that replica 0 waits for ever
                    return
                started.set()
                try:
                    current_replica().barrier()
                except aiopar.ReplicaAborted as error:
                    released.append(error)
                    raise

            await self.run_cancelled(
                lambda: aiopar.parallel_apply([meet] * 2, [0, 1], devices=CPUS), gate.entered
            )
        assert "cancelled" in str(released)

    @pytest.mark.anyio
    async def test_queued_calls_are_dropped_and_running_ones_awaited(self) -> None:
        ran: list[str] = []
        executor = aiopar.DeviceExecutor(CPUS)
        with Gate() as gate, Gate() as running:
            held = executor.on(worker=1).submit(gate)
            await gate.entered()

            def run() -> None:
                current_replica().on_abort(running.open)
                running()
                ran.append("to its end")

            with aiopar.use_executor(executor):
                call = aiopar.parallel_apply([run, ran.append], [(), "never"], devices=CPUS)
            await self.run_cancelled(lambda: call, running.entered)
            assert ran == ["to its end"]
        await held
        await executor.aclose()
        assert ran == ["to its end"]

    @pytest.mark.asyncio
    async def test_after_repeated_cancellation_running_calls_are_awaited(self) -> None:
        ended: list[bool] = []
        with Gate() as gate:

            def run() -> None:
                gate()
                ended.append(True)

            task = asyncio.create_task(aiopar.parallel_apply([run] * 2, [()] * 2, devices=CPUS))
            await gate.entered(2)
            for _ in range(3):
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=0.01)
                assert not done
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert ended == [True, True]
