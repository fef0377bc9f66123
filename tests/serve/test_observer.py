"""Observers of a `Batcher`: the events of items, batches and streams."""

import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

import anyio
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import nn

import aiopar
from aiopar.serve import Batcher, BatchInfo, BatchObserver, ItemInfo, PrometheusMetrics, ReplicaPool
from aiopar.testing import Gate

from .batches import Busy, Recorder, busy, current_executor, outcomes_in, until
from .replicas import Scale, X
from .streams import Counting, idle

pytestmark = pytest.mark.anyio


class Watcher(BatchObserver):
    """Notes every event: its name, its subject, its other argument, its thread.

    Args:
        also: Called in each event.
    """

    def __init__(self, also: Callable[[], object] = lambda: None) -> None:
        self._also = also
        self.events: list[tuple[str, Any, Any, threading.Thread]] = []

    def _note(self, event: str, subject: Any, value: Any = None) -> None:
        self.events.append((event, subject, value, threading.current_thread()))
        self._also()

    def enqueue(self, item: ItemInfo) -> None:
        self._note("enqueue", item)

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        self._note("completed", item, error)

    def start(self, batch: BatchInfo) -> None:
        self._note("start", batch)

    def compute(self, batch: BatchInfo, size: int) -> None:
        self._note("compute", batch, size)

    def computed(self, batch: BatchInfo, error: BaseException | None) -> None:
        self._note("computed", batch, error)

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        self._note("ended", batch, error)

    @property
    def names(self) -> list[str]:
        """The names of the events, in order."""
        return [event for event, *_ in self.events]

    def of(self, event: str) -> list[tuple[Any, Any]]:
        """The subject and the other argument of each event with this name."""
        return [(subject, value) for name, subject, value, _ in self.events if name == event]

    @property
    def batches(self) -> list[BatchInfo]:
        """The batches that have ended."""
        return [batch for batch, _ in self.of("ended")]


A_BATCH = ["enqueue", "start", "compute", "computed", "ended", "completed"]


async def test_events_of_an_item_and_its_batch(devices: tuple[torch.device, ...]) -> None:
    watcher = Watcher()
    x = torch.ones(3, device=devices[0])
    async with current_executor(devices[:1]), Batcher(torch.square) as batcher:
        batcher.add_observer(watcher)
        assert (await batcher(x, priority=4)).tolist() == [1.0, 1.0, 1.0]
        assert watcher.names == A_BATCH, "all events have come when the caller gets its output"
    (item, _), (batch, _) = watcher.of("enqueue")[0], watcher.of("start")[0]
    subjects = [subject for _, subject, _, _ in watcher.events]
    assert subjects == [item, batch, batch, batch, batch, item]
    assert list(batch.items) == [item]
    assert (item.priority, item.refused) == (4, None)
    assert (batch.device, batch.replica) == (devices[0], None)
    assert (batch.outputs, batch.errors) == (1, 0)
    assert item.arrived <= batch.began
    assert batch.seconds > 0
    assert watcher.of("compute") == [(batch, 1)]
    assert [value for _, _, value, _ in watcher.events if value != 1] == [None] * 5
    here = threading.current_thread()
    assert [name for name, *_, thread in watcher.events if thread is here] == A_BATCH[::5]


def _generator(items: list[int]) -> Iterator[list[int]]:
    yield items
    yield items


async def _coroutine(items: list[int]) -> list[int]:
    return items


async def _async_generator(items: list[int]) -> AsyncIterator[list[int]]:
    yield items
    yield items


@pytest.mark.parametrize("fn", [_generator, _coroutine, _async_generator])
async def test_all_kinds_of_functions_have_the_same_events(fn: Callable[[list[int]], Any]) -> None:
    watcher = Watcher()
    async with Batcher(fn, collate_fn=list) as batcher:
        batcher.add_observer(watcher)
        if fn is _coroutine:
            assert await batcher(7) == 7
        else:
            assert [part async for part in batcher.stream(7)] == [7, 7]
        await until(lambda: len(watcher.events) == 6)
    # The reader of a stream may get its last part before the batch has ended.
    assert [name for name in watcher.names if name != "completed"] == A_BATCH[:-1]
    assert watcher.names == A_BATCH or fn is not _coroutine
    assert watcher.of("completed") == [(watcher.of("enqueue")[0][0], None)]
    [batch] = watcher.batches
    assert (len(batch.items), batch.outputs, batch.errors) == (1, 1, 0)
    assert batch.device == (torch.device("cpu") if fn is _generator else None)


