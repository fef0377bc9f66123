"""Observers: the events of each call, their order; observers that fail."""

import logging
import threading
from concurrent.futures import CancelledError
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import aiopar
from aiopar.testing import Gate
from tests.home import AtHome
from tests.workers import MakeWorkers

EVENTS = ["enqueue", "start", "launched", "completed"]


def broken(error: type[BaseException]) -> Any:
    """An observer that fails in each event."""
    fail = {f"{event}.side_effect": error("of the observer") for event in EVENTS}
    return Mock(spec=aiopar.ExecutorObserver, **fail)


class Recorder(aiopar.ExecutorObserver):
    """Records every event, and its thread."""

    def __init__(self) -> None:
        self.events: list[tuple[str, aiopar.CallInfo, Any]] = []
        self.threads: list[str] = []

    def _note(self, event: str, call: aiopar.CallInfo, error: BaseException | None = None) -> None:
        self.events.append((event, call, error))
        self.threads.append(threading.current_thread().name)

    def enqueue(self, call: aiopar.CallInfo) -> None:
        self._note("enqueue", call)

    def start(self, call: aiopar.CallInfo) -> None:
        self._note("start", call)

    def launched(self, call: aiopar.CallInfo) -> None:
        self._note("launched", call)

    def completed(self, call: aiopar.CallInfo, error: BaseException | None) -> None:
        self._note("completed", call, error)


@pytest.mark.parametrize(("workers", "known"), [(1, 0), (2, None)])
def test_enqueue_tells_the_worker_if_only_one_can_run_the_call(
    workers: int, known: int | None
) -> None:
    noted: list[int | None] = []
    observer = Mock(spec=aiopar.ExecutorObserver)
    observer.enqueue.side_effect = lambda call: noted.append(call.worker)
    with aiopar.DeviceExecutor(["cpu"] * workers) as executor:
        executor.add_observer(observer)
        executor.submit(abs, -1)
        executor.on("cpu").submit(abs, -1)
        executor.on(worker=0).submit(abs, -1)
    assert noted == [known, known, 0]


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["run_sync", "submit"])
async def test_events_of_a_call_come_in_order(verb: str, devices: tuple[torch.device, ...]) -> None:
    async with aiopar.DeviceExecutor(devices) as executor:
        recorder = Recorder()
        executor.add_observer(recorder)
        last = executor.on(worker=len(devices) - 1)
        assert await getattr(last, verb)(divmod, 7, 2) == (3, 1)
        events = recorder.events
        assert [event for event, _, _ in events] == EVENTS
        call = events[0][1]
        assert all(seen is call for _, seen, _ in events)
        assert (call.fn, call.device, call.worker) == (divmod, devices[-1], len(devices) - 1)
        assert [error for _, _, error in events] == [None] * 4
        assert recorder.threads[0] == threading.current_thread().name
        assert threading.current_thread().name not in recorder.threads[1:]


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["run_sync", "submit"])
async def test_a_call_that_fails_completes_with_its_error(
    make_workers: MakeWorkers, verb: str
) -> None:
    async with make_workers(2) as executor:
        recorder = Recorder()
        executor.add_observer(recorder)
        with pytest.raises(ZeroDivisionError) as caught:
            await getattr(executor.on(worker=1), verb)(divmod, 1, 0)
    assert [event for event, _, _ in recorder.events] == EVENTS
    assert recorder.events[-1][2] is caught.value
    [call] = {call for _, call, _ in recorder.events}
    assert (call.fn, call.device, call.worker) == (divmod, torch.device("cpu"), 1)


@pytest.mark.anyio
async def test_a_call_that_is_cancelled_completes_and_never_starts(
    make_workers: MakeWorkers,
) -> None:
    async with make_workers(1) as executor:
        with Gate() as gate:
            executor.submit(AtHome(gate))
            await gate.entered()
            recorder = Recorder()
            executor.add_observer(recorder)
            assert executor.submit(str).cancel()
        await executor.submit(int)
    (first, call, _), (second, same, error), *later = recorder.events
    assert (first, second) == ("enqueue", "completed")
    assert call is same
    assert isinstance(error, CancelledError)
    assert {later_call.fn for _, later_call, _ in later} == {int}


@pytest.mark.anyio
async def test_events_of_a_call_that_its_waiter_runs() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        recorder = Recorder()

        def outer() -> int:
            inner = executor.submit(pow, 2, 5)
            executor.on("cpu").add_observer(recorder)  # a view adds it to its executor
            return inner.wait() + executor.submit(pow, 2, 6).wait()

        assert await executor.run_sync(outer) == 96
    assert [event for event, _, _ in recorder.events] == EVENTS


@pytest.mark.anyio
@pytest.mark.parametrize("error", [LookupError, SystemExit])
async def test_an_error_of_an_observer_is_logged(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        executor.add_observer(broken(error))
        executor.add_observer(recorder)
        with caplog.at_level(logging.ERROR, "aiopar"):
            assert await executor.run_sync(pow, 2, 5) == 32
            assert await executor.submit(pow, 2, 6) == 64
    assert len(recorder.events) == 8
    # asyncio's debug mode logs too, if a busy machine makes a step slow.
    assert [record.name for record in caplog.records if record.name != "asyncio"] == ["aiopar"] * 8
    assert "failed in enqueue()" in caplog.text
    assert "of the observer" in caplog.text


def test_ctrl_c_in_an_observer_reaches_the_main_thread() -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        executor.add_observer(broken(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            executor.submit(str)


@pytest.mark.anyio
async def test_an_observer_sees_calls_queued_between_add_and_remove() -> None:
    first, second = Recorder(), Recorder()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        await executor.run_sync(str)
        executor.add_observer(first)
        executor.add_observer(second)
        with Gate() as gate:
            held = executor.submit(gate)
            await gate.entered()
            executor.remove_observer(first)
            executor.remove_observer(first)  # a second time: nothing happens
        await held
        await executor.run_sync(str)
        executor.remove_observer(second)
        await executor.run_sync(str)
    assert len(first.events) == 4, "it sees all events of a call that it saw queued"
    assert len(second.events) == 8


def test_methods_of_one_object_are_called() -> None:
    """Mocks of users' tests, and methods that are set on an object, are not in its class."""
    mock = Mock(spec=aiopar.ExecutorObserver)
    observer = aiopar.ExecutorObserver()
    events: list[str] = []
    observer.launched = lambda call: events.append("launched")  # type: ignore[method-assign]
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        executor.add_observer(mock)
        executor.add_observer(observer)
        executor.submit(abs, -1).result()
    mock.completed.assert_called_once()
    assert events == ["launched"]


@pytest.mark.parametrize("given", [print, None, Recorder])
def test_other_objects_are_refused(given: Any) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        with pytest.raises(TypeError, match="observer must be an ExecutorObserver, not "):
            executor.add_observer(given)
        assert executor.submit(pow, 2, 3).result() == 8
