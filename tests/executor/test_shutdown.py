"""Shutdown of an executor: queued calls run or are cancelled, and the threads end."""

import asyncio
import concurrent.futures
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeAlias

import anyio
import pytest
import torch

import aiopar
from aiopar.testing import Gate
from tests.cancelling import cancel_while_held
from tests.interruptions import at_every_point

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


@pytest.mark.anyio
async def test_cancel_futures_cancels_queued_calls(held: Held) -> None:
    executor, gate = held
    queued = [view.submit(str) for view in (executor, executor.on(worker=0)) * 2]
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            with pytest.raises(concurrent.futures.CancelledError):
                await executor.run_sync(str)

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        executor.shutdown(wait=False)
        executor.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in queued)
    gate.open()
    await executor.aclose()
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


def test_shutdown_from_many_threads_at_once() -> None:
    executor = aiopar.DeviceExecutor(["cpu"] * 2)
    queued = [executor.submit(pow, 2, n) for n in range(100)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(executor.shutdown)
    assert [future.value() for future in queued] == [2**n for n in range(100)]


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


# An executor that drains: its running calls may submit others, which run too.


def _four() -> int:
    return 4


@pytest.mark.parametrize(
    "nested",
    [
        lambda _: aiopar.wait_all([aiopar.fork(_four) for _ in range(2)]),
        lambda executor: aiopar.wait_all([executor.submit(_four) for _ in range(2)]),
        lambda executor: aiopar.wait_all(executor.submit_all([_four] * 2)),
        lambda _: [aiopar.wait(aiopar.run_sync(_four)) for _ in range(2)],
        lambda _: aiopar.wait(aiopar.parallel_apply([_four] * 2, [()] * 2)),
    ],
    ids=["fork", "submit", "submit_all", "run_sync", "parallel_apply"],
)
def test_a_running_call_may_submit_others(nested: Callable[[object], list[int]]) -> None:
    executor = aiopar.DeviceExecutor(["cpu"] * 3)
    with Gate() as gate, aiopar.use_executor(executor):
        called = executor.submit(lambda: (gate(), nested(executor)))
        gate.wait_entered()
        executor.shutdown(wait=False)
        with pytest.raises(aiopar.ExecutorShutdown):
            executor.submit(str)
        gate.open()
        assert called.result(30) == (None, [4, 4])
    executor.shutdown()
    assert sum(worker.completed for worker in executor.stats().workers) == 3


def test_submitted_calls_may_submit_others(devices: tuple[torch.device, ...]) -> None:
    """Also if no call waits for them: each call only submits the next one."""
    for _ in range(20):
        executor = aiopar.DeviceExecutor(devices)
        last: aiopar.Future[int] = aiopar.Future()

        def link(number: int, last: aiopar.Future[int]) -> None:
            if number == 50:
                last.set_result(number)
            else:
                aiopar.fork(link, number + 1, last)

        with aiopar.use_executor(executor):
            executor.submit(link, 0, last)
        executor.shutdown()
        assert last.done()
        assert last.value() == 50


@pytest.mark.parametrize("workers", [1, 3])
def test_trees_of_calls_that_wait_for_their_children(workers: int) -> None:
    def tree(level: int) -> int:
        children = [aiopar.fork(tree, level - 1) for _ in range(2 if level else 0)]
        return 1 + sum(map(aiopar.wait, children))

    for _ in range(20):
        executor = aiopar.DeviceExecutor(["cpu"] * workers, thread_name_prefix="trees")
        with aiopar.use_executor(executor):
            trees = [executor.submit(tree, 5) for _ in range(4)]
        executor.shutdown()
        assert [made.done() and made.value() for made in trees] == [63] * 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trees")]


def test_a_waiting_call_is_not_drained() -> None:
    """Its worker runs all queued calls, but must not end before the waiting call."""
    executor = aiopar.DeviceExecutor(["cpu"])
    awaited: aiopar.Future[None] = aiopar.Future()

    def call() -> int:
        awaited.wait()
        return aiopar.wait(aiopar.fork(pow, 2, 3))

    with aiopar.use_executor(executor):
        called = executor.submit(call)
    executor.submit(str).result(30)  # on another thread, because the first one waits
    executor.shutdown(wait=False)
    awaited.set_result(None)
    assert called.result(30) == 8
    executor.shutdown()


@pytest.mark.parametrize("workers", [1, 3])
def test_calls_that_the_closing_call_waits_for_may_submit(workers: int) -> None:
    executor = aiopar.DeviceExecutor(["cpu"] * workers)
    with Gate() as gate, aiopar.use_executor(executor):

        def close() -> int:
            gate()
            executor.shutdown()
            return sum(map(aiopar.wait, queued))

        closed = executor.submit(close)
        gate.wait_entered()
        queued = [executor.submit(lambda: aiopar.wait(aiopar.fork(_four))) for _ in range(3)]
        gate.open()
        assert closed.result(30) == 12
    executor.shutdown()


def test_shutdown_in_a_call_of_another_executor_waits() -> None:
    """The worker of that call stays free for calls that the shutdown needs."""
    with aiopar.DeviceExecutor(["cpu"]) as outer:
        inner = aiopar.DeviceExecutor(["cpu"])
        with Gate() as gate:

            def needs_outer() -> int:
                gate()
                return outer.submit(_four).result(30)

            called = inner.submit(needs_outer)
            gate.wait_entered()
            closed = outer.submit(inner.shutdown)
            gate.open()
            closed.result(30)
        assert called.result() == 4


def test_callbacks_of_a_call_may_not_submit() -> None:
    """Otherwise an executor whose callbacks submit the next call would never end."""
    executor = aiopar.DeviceExecutor(["cpu"])
    with Gate() as gate:
        called = executor.submit(gate)
        gate.wait_entered()
        next_call = called.then(lambda _: executor.submit(str))
        executor.shutdown(wait=False)
        gate.open()
        with pytest.raises(aiopar.ExecutorShutdown):
            next_call.result(30)
    executor.shutdown()


def test_no_call_may_submit_after_queued_calls_were_cancelled() -> None:
    executor = aiopar.DeviceExecutor(["cpu"])
    with Gate() as gate, aiopar.use_executor(executor):

        def call() -> None:
            gate()
            aiopar.fork(str)

        called = executor.submit(call)
        gate.wait_entered()
        executor.shutdown(wait=False)
        executor.shutdown(wait=False, cancel_futures=True)
        gate.open()
        with pytest.raises(aiopar.ExecutorShutdown):
            called.result(30)
    executor.shutdown()


def test_a_closed_default_executor_does_not_grow() -> None:
    """A new worker would never be stopped, and the next `shutdown` would hang."""
    executor = aiopar.get_executor()
    executor.shutdown()
    with pytest.raises(aiopar.ExecutorShutdown):
        executor.submit_all([str] * (len(executor.devices) + 1))
    executor.shutdown()


@pytest.mark.parametrize("verb", ["submit", "submit_all"])
def test_a_cancelled_call_does_not_hold_up_the_drain(verb: str) -> None:
    """Not even if the worker falls asleep in the middle of the cancellation."""
    for interruption in at_every_point():
        executor, gate = aiopar.DeviceExecutor(["cpu", "cpu"]), Gate()
        view = executor.on(worker=0)
        worker = view.submit(threading.current_thread).result(10)
        view.submit(gate)
        gate.wait_entered()
        [queued] = view.submit_all([(abs, -1)]) if verb == "submit_all" else [view.submit(abs, -1)]

        def drain(
            executor: aiopar.DeviceExecutor = executor,
            gate: Gate = gate,
            worker: threading.Thread = worker,
        ) -> None:
            executor.shutdown(wait=False)
            gate.open()
            _until_at_rest(worker)

        with interruption.by(drain):
            queued.cancel()
        gate.open()
        executor.shutdown()


def _until_at_rest(thread: threading.Thread) -> None:
    """Return when `thread` has ended, or waits at one place."""
    places: list[object] = []
    while len(places) < 20 or len(set(places[-20:])) > 1:
        frame = sys._current_frames().get(thread.ident or 0)
        places.append(frame and (frame.f_code, frame.f_lasti))
        time.sleep(0.0005)


def test_a_generator_that_is_collected_at_any_point_of_a_shutdown() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        yield 2

    async def begin(executor: aiopar.DeviceExecutor) -> object:
        iteration = executor.iterate(numbers, buffer=0)
        await anext(iteration)
        return iteration

    for interruption in at_every_point():
        executor = aiopar.DeviceExecutor(["cpu"])
        begun = [asyncio.run(begin(executor))]
        with interruption.by(begun.clear):
            executor.shutdown(wait=False)
        begun.clear()
        executor.shutdown()
