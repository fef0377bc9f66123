"""Observers of a `Batcher`: the events of items, batches and streams."""

import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.serve import Batcher, BatchInfo, BatchObserver, ItemInfo
from aiopar.testing import Gate

from .batches import Busy, Recorder, busy, until
from .replicas import Fragile, break_copy, held as held_at, open_pool
from .streams import Counting, held, idle

pytestmark = pytest.mark.anyio


class EachEvent(BatchObserver):
    """Calls `note` in each event, with its name, its subject and its other argument."""

    def note(self, event: str, subject: Any, value: Any = None) -> None:
        raise NotImplementedError

    def enqueue(self, item: ItemInfo) -> None:
        self.note("enqueue", item)

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        self.note("completed", item, error)

    def start(self, batch: BatchInfo) -> None:
        self.note("start", batch)

    def compute(self, batch: BatchInfo, size: int) -> None:
        self.note("compute", batch, size)

    def computed(self, batch: BatchInfo, error: BaseException | None) -> None:
        self.note("computed", batch, error)

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        self.note("ended", batch, error)


class Watcher(EachEvent):
    """Notes every event: its name, its subject, its other argument, its thread."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any, Any, threading.Thread]] = []

    def note(self, event: str, subject: Any, value: Any = None) -> None:
        self.events.append((event, subject, value, threading.current_thread()))

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


async def test_events_of_an_item_and_its_batch(
    devices: tuple[torch.device, ...],
) -> None:
    watcher = Watcher()
    x = torch.ones(3, device=devices[0])
    async with aiopar.DeviceExecutor(devices[:1]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(torch.square) as batcher:
                batcher.add_observer(watcher)
                assert (await batcher(x, priority=4)).tolist() == [1.0, 1.0, 1.0]
                assert watcher.names == A_BATCH, (
                    "all events have come when the caller gets its output"
                )
    (item, _), (batch, _) = watcher.of("enqueue")[0], watcher.of("start")[0]
    subjects = [subject for _, subject, _, _ in watcher.events]
    assert subjects == [item, batch, batch, batch, batch, item]
    assert list(batch.items) == [item]
    assert (item.priority, item.rejected) == (4, None)
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
async def test_all_kinds_of_functions_have_the_same_events(
    fn: Callable[[list[int]], Any],
) -> None:
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


async def test_each_run_of_a_split_batch_has_events() -> None:
    watcher = Watcher()
    async with busy(lambda item: item if item == "first" else 1 / item) as callers:
        callers.batcher.add_observer(watcher)
        await callers.queue(1, 2, 3, 0)
        callers.gate.open()
        await until(lambda: len(callers.outcomes) == 5)
    [batch] = watcher.batches
    assert [size for _, size in watcher.of("compute")] == [4, 2, 2, 1, 1]
    errors = [type(error) for _, error in watcher.of("computed")]
    bad = ZeroDivisionError
    assert errors == [bad, type(None), bad, type(None), bad]
    assert (batch.outputs, batch.errors) == (3, 1)
    assert watcher.of("ended") == [(batch, None)]
    completed = dict(watcher.of("completed"))
    assert len(watcher.of("completed")) == 4
    assert set(completed) == set(batch.items)
    assert [error for error in completed.values() if error] == [callers.outcomes[0]]


async def test_refused_items_have_their_cause() -> None:
    watcher = Watcher()

    async def refused(callers: Busy, item: str, kind: type[Exception]) -> str:
        watcher.events.clear()
        with pytest.raises(kind) as caught:
            await callers.batcher(item)
        assert watcher.names == ["enqueue", "completed"]
        [(subject, error)] = watcher.of("completed")
        assert error is caught.value
        return str(subject.rejected)

    async with busy(cost=len, max_batch_cost=8, max_pending=1) as callers:
        callers.batcher.add_observer(watcher)
        assert await refused(callers, "a" * 9, aiopar.InvalidInput) == "max_batch_cost"
        await callers.queue("waits")
        assert await refused(callers, "a", aiopar.Overloaded) == "queue_full"
    assert await refused(callers, "a", aiopar.ServiceClosed) == "closed"
    assert callers.batcher.stats().rejected == {"max_batch_cost": 1, "queue_full": 1, "closed": 1}


async def test_item_that_expires_in_the_queue_is_in_no_batch() -> None:
    watcher = Watcher()
    async with busy() as callers:
        callers.batcher.add_observer(watcher)
        with pytest.raises(aiopar.DeadlineExceeded) as caught:
            await callers.batcher("late", timeout=0.01)
        [(item, error)] = watcher.of("completed")
        assert error is caught.value
        assert item.rejected is None
    assert watcher.names[:2] == ["enqueue", "completed"]
    assert "start" not in watcher.names


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


async def test_item_of_a_failed_replica_is_in_two_batches() -> None:
    watcher, gate, module = Watcher(), Gate(), Fragile()
    async with (
        open_pool(module, warmup=torch.ones(1, 2)) as pool,
        Batcher(pool, max_batch_size=1) as batcher,
    ):
        batcher.add_observer(watcher)
        break_copy(module, 0)
        module.on_call.append(gate)
        async with held_at(gate) as tasks:
            for _ in pool.devices:
                tasks.start_soon(batcher, torch.ones(2))
            await gate.entered(2)  # one per replica
    [failed] = [batch for batch, error in watcher.of("ended") if error is not None]
    assert (failed.replica, failed.outputs, failed.errors) == (0, 0, 0)
    assert {batch.device for batch in watcher.batches} == {torch.device("cpu")}
    assert len(watcher.batches) == 3
    first, again = (batch for batch in watcher.batches if batch.items[0] is failed.items[0])
    assert first is failed
    assert (again.outputs, again.errors) == (1, 0)
    assert [error for _, error in watcher.of("completed")] == [None, None]


class Broken(EachEvent):
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def note(self, event: str, subject: Any, value: Any = None) -> None:
        raise self.error("of the observer")


@pytest.mark.parametrize("error", [LookupError, SystemExit])
async def test_failing_observer_disturbs_neither_callers_nor_other_observers(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    watcher = Watcher()
    with caplog.at_level(logging.ERROR, "aiopar"):
        async with Batcher(Recorder(), collate_fn=list) as batcher:
            batcher.add_observer(Broken(error))
            batcher.add_observer(watcher)
            assert await batcher(1) == "1"
    assert watcher.names == A_BATCH
    # asyncio's debug mode logs slow steps too.
    logged = [record for record in caplog.records if record.name == "aiopar"]
    assert [record.levelname for record in logged] == ["ERROR"] * 6
    assert "failed in computed()" in caplog.text


class Asking(EachEvent):
    """Calls `stats()` in each event. That takes the lock of the batcher's queue."""

    def __init__(self, batcher: Batcher[Any, Any]) -> None:
        self.batcher = batcher
        self.asked: list[str] = []

    def note(self, event: str, subject: Any, value: Any = None) -> None:
        self.batcher.stats()
        self.asked.append(event)