async def test_refused_items_have_their_cause() -> None:
    async def refused(callers: Busy, item: str, kind: type[Exception]) -> str:
        watcher.events.clear()
        with pytest.raises(kind) as caught:
            await callers.batcher(item)
        assert watcher.names == ["enqueue", "completed"]
        [(subject, error)] = watcher.of("completed")
        assert error is caught.value
        return str(subject.refused)

    async with busy(cost=len, max_batch_cost=8, max_pending=1) as callers:
        # An observer may take the lock of the batcher's queue.
        callers.batcher.add_observer(watcher := Watcher(callers.batcher.stats))
        assert await refused(callers, "a" * 9, aiopar.InvalidInput) == "max_batch_cost"
        await callers.queue("waits")
        assert await refused(callers, "a", aiopar.Overloaded) == "queue_full"
        callers.gate.open()
        await until(lambda: "waits" in callers.outcomes)
    assert watcher.names == ["enqueue", "completed", *A_BATCH[1:]], "of the one that waited"
    assert await refused(callers, "a", aiopar.ServiceClosed) == "closed"
    assert callers.batcher.stats().refused == {"max_batch_cost": 1, "queue_full": 1, "closed": 1}


async def test_cancelled_callers_in_the_queue_and_in_a_batch() -> None:
    watcher = Watcher()
    async with busy(always=True) as callers:
        callers.batcher.add_observer(watcher)
        await callers.queue(1, 2, 3)
        callers.cancel(1)
        await until(lambda: len(watcher.of("completed")) == 1)
        callers.gate.let_on()
        await callers.gate.entered(2)
        callers.cancel(2)
        await until(lambda: len(watcher.of("completed")) == 2)
        assert watcher.names.count("ended") == 0
    [batch] = watcher.batches
    errors = dict(watcher.of("completed"))
    first, second, third = (item for item, _ in watcher.of("enqueue"))
    assert list(batch.items) == [second, third]
    assert errors[third] is None
    for item in (first, second):
        assert isinstance(errors[item], anyio.get_cancelled_exc_class())


@pytest.mark.parametrize("error", [LookupError, SystemExit])
async def test_failing_observer_disturbs_neither_callers_nor_other_observers(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error("of the observer")

    watcher = Watcher()
    with caplog.at_level(logging.ERROR, "aiopar"):
        async with Batcher(Recorder(), collate_fn=list) as batcher:
            batcher.add_observer(Watcher(fail))
            batcher.add_observer(watcher)
            assert await batcher(1) == "1"
    assert watcher.names == A_BATCH
    # asyncio's debug mode logs slow steps too.
    logged = [record for record in caplog.records if record.name == "aiopar"]
    assert [record.levelname for record in logged] == ["ERROR"] * 6
    assert "failed in computed()" in caplog.text


async def test_added_observer_sees_later_items_and_batches() -> None:
    watcher = Watcher()
    async with busy() as callers:
        await callers.queue(1)
        callers.batcher.add_observer(watcher)
        await callers.queue(2)
    [batch] = watcher.batches
    [(item, _)] = watcher.of("enqueue")
    assert len(batch.items) == 2
    assert batch.items[1] is item
    assert watcher.of("completed") == [(item, None)]


async def test_removed_observer_still_sees_the_end_of_its_items() -> None:
    leaving, staying = Watcher(), Watcher()
    async with busy() as callers:
        for watcher in (leaving, staying):
            callers.batcher.add_observer(watcher)
        await callers.queue(1)
        callers.batcher.remove_observer(leaving)
        callers.batcher.remove_observer(leaving)
        await callers.queue(2)
        callers.gate.open()
        await until(lambda: len(callers.outcomes) == 3)
        callers.batcher.remove_observer(staying)
        await callers.batcher(3)
    assert leaving.names == ["enqueue", "completed"]
    assert staying.names == ["enqueue", *A_BATCH, "completed"]


@pytest.mark.parametrize("given", [print, None, Watcher, aiopar.ExecutorObserver()])
def test_wrong_observers_are_refused(given: Any) -> None:
    batcher = Batcher(torch.neg)
    with pytest.raises(TypeError, match="observer must be a BatchObserver, not "):
        batcher.add_observer(given)


# Streams.


async def test_observers_see_how_streams_end(kind: str) -> None:
    watcher = Watcher()

    def on_step(batch: list[Any], number: int) -> None:
        if number and "bad" in batch:
            raise ZeroDivisionError

    async with Batcher(Counting(3, on_step).of(kind), collate_fn=list) as batcher:
        batcher.add_observer(watcher)
        for item in ("good", "bad"):
            with suppress(ZeroDivisionError):
                assert len([part async for part in batcher.stream(item)]) == 3
            await idle(batcher)
    assert [type(error) for _, error in watcher.of("completed")] == [type(None), ZeroDivisionError]
    assert [(batch.outputs, batch.errors) for batch in watcher.batches] == [(1, 0), (0, 1)]
    assert [size for _, size in watcher.of("compute")] == [1, 1], "only the first step"


# Requests that end before they are queued: observers and metrics count them, too.


class Counted:
    """The metrics of a batcher, and the events that an observer sees."""

    def __init__(self, batcher: Batcher[Any, Any]) -> None:
        self._batcher = batcher
        self._registry = CollectorRegistry()
        PrometheusMetrics(batcher, registry=self._registry)
        self.watcher = Watcher()
        batcher.add_observer(self.watcher)

    def _read(self, metric: str) -> dict[str, float]:
        return {
            sample.labels[label]: sample.value
            for family in self._registry.collect()
            for sample in family.samples
            for label in ("outcome", "cause")
            if sample.name == f"aiopar_batcher_{metric}_total" and label in sample.labels
            if sample.value
        }

    def check(self, outcome: str, error: BaseException, cause: str | None = None) -> None:
        """Assert that one request had this outcome, and nothing else happened."""
        assert self._read("requests") == outcomes_in(self._batcher.stats()) == {outcome: 1}
        refusals = {} if cause is None else {cause: 1}
        assert self._read("refusals") == self._batcher.stats().refused == refusals
        assert self.watcher.names == ["enqueue", "completed"]
        [(item, none), (same, told)] = [event[1:3] for event in self.watcher.events]
        assert item is same
        assert none is None
        assert told is error
        assert (item.outcome, item.refused) == (outcome, cause)


def _identity(items: list[Any]) -> list[Any]:
    return items


async def _steps(items: list[Any]) -> AsyncIterator[list[Any]]:
    yield items


async def _ask(batcher: Batcher[Any, Any], fn: Callable[[Any], Any], item: Any) -> None:
    if fn is _steps:
        await anext(batcher.stream(item))
    else:
        await batcher(item)


def _fail(error: Exception) -> Callable[[Any], Any]:
    def fail(_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("fn", [_identity, _steps])
async def test_closed_before_it_was_used(fn: Callable[[Any], Any]) -> None:
    batcher = Batcher(fn)
    counted = Counted(batcher)
    await batcher.aclose()
    with pytest.raises(aiopar.ServiceClosed) as caught:
        await _ask(batcher, fn, 1)
    counted.check("refused", caught.value, "closed")


@pytest.mark.parametrize("fn", [_identity, _steps])
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"batch_key": _fail(aiopar.InvalidInput("no such adapter"))}, aiopar.InvalidInput),
        ({"batch_key": _fail(aiopar.ServiceClosed("another"))}, aiopar.ServiceClosed),
        ({"batch_key": lambda _: []}, TypeError),
        ({"cost": _fail(LookupError("cost"))}, LookupError),
        ({"cost": lambda _: -1.0}, ValueError),
    ],
)
async def test_key_or_cost_fails(
    fn: Callable[[Any], Any], options: dict[str, Any], kind: type[Exception]
) -> None:
    async with Batcher(fn, **options) as batcher:
        counted = Counted(batcher)
        with pytest.raises(kind) as caught:
            await _ask(batcher, fn, 1)
        if kind is aiopar.InvalidInput:
            counted.check("refused", caught.value, "invalid_input")
        else:
            counted.check("failed", caught.value)


