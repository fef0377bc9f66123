"""Calls that wait for calls, on any number of workers; a system without more threads."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial

import anyio
import pytest
import torch

import aiopar
from aiopar.testing import Gate
from tests.interruptions import at_every_point
from tests.no_threads import NO_THREAD, no_more_threads


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def executor(request: pytest.FixtureRequest) -> Iterator[aiopar.DeviceExecutor]:
    """An executor; after the test it has at most one thread per worker."""
    prefix = request.node.name
    with aiopar.DeviceExecutor(["cpu"] * request.param, thread_name_prefix=prefix) as executor:
        yield executor
        serving = [
            executor.on(worker=worker).submit(threading.current_thread).result()
            for worker in range(request.param)
        ]
        for thread in threading.enumerate():
            if thread.name.startswith(prefix) and thread not in serving:
                thread.join(10)  # it has handed over its worker
                assert not thread.is_alive()
        assert [w.running + w.queued for w in executor.stats().workers] == [0] * request.param


def test_a_chain_of_three_thousand_calls(executor: aiopar.DeviceExecutor) -> None:
    def chain(depth: int) -> int:
        return 1 + aiopar.wait(executor.submit(chain, depth - 1)) if depth else 0

    assert executor.submit(chain, 3000).result() == 3000


def test_nested_calls_may_wait_by_result(executor: aiopar.DeviceExecutor) -> None:
    # `result` blocks its thread: another thread serves the queue.
    def tree(level: int) -> int:
        if not level:
            return 1
        children = [executor.submit(tree, level - 1) for _ in range(2)]
        return 1 + sum(child.result() for child in children)

    assert executor.submit(tree, 6).result() == 2**7 - 1


def test_nested_calls_run_under_the_state_of_their_caller(
    executor: aiopar.DeviceExecutor,
) -> None:
    def levels(depth: int) -> list[bool]:
        if not depth:
            return [torch.is_grad_enabled()]
        with torch.set_grad_enabled(bool(depth % 2)):
            inner = executor.submit(levels, depth - 1)
            below = aiopar.wait(inner)
            assert torch.is_grad_enabled() == bool(depth % 2), (
                "the call that ran inside does not change it"
            )
        return [torch.is_grad_enabled(), *below]

    expected = [True] + [bool(depth % 2) for depth in range(60, 0, -1)]
    assert executor.submit(levels, 60).result() == expected


def test_a_queue_is_served_while_a_call_waits_for_another_executor(
    executor: aiopar.DeviceExecutor,
) -> None:
    with Gate() as gate:
        started = executor.submit(gate, "through")
        gate.wait_entered()
        other = aiopar.DeviceExecutor(["cpu"])
        with other:
            waiting = other.submit(aiopar.wait, started)
            behind = other.submit(pow, 2, 5)
            assert behind.result(10) == 32, "the queue is served while the call waits"
            gate.open()
            assert waiting.result(10) == "through"


@pytest.mark.anyio
async def test_many_tasks_await_calls_that_wait_for_calls(
    executor: aiopar.DeviceExecutor,
) -> None:
    results: list[int] = []

    def outer(n: int) -> int:
        return aiopar.wait(executor.submit(pow, n, 2)) + executor.submit(pow, n, 3).result()

    async def task(n: int) -> None:
        results.append(await executor.run_sync(outer, n))

    async with anyio.create_task_group() as tasks:
        for n in range(50):
            tasks.start_soon(task, n)
    assert sorted(results) == [n**2 + n**3 for n in range(50)]


def test_shutdown_cancels_a_call_behind_calls_that_another_worker_ran() -> None:
    with aiopar.DeviceExecutor(["cpu"] * 2) as executor, Gate() as first, Gate() as second:
        executor.on(worker=0).submit(first)
        executor.on(worker=1).submit(second)
        first.wait_entered()
        second.wait_entered()
        taken_over = [executor.submit(str) for _ in range(4)]
        second.open()
        assert [future.result() for future in taken_over] == [""] * 4
        pinned = executor.on(worker=0).submit(str)
        executor.shutdown(wait=False, cancel_futures=True)
        assert pinned.cancelled()


def test_a_callback_that_waits_leaves_the_stats_right() -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        with Gate() as gate:
            held = executor.submit(gate)
            gate.wait_entered()
            behind = executor.submit(abs, -1)
            waited: list[int] = []
            held.add_done_callback(lambda _: waited.append(behind.result()))
        assert executor.submit(abs, -2).result() == 2
        assert behind.result() == 1
    assert waited == [1]
    [stats] = executor.stats().workers
    assert (stats.queued, stats.running, stats.completed) == (0, 0, 3)


class TestNoMoreThreads:
    """A call that needs a new thread gets an error, and no other call is lost."""

    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_a_call_is_refused_and_does_not_run_later(self, workers: int) -> None:
        ran: list[int] = []
        with aiopar.DeviceExecutor(["cpu"] * workers) as executor:
            for n in range(5):
                with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
                    executor.submit(ran.append, n)
            assert [w.running + w.queued for w in executor.stats().workers] == [0] * workers
            with Gate() as gate:
                held = [executor.submit(gate) for _ in range(workers)]
                gate.wait_entered(workers)  # all workers still serve
            aiopar.wait_all(held)
        assert ran == []

    def test_a_call_for_one_worker_is_refused_and_does_not_run_later(self) -> None:
        ran: list[int] = []
        with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
            one = executor.on(worker=1)
            with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
                one.submit(ran.append, 1)
            assert one.submit(abs, -1).result(10) == 1
        assert ran == []

    @pytest.mark.asyncio
    @pytest.mark.parametrize("workers", [1, 2])
    async def test_an_awaited_call_is_refused(self, workers: int) -> None:
        ran: list[int] = []
        async with aiopar.DeviceExecutor(["cpu"] * workers, max_pending=1) as executor:
            for _ in range(3):  # the refused calls take no room
                with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
                    await executor.run_sync(ran.append, 1)
            assert await executor.run_sync(abs, -1) == 1
        assert ran == []

    def test_a_call_that_a_running_worker_takes_is_not_refused(self) -> None:
        with aiopar.DeviceExecutor(["cpu"] * 2) as executor, Gate() as gate:
            first = executor.submit(gate, "first")
            gate.wait_entered()
            taken = threading.Event()

            def start(_: object) -> None:
                gate.open()
                assert taken.wait(10), "by the first worker, while the second cannot be started"
                raise RuntimeError(NO_THREAD)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("threading.Thread.start", start)
                assert executor.submit(taken.set).result(10) is None
            assert first.result(10) == "first"

    def test_all_calls_of_a_gang_are_refused(self) -> None:
        ran: list[int] = []
        with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
            executor.on(worker=0).submit(str).result(10)  # this worker has a thread
            calls = [partial(ran.append, n) for n in range(2)]
            with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
                executor.submit_all(calls)
            assert [w.running + w.queued for w in executor.stats().workers] == [0, 0]
            executor.submit_all([str, str])[1].result(10)
        assert ran in ([], [0]), "the first call may have run before the second was refused"

    def test_a_gang_that_waited_for_room_is_cancelled(self) -> None:
        with aiopar.DeviceExecutor(["cpu"] * 2, max_pending=1) as executor, Gate() as gate:
            one = executor.on(worker=0)
            held = one.submit(gate)
            gate.wait_entered()
            queued = one.submit(str)
            members = executor.submit_all([str, str])
            with no_more_threads():
                gate.open()
                held.result(10)
                queued.result(10)
                with pytest.raises(CancelledError):
                    members[1].result(10)
            assert executor.submit_all([str, str])[1].result(10) == ""

    def test_a_call_that_blocks_gets_an_error(self) -> None:
        with aiopar.DeviceExecutor(["cpu"]) as executor:

            def waits() -> int:
                behind.append(executor.submit(abs, -1))
                with no_more_threads():
                    return behind[0].result()

            behind: list[aiopar.Future[int]] = []
            with pytest.raises(RuntimeError, match=NO_THREAD):
                executor.submit(waits).result(10)
            assert behind[0].result(10) == 1
            assert executor.submit(abs, -2).result(10) == 2
            [stats] = executor.stats().workers
            assert (stats.queued, stats.running) == (0, 0)

    def test_an_event_loop_in_a_call_gets_an_error_and_queues_nothing(self) -> None:
        ran: list[int] = []
        with aiopar.DeviceExecutor(["cpu"]) as executor:

            async def main() -> None:
                await executor.run_sync(ran.append, 1)

            def loop() -> None:
                with no_more_threads():
                    anyio.run(main)

            with pytest.raises(RuntimeError, match=NO_THREAD):
                executor.submit(loop).result(10)
            assert executor.submit(abs, -2).result(10) == 2
        assert ran == []


def test_a_signal_handler_may_submit_at_any_point_of_the_first_call() -> None:
    for interruption in at_every_point():
        submitted: list[aiopar.Future[int]] = []
        with aiopar.DeviceExecutor(["cpu"]) as executor:
            submit = partial(executor.submit, abs, -2)
            with interruption.by(partial(_append, submitted, submit)):
                first = executor.submit(abs, -1)
            assert first.result(10) == 1
            assert [future.result(10) for future in submitted] == [2] * interruption.came
            [stats] = executor.stats().workers
            assert (stats.queued, stats.running) == (0, 0)


def _append(submitted: list[aiopar.Future[int]], submit: Callable[[], aiopar.Future[int]]) -> None:
    submitted.append(submit())


def test_one_worker_runs_calls_in_the_order_of_submission() -> None:
    ran: list[str] = []
    with aiopar.DeviceExecutor(["cpu"]) as executor, Gate() as gate:
        executor.submit(gate)
        gate.wait_entered()
        for index in range(2):
            executor.submit(ran.append, f"submit {index}")
            executor.submit_all([(ran.append, f"gang {index}")])
            executor.on(worker=0).submit(ran.append, f"worker {index}")
            executor.on("cpu").submit(ran.append, f"device {index}")
    assert ran == [
        f"{kind} {i}" for i in range(2) for kind in ("submit", "gang", "worker", "device")
    ]
