"""Cancelled awaits: queued calls are dropped, running calls are awaited, no worker is lost."""

import asyncio
import gc
import threading
from functools import partial
from typing import Any

import anyio
import pytest

import aiopar
from aiopar.executor._call import Call
from aiopar.testing import Gate
from tests.cancelling import cancel_while_held
from tests.home import AtHome


@pytest.fixture
def executor(workers: aiopar.DeviceExecutor) -> aiopar.DeviceExecutor:
    """One worker."""
    return workers.on(worker=0)


def completed(executor: aiopar.DeviceExecutor) -> int:
    return executor.stats().workers[0].completed


@pytest.mark.anyio
@pytest.mark.parametrize("abandon", [False, True])
async def test_a_cancelled_await_drops_a_queued_call(
    executor: aiopar.DeviceExecutor, abandon: bool
) -> None:
    ran: list[int] = []
    with Gate() as gate:
        executor.submit(AtHome(gate))
        await gate.entered()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                run = partial(executor.run_sync, abandon_on_cancel=abandon)
                tasks.start_soon(run, AtHome(ran.append), 1)
                await anyio.wait_all_tasks_blocked()
                assert executor.stats().workers[0].queued == 1
                scope.cancel()
        assert scope.cancelled_caught
        assert executor.stats().workers[0].queued == 0
    await executor.submit(str)
    assert ran == []


@pytest.mark.anyio
async def test_a_cancelled_await_waits_for_a_running_call(executor: aiopar.DeviceExecutor) -> None:
    before = completed(executor)
    with Gate() as gate:

        async def cancelled() -> None:
            with scope:
                await executor.run_sync(AtHome(gate))
            assert scope.cancelled_caught
            assert completed(executor) == before + 1

        scope = anyio.CancelScope()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancelled)
            await gate.entered()
            scope.cancel()
            await anyio.wait_all_tasks_blocked()
            assert completed(executor) == before, "the task still waits for its call"
            gate.open()


@pytest.mark.anyio
async def test_an_abandoned_call_keeps_its_worker_busy(
    executor: aiopar.DeviceExecutor,
) -> None:
    before = completed(executor)
    with Gate() as gate:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(executor.run_sync, abandon_on_cancel=True), AtHome(gate))
                await gate.entered()
                scope.cancel()
        assert gate.held == 1
        assert executor.stats().workers[0].running == 1
    await executor.submit(str)
    assert completed(executor) == before + 2


@pytest.mark.asyncio
async def test_timeouts_drop_a_queued_call(executor: aiopar.DeviceExecutor) -> None:
    with Gate() as gate:
        executor.submit(AtHome(gate))
        await gate.entered()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await executor.run_sync(str)
        with pytest.raises(TimeoutError), anyio.fail_after(0.01):
            await executor.run_sync(str)
        for call in (executor.run_sync(str), executor.submit(str)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0.01)
        assert executor.stats().workers[0].queued == 0
    await executor.submit(str)


@pytest.mark.asyncio
async def test_repeated_cancellation_while_the_call_runs(executor: aiopar.DeviceExecutor) -> None:
    gate = Gate()
    await cancel_while_held(executor.run_sync(AtHome(gate)), gate, 3)


@pytest.mark.asyncio
@pytest.mark.may_block("the loop must not see the completion before the cancellation")
async def test_cancellation_between_completion_and_wake_up(executor: aiopar.DeviceExecutor) -> None:
    with Gate() as gate:
        task = asyncio.create_task(executor.run_sync(AtHome(gate)))
        await gate.entered()
        gate.open()
        # When the worker has run the next call, it has posted the result of the first. This loop is
        # blocked here and has not received it.
        executor.submit(str).result()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await executor.run_sync(pow, 2, 5) == 32


@pytest.mark.asyncio
async def test_the_error_of_a_cancelled_call_is_not_reported(
    executor: aiopar.DeviceExecutor,
) -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    with Gate() as gate:
        for abandon in (False, True):

            def fail() -> None:
                gate()
                raise LookupError

            task = asyncio.create_task(executor.run_sync(AtHome(fail), abandon_on_cancel=abandon))
            await gate.entered(gate.count + 1)
            task.cancel()
            await asyncio.sleep(0)
            gate.let_on()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
    await executor.submit(str)
    gc.collect()
    assert reported == []


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["run_sync", "submit"])
async def test_many_cancelled_awaits(verb: str, request: pytest.FixtureRequest) -> None:
    """Of queued calls, then of calls at every stage."""
    prefix: str = request.node.name  # threads of earlier tests may be about to end
    ran: list[int] = []
    async with aiopar.DeviceExecutor(["cpu"] * 2, thread_name_prefix=prefix) as executor:

        async def call(fn: Any, *args: Any) -> None:
            await getattr(executor, verb)(fn, *args)

        with Gate() as gate:
            held = [executor.submit(gate) for _ in range(2)]
            await gate.entered(2)
            async with anyio.create_task_group() as tasks:
                for n in range(1000):
                    tasks.start_soon(call, ran.append, n)
                await anyio.wait_all_tasks_blocked()
                assert sum(worker.queued for worker in executor.stats().workers) == 1000
                tasks.cancel_scope.cancel()
            assert sum(worker.queued for worker in executor.stats().workers) == 0
        await aiopar.collect_all(held)
        assert ran == []
        for _ in range(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(100):
                    tasks.start_soon(call, pow, 2, 3)
                # Now some calls are delivered, some completed, running or queued.
                await executor.run_sync(str)
                tasks.cancel_scope.cancel()
        barrier = threading.Barrier(2)
        await aiopar.collect_all(executor.submit_all([barrier.wait] * 2))  # both workers serve
        assert sum(worker.queued for worker in executor.stats().workers) == 0
        await executor.run_sync(str)  # its worker has dropped all calls that were cancelled before
        names = sorted(t.name for t in threading.enumerate() if t.name.startswith(prefix))
        assert names == [f"{prefix}-cpu-0", f"{prefix}-cpu-1"]
    del held
    gc.collect()
    alive = sum(issubclass(type(found), Call) for found in gc.get_objects())
    assert alive <= 2, "only calls that the workers have just run"