async def test_pool_does_not_open() -> None:
    pool = ReplicaPool(Scale(2.0, _fail(RuntimeError("no memory"))), ["cpu"], warmup=X)
    counted = Counted(batcher := Batcher(pool))
    with pytest.raises(RuntimeError, match="no memory") as caught:
        await batcher(X[0])
    counted.check("failed", caught.value)
    await pool.aclose()


@pytest.mark.parametrize("outcome", ["expired", "cancelled"])
async def test_caller_leaves_while_the_pool_opens(outcome: str) -> None:
    gate, errors = Gate(), list[BaseException]()
    pool = ReplicaPool(Scale(2.0, lambda _: gate()), ["cpu"], warmup=X)
    counted = Counted(batcher := Batcher(pool))

    async def ask() -> None:
        try:
            await batcher(X[0], timeout=0.01 if outcome == "expired" else None)
        except BaseException as error:
            errors.append(error)
            if outcome == "cancelled":
                raise

    async with anyio.create_task_group() as opening:
        with gate:
            opening.start_soon(pool.__aenter__)
            await gate.entered()
            began = monotonic()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                blocked = monotonic()
                if outcome == "cancelled":
                    tasks.cancel_scope.cancel()
            gate.open()
    counted.check(outcome, errors[0])
    [(item, _)] = counted.watcher.of("completed")
    assert began <= item.arrived <= blocked
    await batcher.aclose()
    await pool.aclose()


async def test_opening_a_batcher_is_not_a_request() -> None:
    pool = ReplicaPool(nn.Linear(2, 2), ["cpu"])
    await pool.aclose()
    counted = Counted(batcher := Batcher(pool))
    with pytest.raises(aiopar.ServiceClosed):
        await batcher.__aenter__()
    assert counted.watcher.names == []
    assert batcher.stats().refused == {}
