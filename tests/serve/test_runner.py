"""`WorkerRunner`: from batch to batch on one worker, and when callers are told of each."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar._base.thread_state import CallerState
from aiopar.serve import Batcher, BatchInfo, BatchObserver, collate, pad_collate
from aiopar.serve._observer import BatchObservers
from aiopar.serve._outcomes import Part
from aiopar.serve._request import Request
from aiopar.serve._runner import ComputeFunction, WorkerRunner
from aiopar.testing import Gate

from .batches import Callers, until
from .stand_ins import Loop, Waiting as WaitingTask
from .test_scheduler import settings_with


class OneByOne:
    """A schedule of given batches; an empty one is of those that have gone meanwhile."""

    observers: BatchObservers | None = None

    def __init__(self, *batches: Sequence[Any]) -> None:
        self.loop = Loop()
        self.events: list[object] = []
        """What happens, each with how much had been posted to the loop by then."""
        self.over: aiopar.Future[BaseException | None] = aiopar.Future()
        """Done after the last batch; or refused, with that error."""
        self._batches = [[Request(item, WaitingTask(self.loop)) for item in one] for one in batches]
        self.requests = [request for batch in self._batches for request in batch]

    def happens(self, event: str) -> None:
        self.events.append((event, len(self.loop.posted)))

    def take(self, runner: object) -> list[Request]:
        self.happens("take")
        batch = self._batches.pop(0)
        vars(runner)["batch"] = batch
        return batch

    def ended(self, runner: object, batch: Sequence[Request], parts: Sequence[Part]) -> bool:
        return bool(self._batches)

    def told(self) -> None:
        self.posted_when_told = len(self.loop.posted)
        self.over.set_result(None)

    def refused(self, runner: object, error: BaseException) -> None:
        self.over.set_result(error)

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)

    @property
    def results(self) -> list[Any]:
        """Of each request, when all that was posted is delivered."""
        for delivery in self.loop.posted:
            delivery.deliver()
        return [request.error or request.result for request in self.requests]


def run(
    executor: aiopar.DeviceExecutor, schedule: OneByOne, fn: Callable[[Any], Any], **options: Any
) -> None:
    compute = ComputeFunction(fn, settings_with(**options))
    WorkerRunner(schedule, executor, compute, CallerState()).start()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each look at the clock adds to it, in seconds."""
    pace, now = [0.0], [0.0]

    def perf_counter() -> float:
        now[0] += pace[0]
        return now[0]

    monkeypatch.setattr("aiopar.serve._runner.perf_counter", perf_counter)
    return pace


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("how", [collate, list, functools.partial(pad_collate, multiple_of=2)])
def test_callers_are_told_of_a_batch_when_the_next_one_is_made(how: Callable[..., Any]) -> None:
    schedule = OneByOne([torch.ones(1)], [torch.zeros(1)], [torch.ones(1)])

    def fn(batch: object) -> list[str]:
        schedule.happens("fn")
        return ["output"]

    with aiopar.DeviceExecutor(["cpu"]) as executor:
        run(executor, schedule, fn, collate_fn=how)
        schedule.over.result(30)
    assert schedule.events == [
        *[("take", 0), ("fn", 0)],
        *[("take", 0), ("fn", 1)],
        *[("take", 1), ("fn", 2)],
    ]
    assert schedule.posted_when_told == 3
    assert schedule.results == ["output"] * 3


def test_they_are_told_at_once_where_code_of_the_users_makes_the_next_one() -> None:
    schedule = OneByOne("a", "b")

    def collate_fn(items: list[str]) -> list[str]:
        schedule.happens("collate")
        return items

    with aiopar.DeviceExecutor(["cpu"]) as executor:
        run(executor, schedule, list, collate_fn=collate_fn)
        schedule.over.result(30)
    assert schedule.events == [("take", 0), ("collate", 0), ("take", 1), ("collate", 1)]
    assert schedule.results == ["a", "b"]


def test_they_are_told_at_once_where_batches_take_long_to_make(clock: list[float]) -> None:
    clock[0] = 0.002
    schedule = OneByOne("a", "b")
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        run(executor, schedule, list, collate_fn=list)
        schedule.over.result(30)
    assert schedule.events == [("take", 0), ("take", 1)]
    assert schedule.results == ["a", "b"]


@pytest.mark.usefixtures("clock")
def test_they_are_told_before_observers_of_the_next_one() -> None:
    schedule = OneByOne("a", "b")

    class Looking(BatchObserver):
        def start(self, batch: BatchInfo) -> None:
            schedule.happens("start")

    schedule.observers = BatchObservers((Looking(),))
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        run(executor, schedule, list, collate_fn=list)
        schedule.over.result(30)
    assert schedule.events == [("take", 0), ("start", 0), ("take", 0), ("start", 1)]
    assert schedule.results == ["a", "b"]


