"""Shutdown of an executor: queued calls run or are cancelled, and the threads end."""

import asyncio
import concurrent.futures
import gc
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeAlias

import anyio
import pytest

import aiopar
from aiopar.testing import Gate
from tests.cancelling import cancel_while_held

Held: TypeAlias = tuple[aiopar.DeviceExecutor, Gate]


@pytest.fixture
def held() -> Iterator[Held]:
    """An executor whose only worker is held."""
    with Gate() as gate:
        executor = aiopar.DeviceExecutor(["cpu"])
        executor.submit(gate)
        gate.wait_entered()
        yield executor, gate
    executor.shutdown()


@pytest.mark.anyio
async def test_aclose_runs_queued_calls(held: Held) -> None:
    executor, gate = held
    queued = [executor.submit(pow, 2, n) for n in range(3)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(executor.aclose)
        await anyio.wait_all_tasks_blocked()
        assert not any(future.done() for future in queued)
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(str)
        gate.open()
    assert [future.result() for future in queued] == [1, 2, 4]
    await executor.aclose()
    executor.shutdown()


@pytest.mark.asyncio
async def test_a_cancelled_async_with_waits_for_running_calls() -> None:
    gate = Gate()

    async def leave() -> None:
        async with aiopar.DeviceExecutor(["cpu"], thread_name_prefix="cancelled") as executor:
            executor.submit(gate)

    await cancel_while_held(leave(), gate, 3)
    assert _threads_of("cancelled") == []


@pytest.mark.asyncio
async def test_a_cancelled_aclose_can_be_repeated(held: Held) -> None:
    executor, gate = held
    for _ in range(2):
        closing = asyncio.create_task(executor.aclose())
        await anyio.wait_all_tasks_blocked()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    gate.open()
    await executor.aclose()
    executor.shutdown()


def _threads_of(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


@pytest.mark.anyio
@pytest.mark.may_block("by shutdown")
@pytest.mark.parametrize("cancel_futures", [None, False, True])
async def test_no_thread_is_left(cancel_futures: bool | None) -> None:
    def nested() -> str:
        return executor.submit(str).result()  # another thread takes over its worker

    for _ in range(20):
        executor = aiopar.DeviceExecutor(["cpu"] * 3, thread_name_prefix="closed")
        calls = [executor.on(worker=worker).submit(nested) for worker in range(3)]
        if cancel_futures is None:
            async with executor:
                pass
        else:
            executor.shutdown(cancel_futures=cancel_futures)
        assert _threads_of("closed") == []
        assert cancel_futures or [call.value() for call in calls] == [""] * 3


def test_queued_calls_run_after_shutdown_without_wait(held: Held) -> None:
    executor, gate = held
    queued = executor.submit(pow, 2, 5)
    executor.shutdown(wait=False)
    assert not queued.done()
    gate.open()
    assert queued.result(10) == 32


def test_cancel_futures_cancels_queued_calls(held: Held) -> None:
    executor, gate = held
    queued = [view.submit(str) for view in (executor, executor.on(worker=0)) * 2]
    executor.shutdown(wait=False)
    executor.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in queued)
    gate.open()
    executor.shutdown()
    assert executor.stats().workers[0].completed == 1


@pytest.mark.anyio
async def test_an_exception_in_async_with_cancels_queued_calls() -> None:
    executor = aiopar.DeviceExecutor(["cpu"])
    gate = Gate()
    running = executor.submit(gate, "running")
    queued = executor.submit(str)
    # The exit waits for the running call, which ends when the queued call is cancelled.
    queued.add_done_callback(lambda _: gate.open())
    await gate.entered()

    async def leave() -> None:
        async with executor:
            raise LookupError

    with pytest.raises(LookupError):
        await leave()
    assert queued.cancelled()
    assert running.value() == "running"


@pytest.mark.anyio
async def test_an_awaited_call_that_shutdown_cancels_raises(held: Held) -> None:
    executor, _ = held
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            with pytest.raises(concurrent.futures.CancelledError):
                await executor.run_sync(str)

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        executor.shutdown(wait=False, cancel_futures=True)


def test_shutdown_from_many_threads_at_once() -> None:
    executor = aiopar.DeviceExecutor(["cpu"] * 2)
    queued = [executor.submit(pow, 2, n) for n in range(100)]
    threads = [threading.Thread(target=executor.shutdown) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [future.result() for future in queued] == [2**n for n in range(100)]


@pytest.mark.anyio
@pytest.mark.parametrize("in_loop", [False, True])
async def test_two_workers_close_their_executor_at_once(in_loop: bool) -> None:
    executor = aiopar.DeviceExecutor(["cpu"] * 2)
    barrier = threading.Barrier(2)

    def close(in_loop: bool) -> None:
        barrier.wait()
        anyio.run(executor.aclose) if in_loop else executor.shutdown()

    calls: list[aiopar.Future[None]] = executor.submit_all([(close, in_loop)] * 2)
    for future in calls:
        await future
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(str)
    await executor.aclose()


@pytest.mark.parametrize("verb", ["submit", "submit_all", "run_sync", "iterate", "map"])
def test_calls_are_refused_after_shutdown(verb: str) -> None:
    executor = aiopar.DeviceExecutor(["cpu"])
    executor.shutdown()

    async def use() -> None:
        if verb == "submit_all":
            executor.submit_all([str])
        elif verb == "map":
            list(executor.map(str, [1]))
        elif verb == "iterate":
            await anext(executor.iterate(range, 3))
        else:
            await getattr(executor, verb)(str)

    with pytest.raises(aiopar.ExecutorShutdown, match="cannot schedule new futures after shutdown"):
        asyncio.run(use())


def test_calls_submitted_during_shutdown_run_or_are_refused() -> None:
    def submit(executor: aiopar.DeviceExecutor, taken: list[aiopar.Future[int]]) -> None:
        with suppress(RuntimeError):
            while True:
                taken.append(executor.submit(pow, 2, 5))

    for _ in range(50):
        executor = aiopar.DeviceExecutor(["cpu"] * 2)
        taken = [executor.submit(pow, 2, 5)]
        thread = threading.Thread(target=submit, args=(executor, taken))
        thread.start()
        taken[0].result()
        executor.shutdown()
        thread.join()
        assert [future.result(10) for future in taken] == [32] * len(taken)


def test_the_threads_of_a_dropped_executor_end() -> None:
    executor = aiopar.DeviceExecutor(["cpu"])
    future = executor.submit(threading.current_thread)
    thread = future.result()
    del executor
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
