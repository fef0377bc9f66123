"""Deadlines and cancellations of a `Batcher`'s callers, in the queue and in a batch."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiopar
from tests.workers import Workers

from .batches import LONG, Busy, Recorder, busy, on_asyncio, open_batcher, until
from .streams import idle

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


@asynccontextmanager
async def after_slow_batches(**options: Any) -> AsyncIterator[Busy]:
    """All eight runners are held; their latest and their running batches take long."""
    async with busy(always=True, concurrency=8, max_batch_size=2, **options) as callers:
        for count in range(2, 9):
            callers.call(f"slow {count}")
            await callers.gate.entered(count)
        await anyio.sleep(SLOW)
        callers.gate.let_on(8)
        await until(lambda: callers.batcher.stats().answered == 8)
        for count in range(9, 17):
            callers.call(f"slow {count}")
            await callers.gate.entered(count)
        await anyio.sleep(SLOW)
        yield callers


@on_asyncio
@pytest.mark.parametrize(
    ("options", "waiting", "runs"),
    [
        ({}, ["a", "b", "c"], [["a", "b"], ["c"]]),
        ({}, [], [["late"]]),  # tried, because no other requests wait
        ({"batch_key": str}, ["a", "b"], [["a"], ["b"], ["late"]]),
    ],
)
async def test_a_request_too_close_to_its_deadline_makes_room_for_a_full_batch_of_its_key(
    options: dict[str, Any], waiting: list[str], runs: list[list[str]]
) -> None:
    async with after_slow_batches(**options) as callers:
        await callers.queue("late", timeout=CLOSE)
        await callers.queue(*waiting, timeout=LONG)
        callers.gate.open()
        await until(lambda: {"late", *waiting} <= callers.outcomes.keys())
        await idle(callers.batcher)
        late = callers.outcomes["late"]
    assert sorted(callers.runs[15:]) == runs
    if ["late"] in runs:
        assert late == "late"
    else:
        assert isinstance(late, aiopar.DeadlineExceeded)
        assert "in the queue" in str(late)


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


@pytest.mark.parametrize("leave", [[2], [1, 2, 3]])
async def test_a_cancelled_item_in_a_running_batch_does_not_disturb_the_other_items(
    workers: Workers, leave: list[int]
) -> None:
    async with busy(workers=workers, always=True) as callers:
        await callers.queue(1, 2, 3)
        callers.gate.let_on()
        await callers.gate.entered(2)
        for item in leave:
            callers.cancel(item)
        await anyio.wait_all_tasks_blocked()
        await callers.queue(4)
    assert callers.runs == [[1, 2, 3], [4]]
    stay = {1, 2, 3, 4}.difference(leave)
    assert callers.outcomes == {"first": "first"} | {item: str(item) for item in stay}


async def test_cancelled_before_it_was_called(workers: Workers) -> None:
    recorder = Recorder()
    async with open_batcher(workers, recorder) as batcher:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await batcher(1)
        assert await batcher(2) == "2"
        assert batcher.stats().queued == batcher.stats().in_flight == 0
    assert [2] in recorder.runs
