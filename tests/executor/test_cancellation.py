"""Cancelled awaits: queued calls are dropped, running calls are awaited, no worker is lost."""

import asyncio
import concurrent.futures
import gc
import threading
from typing import Any

import anyio
import pytest

import aiopar
from aiopar.executor._call import Call
from aiopar.testing import Gate
from tests.home import AtHome


@pytest.fixture
def executor(workers: aiopar.DeviceExecutor) -> aiopar.DeviceExecutor:
    """One worker."""
    return workers.on(worker=0)


def completed(executor: aiopar.DeviceExecutor) -> int:
    return executor.stats().workers[0].completed


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A prefix of thread names for this test: threads of earlier tests may be about to end."""
    name: str = request.node.name
    return name


@pytest.fixture
def storm(anyio_backend: tuple[str, dict[str, Any]]) -> int:
    """How many awaits are cancelled; asyncio's debug mode takes a millisecond for each."""
    return 1_000 if anyio_backend[1].get("debug") else 10_000


def _calls_alive() -> int:
    gc.collect()
    return sum(issubclass(type(found), Call) for found in gc.get_objects())


async def _passed(executor: aiopar.DeviceExecutor) -> None:
    """Wait until the executor's only worker has run all queued calls."""
    await executor.submit(str)


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
                tasks.start_soon(_run, executor, AtHome(ran.append), 1, abandon)
                await anyio.wait_all_tasks_blocked()
                assert executor.stats().workers[0].queued == 1
                scope.cancel()
        assert scope.cancelled_caught
        assert executor.stats().workers[0].queued == 0
    await _passed(executor)
    assert ran == []


async def _run(executor: aiopar.DeviceExecutor, fn: Any, argument: Any, abandon: bool) -> None:
    await executor.run_sync(fn, argument, abandon_on_cancel=abandon)


@pytest.mark.anyio
async def test_a_cancelled_await_waits_for_a_running_call(
    executor: aiopar.DeviceExecutor,
) -> None:
    ended: list[str] = []
    before = completed(executor)
    with Gate() as gate:

        async def cancelled() -> None:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await executor.run_sync(AtHome(gate))
            assert scope.cancelled_caught
            ended.append("task")

        def go_on() -> None:
            assert ended == [], "the task still waits for its call"
            gate.open()

        scopes: list[anyio.CancelScope] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancelled)
            await gate.entered()
            scopes[0].cancel()
            await anyio.wait_all_tasks_blocked()
            go_on()
    assert ended == ["task"]
    assert completed(executor) == before + 1


@pytest.mark.anyio
async def test_an_abandoned_call_keeps_its_worker_busy(
    executor: aiopar.DeviceExecutor,
) -> None:
    before = completed(executor)
    with Gate() as gate:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_run, executor, AtHome(gate), 1, True)
                await gate.entered()
                scope.cancel()
        assert gate.held == 1
        assert executor.stats().workers[0].running == 1
    await _passed(executor)
    assert completed(executor) == before + 2


@pytest.mark.anyio
async def test_a_timeout_of_anyio(executor: aiopar.DeviceExecutor) -> None:
    with Gate() as gate:
        executor.submit(AtHome(gate))
        await gate.entered()
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.01):
                await executor.run_sync(str)
    await _passed(executor)


