"""Deadlines and cancellations of a `Batcher`'s callers, in the queue and in a batch."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiopar
from tests.workers import Workers

from .batches import LONG, Busy, Recorder, busy, open_batcher, until

pytestmark = pytest.mark.anyio


# Deadlines.


async def test_a_deadline_that_passes_in_the_queue(workers: Workers) -> None:
    async with busy(workers=workers) as callers:
        with pytest.raises(aiopar.DeadlineExceeded, match=r"no result after .* in the queue") as e:
            await callers.batcher("late", timeout=0.01)
        assert isinstance(e.value, TimeoutError)
        assert callers.batcher.stats().queued == 0
        await callers.queue("in time")
    assert callers.runs == [["in time"]], "it is never computed"


SLOW = 0.5
"""Seconds that each of the latest batches took."""
CLOSE = 0.4
"""A timeout whose deadline is closer than that."""


on_one_loop = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""Batches that take long make these tests slow, and the loop does not matter."""


@asynccontextmanager
async def after_slow_batches(**options: Any) -> AsyncIterator[Busy]:
    """All eight runners are held; their latest and their running batches take long."""
    async with busy(always=True, concurrency=8, max_batch_size=2, **options) as callers:
        for count in range(2, 9):
            callers.call(f"slow {count}")
            await callers.gate.entered(count)
        await anyio.sleep(SLOW)
        callers.gate.let_on(8)
        await until(lambda: callers.batcher.stats().completed == 8)
        for count in range(9, 17):
            callers.call(f"slow {count}")
            await callers.gate.entered(count)
        await anyio.sleep(SLOW)
        yield callers


@on_one_loop
async def test_requests_too_close_to_their_deadline_make_room_for_other_requests() -> None:
    async with after_slow_batches() as callers:
        await callers.queue("late", "too late", timeout=CLOSE)
        await callers.queue("a", "b", "c", timeout=LONG)
        callers.gate.open()
        await until(lambda: {"late", "too late", "a", "b", "c"} <= callers.outcomes.keys())
        for item in ("late", "too late"):
            late = callers.outcomes[item]
            assert isinstance(late, aiopar.DeadlineExceeded)
            assert "in the queue" in str(late)
        stats = callers.batcher.stats()
        assert stats.queued == stats.in_flight == 0
    assert sorted(callers.runs[15:]) == [["a", "b"], ["c"]]


@on_one_loop
async def test_requests_close_to_their_deadline_are_tried_if_no_other_requests_wait() -> None:
    async with after_slow_batches() as callers:
        await callers.queue("late", timeout=CLOSE)
        callers.gate.open()
    assert callers.outcomes["late"] == "late"
    assert callers.runs[15:] == [["late"]]


@on_one_loop
async def test_with_several_keys_no_request_is_too_close_to_its_deadline() -> None:
    async with after_slow_batches(batch_key=str) as callers:
        await callers.queue("late", timeout=CLOSE)
        await callers.queue("a", "b", timeout=LONG)
        callers.gate.open()
    assert callers.outcomes["late"] == "late"
    assert sorted(callers.runs[15:]) == [["a"], ["b"], ["late"]]


@pytest.mark.parametrize("seconds", [0, -1, -math.inf])
async def test_a_deadline_that_has_passed_already(workers: Workers, seconds: float) -> None:
    recorder = Recorder()
    async with open_batcher(workers, recorder) as batcher:
        with pytest.raises(aiopar.DeadlineExceeded, match="in the queue"):
            await batcher("late", timeout=seconds)
        assert await batcher("in time") == "in time"
    assert recorder.runs == [["in time"]], "not even by an idle worker"


async def test_a_deadline_that_passes_in_a_running_batch(workers: Workers) -> None:
    async with busy(workers=workers, always=True) as callers:
        await callers.queue("a")
        callers.call("late", timeout=0.05)
        await until(lambda: callers.batcher.stats().queued == 2)
        callers.gate.let_on()
        await callers.gate.entered(2)
        await until(lambda: "late" in callers.outcomes)
        assert callers.gate.held == 1, "raised at the deadline, not when the batch ends"
        assert "a" not in callers.outcomes
    late = callers.outcomes.pop("late")
    assert isinstance(late, aiopar.DeadlineExceeded)
    assert callers.outcomes == {"first": "first", "a": "a"}
    # On a busy machine the deadline may have passed in the queue.
    assert callers.runs == [["a", "late"]] if "running" in str(late) else [["a"]]


async def test_a_callers_timeout_is_instead_of_the_batchers(workers: Workers) -> None:
    async with busy(workers=workers, timeout=0.01) as callers:
        with pytest.raises(aiopar.DeadlineExceeded):
            await callers.batcher(1)
        await callers.queue(2, timeout=LONG)
    assert callers.runs == [[2]]
    assert callers.outcomes[2] == "2"


# Cancellations.


async def test_a_cancelled_item_in_the_queue_is_not_computed(workers: Workers) -> None:
    async with busy(workers=workers) as callers:
        await callers.queue(1, 2, 3)
        callers.cancel(2)
        await until(lambda: callers.batcher.stats().queued == 2)
    assert callers.runs == [[1, 3]]
    assert callers.outcomes == {"first": "first", 1: "1", 3: "3"}


async def test_a_cancelled_item_in_a_running_batch_does_not_disturb_the_other_items(
    workers: Workers,
) -> None:
    async with busy(workers=workers, always=True) as callers:
        await callers.queue(1, 2, 3)
        callers.gate.let_on()
        await callers.gate.entered(2)
        callers.cancel(2)
        await anyio.wait_all_tasks_blocked()
    assert callers.runs == [[1, 2, 3]]
    assert callers.outcomes == {"first": "first", 1: "1", 3: "3"}


async def test_all_may_leave_a_running_batch(workers: Workers) -> None:
    async with busy(workers=workers) as callers:
        callers.cancel("first")
        await callers.queue(1)
    assert callers.outcomes == {1: "1"}


async def test_cancelled_before_it_was_called(workers: Workers) -> None:
    recorder = Recorder()
    async with open_batcher(workers, recorder) as batcher:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await batcher(1)
        assert await batcher(2) == "2"
        assert batcher.stats().queued == batcher.stats().in_flight == 0
    assert [2] in recorder.runs
