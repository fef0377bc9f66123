"""A batch on an event loop is cancelled when none of its callers waits any more."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiopar
from aiopar.serve import Batcher, BatchInfo, BatchObserver
from aiopar.testing import Gate
from tests.interruptions import at_every_point

from .batches import Callers, Held, on_asyncio, running, until
from .streams import Readers, full, idle
from .test_batcher_loops import RUNNERS

pytestmark = pytest.mark.anyio


class Ends(BatchObserver):
    """Notes how batches end."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, BaseException | None]] = []

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        self.batches.append((batch.outputs, batch.errors, error))


# Coroutine functions.


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_the_batch_is_cancelled_when_no_caller_is_left(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    held, ends = Held(), Ends()
    async with Batcher(held, **full(3)) as batcher:
        batcher.add_observer(ends)
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            for n in range(3):
                callers.call(n, timeout=1.0 + n / 100 if how == "deadline" else None)
            await until(lambda: len(held.runs) == 1)
            if how == "cancelled":
                callers.cancel(0)
                callers.cancel(2)
                await anyio.wait_all_tasks_blocked()
                assert held.ended == []
                callers.cancel(1)
        errors = [] if how == "cancelled" else [aiopar.DeadlineExceeded] * 3
        assert [type(error) for error in callers.outcomes.values()] == errors
        await idle(batcher)
        assert len(held.runs) == len(held.ended) == 1, "it is neither repeated nor split"
        assert ends.batches == [(0, 0, None)], "no fault of the function"
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            for n in range(3):
                callers.call(n)
            await until(lambda: len(held.runs) == 2)
            held.let_on()
        assert callers.outcomes == {0: "0", 1: "1", 2: "2"}
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_aclose_waits_for_the_cleanup_of_a_cancelled_batch() -> None:
    event, undone = anyio.Event(), anyio.Event()
    runs: list[list[Any]] = []

    async def fn(items: list[Any]) -> list[Any]:
        runs.append(items)
        if items == [1]:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    undone.set()
                    await event.wait()
        return items

    async with Batcher(fn, collate_fn=list) as batcher, anyio.create_task_group() as tasks:
        callers = Callers(batcher, tasks)
        callers.call(1)
        await until(lambda: bool(runs))
        await callers.queue(2)
        callers.cancel(1)
        await undone.wait()
        assert (running(batcher), batcher.stats().queued) == (1, 1)
        event.set()
    assert callers.outcomes == {2: 2}


@on_asyncio
@pytest.mark.parametrize("instead", ["return", "raise"])
async def test_a_function_that_suppresses_its_cancellation(instead: str) -> None:
    ends = Ends()
    runs: list[list[Any]] = []

    async def fn(items: list[Any]) -> list[Any]:
        runs.append(items)
        if 1 in items:
            try:
                await anyio.sleep_forever()
            except asyncio.CancelledError:
                if instead == "raise":
                    raise ValueError from None
        return items

    async with Batcher(fn, **full(2)) as batcher:
        batcher.add_observer(ends)
        for items in ((1, 2), (3, 4)):
            async with anyio.create_task_group() as tasks:
                callers = Callers(batcher, tasks)
                for item in items:
                    callers.call(item)
                if 1 in items:
                    await until(lambda: len(runs) == 1)
                    callers.cancel(1)
                    callers.cancel(2)
            await idle(batcher)
    assert callers.outcomes == {3: 3, 4: 4}
    assert len(runs) == 2
    outputs = 2 if instead == "return" else 0
    assert ends.batches == [(outputs, 0, None), (2, 0, None)]


@pytest.mark.parametrize("first", ["ends", "left"])
async def test_a_caller_that_leaves_as_its_batch_ends_does_not_disturb_the_next_batch(
    first: str,
) -> None:
    held = Held()
    async with Batcher(held, collate_fn=list) as batcher, anyio.create_task_group() as tasks:
        callers = Callers(batcher, tasks)
        callers.call(1)
        await until(lambda: len(held.runs) == 1)
        await callers.queue(2)
        if first == "ends":
            held.let_on()
            callers.cancel(1)
        else:
            callers.cancel(1)
            held.let_on()
        await until(lambda: len(held.runs) == 2)
        await anyio.wait_all_tasks_blocked()
        held.let_on()
    assert callers.outcomes[2] == "2"
    assert held.runs == held.ended == [[1], [2]]


@pytest.mark.parametrize("other", RUNNERS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_its_callers_are_in_several_loops(runner: str, other: str) -> None:
    held = Held()
    batcher = Batcher(held, **full(2))
    waits, left = threading.Event(), threading.Event()

    async def begin() -> None:
        """The batch runs on this loop, and its caller here leaves first."""
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            await until(waits.is_set)
            callers.call("leaves")
            await until(lambda: len(held.runs) == 1)
            callers.cancel("leaves")
            await anyio.wait_all_tasks_blocked()
            assert held.ended == []
            left.set()
            await until(lambda: len(held.ended) == 1)
            await idle(batcher)

    async def leave() -> None:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            await callers.queue("leaves later")
            waits.set()
            await until(left.is_set)
            callers.cancel("leaves later")

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(RUNNERS[runner], begin), threads.submit(RUNNERS[other], leave)]
        for one in both:
            one.result(30)
    assert len(held.runs) == 1


# Async generator functions.


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_the_running_step_is_cancelled_when_no_reader_is_left(
    before: int, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    ends = Ends()
    closed: list[list[Any]] = []
    waiting: list[list[Any]] = []

    async def fn(items: list[Any]) -> AsyncIterator[list[Any]]:
        try:
            for _ in range(before):
                yield items
            waiting.append(items)
            if 3 not in items:
                await anyio.sleep_forever()
            yield items
        finally:
            closed.append(items)

    async with Batcher(fn, **full(2)) as batcher:
        batcher.add_observer(ends)
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read(1, 2, timeout=0.5 if how == "deadline" else None)
            if how == "cancelled":
                await until(lambda: len(waiting) == 1)
                readers.cancel(1)
                await anyio.wait_all_tasks_blocked()
                assert closed == []
                readers.cancel(2)
        await idle(batcher)
        assert len(closed) == 1
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read(3, 4)
        assert readers.outcomes == {3: None, 4: None}
    assert len(waiting) == 2, "it is not split"
    assert ends.batches[0][1:] == (0, None)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@on_asyncio
@pytest.mark.parametrize("by", ["the collector", "a signal handler"])
async def test_a_call_may_be_interrupted_at_any_point(by: str) -> None:
    def fn(batch: list[Any]) -> list[Any]:
        if isinstance(batch[0], Gate):
            batch[0]()
        seen.extend(batch)
        return batch

    for interruption in at_every_point():
        seen: list[Any] = []
        async with Batcher(fn, collate_fn=list, max_batch_size=1) as batcher:
            with Gate() as gate:
                running = asyncio.create_task(batcher(gate))
                await gate.entered()
                collected, other = batcher("collected"), batcher("other")
                collected.send(None)
                with interruption.by(collected.close if by == "the collector" else batcher.stats):
                    other.send(None)
                collected.close()
            await running
            assert await batcher("last") == "last"
        other.close()
        assert "collected" not in seen
