"""A worker and its threads: which calls they run, calls that wait, a system without threads."""

import logging
import queue
import threading
from collections.abc import Iterator
from functools import partial

import anyio
import pytest

import aiopar
from aiopar.testing import Gate
from tests.interruptions import at_every_point
from tests.no_threads import NO_THREAD, no_more_threads


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def executor(request: pytest.FixtureRequest) -> Iterator[aiopar.DeviceExecutor]:
    with aiopar.DeviceExecutor(["cpu"] * request.param) as executor:
        yield executor
    assert [w.running + w.queued for w in executor.stats().workers] == [0] * request.param


def test_nested_calls_may_wait_by_result(executor: aiopar.DeviceExecutor) -> None:
    # `result` blocks its thread: another thread serves the queue.
    def tree(level: int) -> int:
        if not level:
            return 1
        children = [executor.submit(tree, level - 1) for _ in range(2)]
        return 1 + sum(child.result() for child in children)

    assert executor.submit(tree, 6).result() == 2**7 - 1


@pytest.mark.anyio
async def test_many_tasks_await_calls_that_wait_for_calls(executor: aiopar.DeviceExecutor) -> None:
    results: list[int] = []

    def outer(n: int) -> int:
        return aiopar.wait(executor.submit(pow, n, 2)) + executor.submit(pow, n, 3).result()

    async def task(n: int) -> None:
        results.append(await executor.run_sync(outer, n))

    async with anyio.create_task_group() as tasks:
        for n in range(50):
            tasks.start_soon(task, n)
    assert sorted(results) == [n**2 + n**3 for n in range(50)]


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

    @pytest.mark.asyncio
    @pytest.mark.parametrize("max_pending", [None, 1])
    @pytest.mark.parametrize("workers", [1, 2, 3])
    async def test_a_call_is_refused_and_does_not_run_later(
        self, workers: int, max_pending: int | None
    ) -> None:
        ran: list[int] = []
        executor = aiopar.DeviceExecutor(["cpu"] * workers, max_pending=max_pending)
        async with executor:
            one = executor.on(worker=workers - 1)
            for submit in (executor.submit, one.submit, executor.run_sync) * 3:
                with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
                    await submit(ran.append, 1)
            assert [w.running + w.queued for w in executor.stats().workers] == [0] * workers
            with Gate() as gate:  # no worker and no room was lost
                for view in (executor.on(worker=index) for index in range(workers)):
                    view.submit(gate)
                await gate.entered(workers)
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

    @pytest.mark.parametrize("in_loop", [False, True])
    def test_a_call_that_blocks_gets_an_error(self, in_loop: bool) -> None:
        ran: list[int] = []
        with aiopar.DeviceExecutor(["cpu"]) as executor:

            async def main() -> None:
                await executor.run_sync(ran.append, 1)

            def waits() -> None:
                behind.append(executor.submit(ran.append, 0))
                with no_more_threads():
                    anyio.run(main) if in_loop else behind[0].result()

            behind: list[aiopar.Future[None]] = []
            with pytest.raises(RuntimeError, match=NO_THREAD):
                executor.submit(waits).result(10)
            behind[0].result(10)
            [stats] = executor.stats().workers
            assert (stats.queued, stats.running) == (0, 0)
        assert ran == [0], "an event loop queues nothing"


@pytest.mark.parametrize("max_pending", [None, 2])
def test_a_signal_handler_may_submit_at_any_point_of_the_first_call(
    max_pending: int | None,
) -> None:
    for interruption in at_every_point():
        submitted: list[aiopar.Future[int]] = []
        with aiopar.DeviceExecutor(["cpu"], max_pending=max_pending) as executor:
            with interruption.by(lambda e=executor, s=submitted: s.append(e.submit(abs, -2))):  # type: ignore[misc]
                first = executor.submit(abs, -1)
            assert first.result(10) == 1
            assert [future.result(10) for future in submitted] == [2] * interruption.came
            [stats] = executor.stats().workers
            assert (stats.queued, stats.running) == (0, 0)


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


def test_an_executor_runs_its_calls_on_its_own_workers() -> None:
    """An executor with one worker runs one call at a time, whichever worker waits for it."""
    with aiopar.DeviceExecutor(["cpu"] * 2) as outer, aiopar.DeviceExecutor(["cpu"]) as inner:

        def ask() -> threading.Thread:
            call = inner.submit(threading.current_thread)
            asked.put(None)
            return call.wait()

        asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        with Gate() as gate:
            inner.submit(gate)
            gate.wait_entered()
            calls = [outer.submit(ask) for _ in range(4)]
            for _ in calls:  # each waits or is about to wait, and its call is queued
                asked.get(timeout=30)
        assert {call.result() for call in calls} == {
            inner.submit(threading.current_thread).result()
        }


def test_a_call_for_one_worker_runs_there() -> None:
    with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
        one, other = executor.on(worker=0), executor.on(worker=1)

        def ask(view: aiopar.DeviceExecutor) -> threading.Thread:
            return view.submit(threading.current_thread).wait()

        thread = other.submit(threading.current_thread).result()
        assert one.submit(ask, other).result() is thread
        # Its own worker may run it, because that worker's thread waits.
        assert other.submit(ask, other).result() is thread


def test_a_waiting_worker_runs_calls_of_the_default_executor() -> None:
    """A thousand calls that wait for such calls do not need a thread each."""

    def ask(_: int) -> threading.Thread:
        return aiopar.wait(aiopar.get_executor().submit(threading.current_thread))

    aiopar.get_executor().shutdown(wait=False)  # other tests may have left calls in its workers
    default = aiopar.get_executor()
    with Gate() as gate, aiopar.DeviceExecutor(["cpu"]) as executor:
        held = [default.submit(gate) for _ in default.devices]
        gate.wait_entered(len(held))
        [thread] = set(executor.map(ask, range(1000)))
        assert thread is executor.submit(threading.current_thread).result()


def test_ctrl_c_while_a_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with aiopar.DeviceExecutor(["cpu"]) as executor:
        with monkeypatch.context() as patched:
            patched.setattr("threading.Thread.start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                executor.submit(ran.append, 1)
        assert executor.submit(abs, -1).result(10) == 1
    assert ran == []


def test_a_call_whose_future_was_completed_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor, Gate() as gate:
        future = executor.submit(gate, "of the call")
        gate.wait_entered()
        future.set_result("by hand")
        with caplog.at_level(logging.ERROR, "aiopar"):
            gate.open()
            assert executor.submit(abs, -1).result(10) == 1, "the worker goes on"
        assert future.result() == "by hand"
    assert "already finished" in caplog.text
    [stats] = executor.stats().workers
    assert (stats.queued, stats.running) == (0, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("own", [False, True], ids=["any worker", "this worker"])
def test_another_thread_serves_after_an_error_has_ended_one(own: bool) -> None:
    """The error comes from a logging filter of the user, outside of calls."""

    class Failing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("of the filter")

    failing = Failing()
    logger = logging.getLogger("aiopar")
    with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor, Gate() as gate, Gate() as other:
        worker = executor.on(worker=0)
        thread = worker.submit(threading.current_thread).result(10)
        executor.on(worker=1).submit(other)
        held = worker.submit(gate)
        gate.wait_entered()
        other.wait_entered()
        held.set_result(None)  # the worker cannot complete it again, and logs that
        waiting = (worker if own else executor).submit(abs, -1)
        logger.addFilter(failing)
        try:
            gate.open()
            thread.join(10)
            assert not thread.is_alive()
        finally:
            logger.removeFilter(failing)
        assert waiting.result(10) == 1
        assert worker.submit(abs, -2).result(10) == 2
