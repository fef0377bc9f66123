"""Deadlines and cancellations of a `Batcher`'s callers, in the queue and in a batch."""

import math

import anyio
import pytest

import aiopar
from aiopar.serve import Batcher

from .batches import LONG, Recorder, busy, until

pytestmark = pytest.mark.anyio


# Deadlines.


async def test_a_deadline_that_passes_in_the_queue() -> None:
    async with busy() as callers:
        with pytest.raises(aiopar.DeadlineExceeded, match=r"no result after .* in the queue") as e:
            await callers.batcher("late", timeout=0.01)
        assert isinstance(e.value, TimeoutError)
        assert callers.batcher.stats().queued == 0
        await callers.queue("in time")
    assert callers.runs == [["in time"]], "it is never computed"


@pytest.mark.parametrize("seconds", [0, -1, -math.inf])
async def test_a_deadline_that_has_passed_already(seconds: float) -> None:
    recorder = Recorder()
    async with Batcher(recorder, collate_fn=list) as batcher:
        with pytest.raises(aiopar.DeadlineExceeded, match="in the queue"):
            await batcher("late", timeout=seconds)
        assert await batcher("in time") == "in time"
    assert recorder.runs == [["in time"]], "not even by an idle worker"


async def test_a_deadline_that_passes_in_a_running_batch() -> None:
    async with busy(always=True) as callers:
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


async def test_a_callers_timeout_is_instead_of_the_batchers() -> None:
    async with busy(timeout=0.01) as callers:
        with pytest.raises(aiopar.DeadlineExceeded):
            await callers.batcher(1)
        await callers.queue(2, timeout=LONG)
    assert callers.runs == [[2]]
    assert callers.outcomes[2] == "2"


# Cancellations.


async def test_a_cancelled_item_in_the_queue_is_not_computed() -> None:
    async with busy() as callers:
        await callers.queue(1, 2, 3)
        callers.cancel(2)
        await until(lambda: callers.batcher.stats().queued == 2)
    assert callers.runs == [[1, 3]]
    assert callers.outcomes == {"first": "first", 1: "1", 3: "3"}


async def test_a_cancelled_item_in_a_running_batch_does_not_disturb_the_other_items() -> None:
    async with busy(always=True) as callers:
        await callers.queue(1, 2, 3)
        callers.gate.let_on()
        await callers.gate.entered(2)
        callers.cancel(2)
        await anyio.wait_all_tasks_blocked()
    assert callers.runs == [[1, 2, 3]]
    assert callers.outcomes == {"first": "first", 1: "1", 3: "3"}


async def test_all_may_leave_a_running_batch() -> None:
    async with busy() as callers:
        callers.cancel("first")
        await callers.queue(1)
    assert callers.outcomes == {1: "1"}


async def test_cancelled_before_it_was_called() -> None:
    recorder = Recorder()
    async with Batcher(recorder, collate_fn=list) as batcher:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await batcher(1)
        assert await batcher(2) == "2"
        assert batcher.stats().queued == batcher.stats().in_flight == 0
    assert [2] in recorder.runs