async def test_observers_may_read_stats_in_every_event() -> None:
    async with busy(max_pending=1) as callers:
        asking = Asking(callers.batcher)
        callers.batcher.add_observer(asking)
        await callers.queue(1)
        with pytest.raises(aiopar.Overloaded):
            await callers.batcher(2)
    assert asking.asked == ["enqueue", "enqueue", "completed", *A_BATCH[1:]]


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


async def test_function_sees_state_that_an_observer_sets() -> None:
    class Modes(BatchObserver):
        def compute(self, batch: BatchInfo, size: int) -> None:
            torch.set_grad_enabled(False)

    def fn(batch: Tensor) -> list[bool]:
        return [torch.is_grad_enabled()] * len(batch)

    async with Batcher(fn) as batcher:
        assert await batcher(torch.ones(1))
        batcher.add_observer(Modes())
        assert not await batcher(torch.ones(1))


@pytest.mark.parametrize("given", [print, None, Watcher, aiopar.ExecutorObserver()])
def test_wrong_observers_are_refused(given: Any) -> None:
    batcher = Batcher(torch.neg)
    with pytest.raises(TypeError, match="observer must be a BatchObserver, not "):
        batcher.add_observer(given)


# Streams.


async def test_observers_see_a_stream_as_an_item(kind: str) -> None:
    watcher = Watcher()
    options: dict[str, Any] = {"collate_fn": list, "max_pending": 1}
    async with Batcher(Counting(3).of(kind), **options) as batcher, held(batcher):
        batcher.add_observer(watcher)
        async with batcher.stream("a") as stream:
            with pytest.raises(aiopar.Overloaded):
                await anext(batcher.stream("refused"))
        assert [part async for part in stream] == []
    assert watcher.names == ["enqueue", "enqueue", "completed", "completed"]
    (left, _), (refused, _) = watcher.of("enqueue")
    (first, overloaded), (second, closed) = watcher.of("completed")
    assert (first, second) == (refused, left)
    assert refused.rejected == "queue_full"
    assert type(overloaded) is aiopar.Overloaded
    assert type(closed) is GeneratorExit


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
