"""The thread of a worker: the calls it may run, the state it restores, how it ends."""

import logging
import queue
import threading

import pytest
import torch

import aiopar
from aiopar.testing import Gate


def test_a_worker_restores_the_state_after_a_call() -> None:
    def leave() -> None:
        torch.set_grad_enabled(False)
        torch.inference_mode().__enter__()
        torch.autocast("cpu").__enter__()  # type: ignore[no-untyped-call]  # torch does not say
        torch.set_default_device("meta")

    def state() -> tuple[bool, bool, bool, str]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.empty(0).device.type,
        )

    with aiopar.DeviceExecutor(["cpu"]) as executor:
        for _ in range(3):
            executor.submit(leave).result()
            assert executor.submit(state).result() == (True, False, False, "cpu")


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