@pytest.mark.asyncio
async def test_timeouts_of_asyncio(executor: aiopar.DeviceExecutor) -> None:
    with Gate() as gate:
        executor.submit(AtHome(gate))
        await gate.entered()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await executor.run_sync(str)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(executor.run_sync(str), 0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(executor.submit(str), 0.01)
        assert executor.stats().workers[0].queued == 0
    await _passed(executor)


@pytest.mark.asyncio
async def test_a_timeout_while_the_call_runs(executor: aiopar.DeviceExecutor) -> None:
    with Gate() as gate:
        limit = asyncio.timeout(None)

        async def limited() -> None:
            async with limit:
                await executor.run_sync(AtHome(gate))

        task = asyncio.create_task(limited())
        await gate.entered()
        limit.reschedule(0)
        await asyncio.sleep(0)
        assert limit.expired()
        await anyio.wait_all_tasks_blocked()  # the task was cancelled, and waits for its call
        assert not task.done()
    with pytest.raises(TimeoutError):
        await task


@pytest.mark.asyncio
async def test_repeated_cancellation_while_the_call_runs(
    executor: aiopar.DeviceExecutor,
) -> None:
    with Gate() as gate:
        task = asyncio.create_task(executor.run_sync(AtHome(gate)))
        await gate.entered()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
    with pytest.raises(asyncio.CancelledError):
        await task


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
    await _passed(executor)
    gc.collect()
    assert reported == []


@pytest.mark.anyio
async def test_a_cancelled_await_cancels_a_future_without_other_waiters(
    executor: aiopar.DeviceExecutor,
) -> None:
    with Gate() as gate:
        executor.submit(AtHome(gate))
        await gate.entered()
        alone, shared, watched = (executor.submit(pow, 2, n) for n in range(3))
        seen: list[int] = []
        watched.add_done_callback(lambda done: seen.append(done.result()))
        async with anyio.create_task_group() as others:
            others.start_soon(_await, shared)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    for future in (alone, shared, watched):
                        tasks.start_soon(_await, future)
                    await anyio.wait_all_tasks_blocked()
                    scope.cancel()
            assert [f.cancelled() for f in (alone, shared, watched)] == [True, False, False]
            gate.open()
    assert await shared == 2
    assert await watched == 4
    await _passed(executor)
    assert seen == [4]
    with pytest.raises(concurrent.futures.CancelledError):
        await alone


async def _await(future: aiopar.Future[int]) -> None:
    await future


@pytest.mark.anyio
async def test_another_task_cancels_the_future(executor: aiopar.DeviceExecutor) -> None:
    with Gate() as gate:
        running = executor.submit(AtHome(gate))
        await gate.entered()
        queued = executor.submit(str)
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                with pytest.raises(concurrent.futures.CancelledError):
                    await queued

            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            assert queued.cancel()
            assert queued.cancel(), "again"
        assert not running.cancel(), "a running call cannot be cancelled"


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["run_sync", "submit"])
async def test_many_cancelled_awaits_of_queued_calls(verb: str, storm: int, prefix: str) -> None:
    ran: list[None] = []
    async with aiopar.DeviceExecutor(["cpu"] * 2, thread_name_prefix=prefix) as executor:
        with Gate() as gate:
            for _ in range(2):
                executor.submit(gate)
            await gate.entered(2)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    for _ in range(storm):
                        tasks.start_soon(_call, executor, verb, ran.append, None)
                    await anyio.wait_all_tasks_blocked()
                    assert _queued(executor) == storm
                    scope.cancel()
            assert _queued(executor) == 0
        await _usable(executor, prefix)
    assert ran == []


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["run_sync", "submit"])
async def test_many_cancellations_at_every_stage(verb: str, storm: int, prefix: str) -> None:
    async with aiopar.DeviceExecutor(["cpu"] * 2, thread_name_prefix=prefix) as executor:
        for _ in range(storm // 100):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    for _ in range(100):
                        tasks.start_soon(_call, executor, verb, pow, 2, 3)
                    # Now some calls are delivered, some completed, running or queued.
                    await executor.run_sync(str)
                    scope.cancel()
        await _usable(executor, prefix)


async def _call(executor: aiopar.DeviceExecutor, verb: str, fn: Any, *args: Any) -> None:
    await getattr(executor, verb)(fn, *args)


def _queued(executor: aiopar.DeviceExecutor) -> int:
    return sum(worker.queued for worker in executor.stats().workers)


async def _usable(executor: aiopar.DeviceExecutor, prefix: str) -> None:
    barrier = threading.Barrier(2)
    for future in executor.submit_all([barrier.wait, barrier.wait]):  # both workers still serve
        await future
    assert _queued(executor) == 0
    await executor.run_sync(str)  # its worker has dropped all calls that were cancelled before
    names = sorted(t.name for t in threading.enumerate() if t.name.startswith(prefix))
    assert names == [f"{prefix}-cpu-0", f"{prefix}-cpu-1"]
    assert _calls_alive() <= 2, "only calls that the workers have just run"