@pytest.mark.usefixtures("clock")
def test_an_observer_that_waits_leaves_no_batch_behind() -> None:
    """Its thread hands the worker over to another, which runs the next batch."""

    class Waiting(aiopar.ExecutorObserver):
        waits = False

        def enqueue(self, call: aiopar.CallInfo) -> None:
            if self.waits:
                self.waits = False
                executor.submit(int).result(30)

    observer = Waiting()
    schedule = OneByOne("a", "b", "c")
    with aiopar.DeviceExecutor(["cpu"]) as executor, Gate() as gate:
        executor.add_observer(observer)
        run(executor, schedule, gate, collate_fn=list)
        gate.wait_entered()
        observer.waits = True
        gate.open()
        schedule.over.result(30)
    assert schedule.results == ["a", "b", "c"]
    [worker] = executor.stats().workers
    assert (worker.queued, worker.running, worker.completed) == (0, 0, 4)


@pytest.mark.usefixtures("clock")
def test_they_are_told_though_the_next_one_cannot_be_made() -> None:
    schedule = OneByOne([torch.ones(1)], [torch.ones(1), torch.ones(2)])
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        run(executor, schedule, torch.sum)
        schedule.over.result(30)
    assert len(schedule.loop.posted) == 2
    assert [type(result) for result in schedule.results] == [aiopar.OutputMismatch] * 3


@pytest.mark.usefixtures("clock")
def test_they_are_told_though_those_of_the_next_one_have_gone() -> None:
    schedule = OneByOne("a", "")
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        run(executor, schedule, list, collate_fn=list)
        schedule.over.result(30)
    assert schedule.results == ["a"]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_call_that_waits_goes_before_the_next_batch(pinned: bool) -> None:
    schedule = OneByOne("a", "b")
    with aiopar.DeviceExecutor(["cpu"]) as executor, Gate() as gate:

        def fn(batch: list[str]) -> list[str]:
            schedule.happens("fn")
            return gate(batch)

        run(executor, schedule, fn, collate_fn=list)
        gate.wait_entered()
        other = executor.on(worker=0) if pinned else executor
        other.submit(schedule.happens, "other")
        gate.open()
        schedule.over.result(30)
    assert schedule.events == [("take", 0), ("fn", 0), ("other", 1), ("take", 1), ("fn", 1)]
    assert schedule.results == ["a", "b"]


def test_there_is_no_next_batch_on_an_executor_that_was_shut_down() -> None:
    schedule = OneByOne("a", "b")
    with aiopar.DeviceExecutor(["cpu"]) as executor, Gate() as gate:
        run(executor, schedule, gate, collate_fn=list)
        gate.wait_entered()
        executor.shutdown(wait=False)
        gate.open()
        assert isinstance(schedule.over.result(30), aiopar.ExecutorShutdown)
    assert schedule.results == ["a", None]


def test_each_batch_is_a_call_to_observers_of_the_executor() -> None:
    class Counting(aiopar.ExecutorObserver):
        events: list[str]

        def enqueue(self, call: aiopar.CallInfo) -> None:
            self.events.append("enqueue")

        def completed(self, call: aiopar.CallInfo, error: BaseException | None) -> None:
            self.events.append("completed")

    observer = Counting()
    observer.events = []
    schedule = OneByOne("a", "b", "c")
    with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
        executor.add_observer(observer)
        run(executor, schedule, list, collate_fn=list)
        schedule.over.result(30)
    assert sorted(observer.events) == ["completed"] * 3 + ["enqueue"] * 3
    workers = executor.stats().workers
    assert sum(one.completed for one in workers) == 3
    assert {(one.queued, one.running) for one in workers} == {(0, 0)}


@pytest.mark.anyio
async def test_a_batch_that_waits_for_who_awaits_the_last_one() -> None:
    """What users' code makes a batch of may come of the outcome of the one before."""
    with Gate() as first, Gate() as told:

        def collate_fn(items: list[str]) -> list[str]:
            if items != ["first"]:
                told()
            return items

        def fn(items: list[str]) -> list[str]:
            if items == ["first"]:
                first()
            return items

        batcher = Batcher(fn, collate_fn=collate_fn)
        async with batcher, anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            callers.call("first")
            await first.entered()
            await callers.queue("next")
            first.open()
            await until(lambda: "first" in callers.outcomes)
            told.open()
    assert callers.outcomes == {"first": "first", "next": "next"}
