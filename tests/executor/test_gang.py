"""Gangs: calls that run at the same time, meet, and are aborted together."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from types import NoneType
from typing import Any, TypeAlias

import pytest
import pytest_asyncio
import torch

import aiopar
from aiopar import current_replica
from aiopar.testing import Gate
from tests import simdevice
from tests.interruptions import at_every_point

CPUS = ["cpu", "cpu"]


@pytest_asyncio.fixture
async def executor() -> AsyncIterator[aiopar.DeviceExecutor]:
    async with aiopar.DeviceExecutor(CPUS) as executor:
        yield executor


def describe() -> tuple[int, int, torch.device]:
    replica = current_replica()
    return replica.index, replica.count, replica.device


@pytest.mark.asyncio
async def test_every_call_is_a_replica(executor: aiopar.DeviceExecutor) -> None:
    """A forked call belongs to the replica; a nested gang has replicas of its own."""

    def outer() -> list[tuple[int, int, torch.device]]:
        own = describe()
        forked = aiopar.wait(executor.submit(describe))
        return [own, forked, *aiopar.wait_all(executor.submit_all([describe] * 2)), describe()]

    first, second = ((index, 2, torch.device("cpu")) for index in range(2))
    assert await asyncio.gather(*executor.submit_all([outer] * 2)) == [
        [first, first, first, second, first],
        [second, second, first, second, second],
    ]


@pytest.mark.asyncio
async def test_current_replica_outside_a_gang(executor: aiopar.DeviceExecutor) -> None:
    with pytest.raises(RuntimeError, match="outside of a parallel call"):
        current_replica()
    with pytest.raises(RuntimeError, match="outside of a parallel call"):
        await executor.submit(current_replica)


@pytest.mark.asyncio
async def test_exchange_returns_all_values_in_order(executor: aiopar.DeviceExecutor) -> None:
    def exchange() -> list[list[int]]:
        replica = current_replica()
        return [replica.exchange(10 * round_ + replica.index) for round_ in range(20)]

    expected = [[10 * round_, 10 * round_ + 1] for round_ in range(20)]
    assert await asyncio.gather(*executor.submit_all([exchange] * 2)) == [expected] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("failing", [0, 1])
async def test_a_failure_ends_the_wait_of_the_other_replica(
    executor: aiopar.DeviceExecutor, failing: int
) -> None:
    def meet() -> None:
        current_replica().barrier()  # both have started
        if current_replica().index == failing:
            raise KeyError("own")
        current_replica().barrier()

    errors = await errors_of(executor.submit_all([meet] * 2))
    own, other = errors[failing], errors[1 - failing]
    assert type(own) is KeyError
    assert own.__notes__ == [f"in replica {failing} on device cpu"]
    assert type(other) is aiopar.ReplicaAborted
    assert isinstance(other, threading.BrokenBarrierError)
    assert str(other) == f"replica {failing} failed"


Futures: TypeAlias = list[aiopar.Future[Any]]


async def errors_of(futures: Futures) -> list[BaseException | None]:
    """The errors of all futures, when they are done."""
    await asyncio.wait_for(aiopar.collect_all(futures), timeout=30)
    return [future.exception() for future in futures]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "wait", [lambda fs: asyncio.gather(*fs), lambda fs: asyncio.to_thread(aiopar.wait_all, fs)]
)
@pytest.mark.parametrize("failing", [0, 1])
async def test_waiters_for_all_get_the_error_and_no_cancellation(
    executor: aiopar.DeviceExecutor, failing: int, wait: Callable[[Futures], Awaitable[list[Any]]]
) -> None:
    def fail() -> None:
        raise KeyError("own")

    with Gate() as first, Gate() as second:
        held = [executor.on(worker=n).submit(gate) for n, gate in enumerate((first, second))]
        await asyncio.gather(first.entered(), second.entered())
        futures: Futures = executor.submit_all([fail] * 2)
        (first, second)[failing].open()  # the other replica never starts
        with pytest.raises(KeyError, match="own") as caught:
            await wait(futures)
        # A call that was dropped because of an error has this error, however they are read. It is
        # dropped after the waiters have got the error, and before its gate opens.
        assert await errors_of(futures) == [caught.value] * 2
    await asyncio.gather(*held)
    assert caught.value.__notes__ == [f"in replica {failing} on device cpu"]


@pytest.mark.asyncio
async def test_a_callback_of_the_error_may_wait_for_the_other_replica(
    executor: aiopar.DeviceExecutor,
) -> None:
    def meet() -> None:
        current_replica().barrier()
        if current_replica().index == 0:
            gate()
            raise KeyError("own")
        current_replica().barrier()

    with Gate() as gate:
        failing, other = executor.submit_all([meet] * 2)
        failing.add_done_callback(lambda _: others.append(other.exception()))
        others: list[BaseException | None] = []
        gate.open()
        await errors_of([failing, other])
        assert [type(error) for error in others] == [aiopar.ReplicaAborted]


@pytest.mark.asyncio
async def test_a_return_before_the_meeting_ends_the_wait_of_the_other_replica(
    executor: aiopar.DeviceExecutor,
) -> None:
    def meet() -> None:
        current_replica().barrier()
        if current_replica().index == 1:
            current_replica().barrier()

    first, second = await errors_of(executor.submit_all([meet] * 2))
    assert first is None
    assert str(second) == "replica 0 returned before the meeting"


@pytest.mark.asyncio
async def test_cancelling_a_queued_member_ends_the_wait_of_the_other_replica(
    executor: aiopar.DeviceExecutor,
) -> None:
    started = Gate()
    started.open()

    def meet() -> None:
        started()
        current_replica().barrier()

    with Gate() as gate:
        held = executor.on(worker=1).submit(gate)
        await gate.entered()
        waiting, queued = executor.submit_all([meet] * 2)
        await started.entered()  # a member that has not started would be dropped
        assert queued.cancel()
        with pytest.raises(aiopar.ReplicaAborted, match="cancelled"):
            await waiting
    await held


class TestOnAbort:
    @pytest.mark.asyncio
    async def test_callbacks_are_called_once_now_or_when_another_replica_fails(
        self, executor: aiopar.DeviceExecutor, caplog: pytest.LogCaptureFixture
    ) -> None:
        called: list[str] = []

        def fail() -> None:
            raise IndexError("of a callback")

        def meet() -> list[str]:
            replica = current_replica()
            if replica.index:
                replica.on_abort(fail)
                replica.on_abort(lambda: called.append("on time"))
            before = called.copy()
            replica.barrier()
            if not replica.index:
                raise KeyError("own")
            with pytest.raises(aiopar.ReplicaAborted):
                replica.barrier()
            replica.on_abort(lambda: called.append("late"))
            return before

        failing, other = executor.submit_all([meet] * 2)
        assert [type(error) for error in await errors_of([failing, other])] == [KeyError, NoneType]
        assert await other == []
        await executor.on(worker=0).submit(int)  # it has called all callbacks
        assert sorted(called) == ["late", "on time"]
        assert "on_abort" in caplog.text
        assert "of a callback" in caplog.text

    @pytest.mark.asyncio
    async def test_ctrl_c_in_a_callback_is_raised_after_all_callbacks_were_called(
        self, executor: aiopar.DeviceExecutor
    ) -> None:
        def interrupted() -> None:
            raise KeyboardInterrupt

        called: list[int] = []
        registered = Gate()
        registered.open()

        def meet() -> None:
            for callback in (interrupted, lambda: called.append(1)):
                current_replica().on_abort(callback)
            registered()
            current_replica().barrier()

        with Gate() as gate:
            held = executor.on(worker=1).submit(gate)
            await gate.entered()
            waiting, queued = executor.submit_all([meet] * 2)
            await registered.entered()
            with pytest.raises(KeyboardInterrupt):
                queued.cancel()
            assert called == [1]
            with pytest.raises(aiopar.ReplicaAborted, match="cancelled"):
                await waiting
        await held


class TestNoDeadlock:
    @pytest.mark.asyncio
    async def test_many_gangs_on_just_enough_workers(self, executor: aiopar.DeviceExecutor) -> None:
        def meet(barrier: threading.Barrier) -> None:
            barrier.wait(timeout=30)

        def submit() -> list[aiopar.Future[None]]:
            barrier = threading.Barrier(2)
            return executor.submit_all([(meet, barrier)] * 2)

        # From several threads, so that the submissions overlap.
        submitted = [asyncio.to_thread(submit) for _ in range(20)]
        for futures in await asyncio.gather(*submitted):
            assert await errors_of(futures) == [None, None]

    @pytest.mark.asyncio
    async def test_a_call_behind_a_member_that_waits_in_a_meeting(self) -> None:
        def wait_for_a_call_on_the_cpu() -> int:
            if current_replica().index == 1:
                # The call is queued behind replica 0, which waits for this replica.
                result = aiopar.wait(on_cpu.submit(abs, -3))
                current_replica().barrier()
                return result
            current_replica().barrier()
            return 0

        async with aiopar.DeviceExecutor(["cpu", "meta"]) as executor:
            on_cpu = executor.on("cpu")
            calls = executor.submit_all([wait_for_a_call_on_the_cpu] * 2)
            assert await asyncio.gather(*calls) == [0, 3]

    @pytest.mark.asyncio
    async def test_nested_gangs_with_other_gangs_queued_behind(
        self, executor: aiopar.DeviceExecutor
    ) -> None:
        def nest(level: int) -> int:
            current_replica().barrier()
            if not level:
                return 1
            inner: list[aiopar.Future[int]] = executor.submit_all([(nest, level - 1)] * 2)
            total = sum(aiopar.wait_all(inner))
            current_replica().barrier()
            return total

        gangs: list[list[aiopar.Future[int]]] = [
            executor.submit_all([(nest, 3)] * 2) for _ in range(6)
        ]
        for futures in gangs:
            assert await asyncio.gather(*futures) == [2**3] * 2

    @pytest.mark.asyncio
    async def test_a_call_waits_for_a_gang_that_needs_its_worker(self) -> None:
        def gang() -> list[int]:
            return [index for index, *_ in aiopar.wait_all(one.submit_all([describe]))]

        async with aiopar.DeviceExecutor(["cpu"]) as one:
            calls = [one.submit(gang) for _ in range(5)]
            assert await asyncio.gather(*calls) == [[0]] * 5


@pytest.mark.sim
@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("devices", [["sim:0", "sim:1"], ["sim:0", "sim:0"]], ids="-".join)
def test_exchanged_tensors_are_complete_on_the_receiving_stream(
    devices: list[str], forked: bool
) -> None:
    simdevice.set_kernel_latency(0.02)
    simdevice.set_poison(True)

    def total() -> torch.Tensor:
        replica = current_replica()
        simdevice.sleep(
            0.1 * replica.index, replica.device
        )  # the kernels of the replicas end one after the other
        own = torch.full((4,), replica.index + 1.0, device=replica.device)
        return sum(other.to(replica.device) for other in replica.exchange(own * 10))  # type: ignore[return-value]

    with aiopar.DeviceExecutor(devices * 2) as workers:

        def by_another_worker() -> torch.Tensor:
            another = workers.on(worker=2 + current_replica().index)
            return aiopar.wait(another.submit(total))

        futures = workers.submit_all([by_another_worker if forked else total] * 2)
        for future in futures:
            assert future.result().tolist() == [30.0] * 4


def test_a_destructor_may_submit_a_gang_at_any_point_of_another() -> None:
    """The two gangs have one order on both workers, or they would wait for each other."""

    def meet(name: str) -> list[str]:
        return current_replica().exchange(name)

    for interruption in at_every_point():
        late: list[aiopar.Future[list[str]]] = []
        with aiopar.DeviceExecutor(CPUS) as executor:
            submit = functools.partial(executor.submit_all, [(meet, "late")] * 2)
            with interruption.by(lambda submit=submit, late=late: late.extend(submit())):  # type: ignore[misc]
                calls: list[aiopar.Future[list[str]]] = executor.submit_all([(meet, "first")] * 2)
            assert [call.result(10) for call in calls] == [["first"] * 2] * 2
            assert [call.result(10) for call in late] == [["late"] * 2] * 2 * interruption.came
