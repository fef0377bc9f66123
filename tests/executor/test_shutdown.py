"""The end of an executor: drained or dropped, once or often, from wherever."""

import asyncio
import concurrent.futures
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import anyio
import pytest

import aiopar
from aiopar.testing import Gate
from tests.cancelling import cancel_while_held


@pytest.fixture
def held() -> Iterator[tuple[aiopar.DeviceExecutor, Gate]]:
    """An executor whose only worker is held."""
    with Gate() as gate:
        executor = aiopar.DeviceExecutor(["cpu"])
        executor.submit(gate)
        gate.wait_entered()
        yield executor, gate
    executor.shutdown()


@pytest.mark.anyio
async def test_aclose_runs_what_is_queued_then_ends_the_threads(
    held: tuple[aiopar.DeviceExecutor, Gate],
) -> None:
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
async def test_aclose_that_was_given_up_can_be_repeated(
    held: tuple[aiopar.DeviceExecutor, Gate],
) -> None:
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
async def test_after_aclose_there_is_no_thread() -> None:
    for _ in range(50):
        executor = aiopar.DeviceExecutor(["cpu"] * 3, thread_name_prefix="closed")
        for worker in range(3):
            executor.on(worker=worker).submit(str)
        await executor.aclose()
        assert _threads_of("closed") == []


def test_after_shutdown_there_is_no_thread() -> None:
    def nested() -> str:
        return executor.submit(str).result()  # hands its worker over to another thread

    for _ in range(50):
        executor = aiopar.DeviceExecutor(["cpu"] * 3, thread_name_prefix="shut-down")
        for worker in range(3):
            executor.on(worker=worker).submit(nested)
        executor.shutdown(cancel_futures=True)
        assert _threads_of("shut-down") == []


def test_shutdown_without_waiting_lets_queued_calls_run(
    held: tuple[aiopar.DeviceExecutor, Gate],
) -> None:
    executor, gate = held
    queued = executor.submit(pow, 2, 5)
    executor.shutdown(wait=False)
    assert not queued.done()
    gate.open()
    assert queued.result(10) == 32


def test_shutdown_cancels_what_is_queued_when_asked(
    held: tuple[aiopar.DeviceExecutor, Gate],
) -> None:
    executor, gate = held
    queued = [executor.submit(str) for _ in range(3)]
    executor.shutdown(wait=False)
    executor.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in queued)
    gate.open()
    executor.shutdown()
    assert executor.stats().workers[0].completed == 1


@pytest.mark.anyio
async def test_async_with_runs_what_is_queued() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        queued = [executor.submit(pow, 2, n) for n in range(3)]
    assert [future.value() for future in queued] == [1, 2, 4]


@pytest.mark.anyio
async def test_async_with_left_by_an_exception_cancels_what_is_queued() -> None:
    executor = aiopar.DeviceExecutor(["cpu"])
    gate = Gate()
    running = executor.submit(gate, "running")
    queued = executor.submit(str)
    # The exit waits for the running call, which is let on when the queued one is cancelled.
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
async def test_an_awaited_call_that_the_shutdown_drops_raises(
    held: tuple[aiopar.DeviceExecutor, Gate],
) -> None:
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
async def test_closed_by_two_of_its_workers_at_once(in_loop: bool) -> None:
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
def test_nothing_is_taken_after_shutdown(verb: str) -> None:
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


def test_calls_submitted_while_it_shuts_down_run_or_are_refused() -> None:
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


def test_an_executor_that_nobody_closes_ends_with_its_last_call() -> None:
    executor = aiopar.DeviceExecutor(["cpu"])
    future = executor.submit(threading.current_thread)
    thread = future.result()
    del executor
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def _program(body: str) -> str:
    program = f"import sys, threading, aiopar\nfrom aiopar.testing import Gate\n{body}"
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


def test_at_interpreter_exit_queued_work_is_dropped_and_running_work_awaited() -> None:
    out = _program(
        """
def last_words(gate):
    gate()
    sys.stdout.write("ran to its end\\n")  # at once, with its line's end
explicit = aiopar.DeviceExecutor(["cpu"])
for executor in (explicit, aiopar.get_executor().on(worker=0)):
    gate = Gate()
    executor.submit(last_words, gate)
    gate.wait_entered()
    queued = executor.submit(print, "never")
    queued.add_done_callback(lambda _, gate=gate: gate.open())
"""
    )
    assert out.splitlines() == ["ran to its end"] * 2


def test_sys_exit_in_a_worker_ends_nothing_but_the_call() -> None:
    out = _program(
        """
future = aiopar.fork(sys.exit, 3)
print(type(future.exception()).__name__, aiopar.fork(pow, 2, 5).result())
"""
    )
    assert out == "SystemExit 32\n"
