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
    """An executor whose threads, when the test is over, are as many as its workers, or fewer."""
    prefix = request.node.name
    with aiopar.DeviceExecutor(["cpu"] * request.param, thread_name_prefix=prefix) as executor:
        yield executor
        serving = [
            executor.on(worker=worker).submit(threading.current_thread).result()
            for worker in range(request.param)
        ]
        for thread in threading.enumerate():
            if thread.name.startswith(prefix) and thread not in serving:
                thread.join(10)  # a waiting call left it: it is about to end
                assert not thread.is_alive()
        assert [w.running + w.queued for w in executor.stats().workers] == [0] * request.param


def test_ten_levels_of_two_children_each(executor: aiopar.DeviceExecutor) -> None:
    def tree(level: int) -> int:
        if not level:
            return 1
        children = [executor.submit(tree, level - 1) for _ in range(2)]
        return 1 + sum(aiopar.wait(child) for child in children)

    assert executor.submit(tree, 10).result() == 2**11 - 1


def test_a_chain_three_thousand_deep(executor: aiopar.DeviceExecutor) -> None:
    def chain(depth: int) -> int:
        return 1 + aiopar.wait(executor.submit(chain, depth - 1)) if depth else 0

    assert executor.submit(chain, 3000).result() == 3000


def test_a_thousand_children_of_one_call(executor: aiopar.DeviceExecutor) -> None:
    def wide() -> list[int]:
        children = [executor.submit(pow, n, 2) for n in range(1000)]
        return aiopar.wait_all(children)

    assert executor.submit(wide).result() == [n * n for n in range(1000)]


def test_waits_that_aiopar_cannot_run_itself(executor: aiopar.DeviceExecutor) -> None:
    # `result` of concurrent.futures blocks: the queue goes on in another thread.
    def tree(level: int) -> int:
        if not level:
            return 1
        children = [executor.submit(tree, level - 1) for _ in range(2)]
        return 1 + sum(child.result() for child in children)

    assert executor.submit(tree, 6).result() == 2**7 - 1


def test_every_call_at_every_level_sees_the_state_it_was_made_under(
    executor: aiopar.DeviceExecutor,
) -> None:
    def levels(depth: int) -> list[bool]:
        if not depth:
            return [torch.is_grad_enabled()]
        with torch.set_grad_enabled(bool(depth % 2)):
            inner = executor.submit(levels, depth - 1)
            below = aiopar.wait(inner)
            assert torch.is_grad_enabled() == bool(depth % 2), "unchanged by what ran inside"
        return [torch.is_grad_enabled(), *below]

    expected = [True] + [bool(depth % 2) for depth in range(60, 0, -1)]
    assert executor.submit(levels, 60).result() == expected


def test_an_error_deep_down_comes_all_the_way_up(executor: aiopar.DeviceExecutor) -> None:
    def chain(depth: int) -> int:
        if not depth:
            raise LookupError("at the bottom")
        return aiopar.wait(executor.submit(chain, depth - 1))

    with pytest.raises(LookupError, match="at the bottom"):
        executor.submit(chain, 100).result()
    assert executor.submit(pow, 2, 5).result() == 32


def test_waiting_for_a_call_that_somebody_else_runs(executor: aiopar.DeviceExecutor) -> None:
    with Gate() as gate:
        started = executor.submit(gate, "through")
        gate.wait_entered()
        other = aiopar.DeviceExecutor(["cpu"])
        with other:
            waiting = other.submit(aiopar.wait, started)
            behind = other.submit(pow, 2, 5)
            assert behind.result(10) == 32, "its queue goes on while the call waits"
            gate.open()
            assert waiting.result(10) == "through"


@pytest.mark.anyio
async def test_many_tasks_wait_for_calls_that_wait_for_calls(
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


def test_cancelling_what_is_queued_goes_on_past_what_was_taken_over() -> None:
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


def test_a_callback_that_waits_does_not_upset_the_count() -> None:
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
    """The system has no thread left: whoever needs one is told, and nothing else is lost."""

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
                gate.wait_entered(workers)  # none of them was lost with a call
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
    async def test_a_call_that_is_awaited_is_refused(self, workers: int) -> None:
        ran: list[int] = []
        async with aiopar.DeviceExecutor(["cpu"] * workers, max_pending=1) as executor:
            for _ in range(3):  # it takes up no room either
                with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
                    await executor.run_sync(ran.append, 1)
            assert await executor.run_sync(abs, -1) == 1
        assert ran == []

    def test_a_call_that_finds_a_worker_after_all_is_not_refused(self) -> None:
        with aiopar.DeviceExecutor(["cpu"] * 2) as executor, Gate() as gate:
            first = executor.submit(gate, "first")
            gate.wait_entered()
            taken = threading.Event()

            def start(_: object) -> None:
                gate.open()
                assert taken.wait(10), "by the first, while the second cannot be started for it"
                raise RuntimeError(NO_THREAD)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("threading.Thread.start", start)
                assert executor.submit(taken.set).result(10) is None
            assert first.result(10) == "first"

    def test_a_gang_is_refused_whole(self) -> None:
        ran: list[int] = []
        with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
            executor.on(worker=0).submit(str).result(10)  # that one has a thread
            calls = [partial(ran.append, n) for n in range(2)]
            with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
                executor.submit_all(calls)
            assert [w.running + w.queued for w in executor.stats().workers] == [0, 0]
            executor.submit_all([str, str])[1].result(10)
        assert ran in ([], [0]), "it may have run on the first before the second was refused"

    def test_a_gang_that_waited_for_room_is_told(self) -> None:
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

    def test_a_call_that_blocks_is_told_so(self) -> None:
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

    def test_a_loop_in_a_call_that_blocks_is_told_so_and_leaves_nothing_queued(self) -> None:
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


def test_one_worker_runs_calls_of_all_kinds_in_their_order() -> None:
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
