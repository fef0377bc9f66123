"""An overloaded `Batcher`: which items it refuses at once, and the estimated wait."""

import asyncio
from time import monotonic
from typing import Any

import pytest

import aiopar
from tests.workers import Workers

from .batches import LONG, Busy, busy, until

pytestmark = pytest.mark.anyio


async def test_a_full_queue_refuses_at_once(workers: Workers) -> None:
    async with busy(workers=workers, max_batch_size=2, max_pending=3) as callers:
        await callers.queue(1, 2, 3)
        for _ in range(20):
            call = callers.batcher(4)
            with pytest.raises(aiopar.Overloaded, match="3 items wait, max_pending=3") as caught:
                call.send(None)  # in its first step: it has not waited for anything
            assert isinstance(caught.value, aiopar.QueueFull)
            assert isinstance(caught.value, asyncio.QueueFull)
        callers.cancel(2)
        await until(lambda: callers.batcher.stats().queued == 2)
        await callers.queue(5)
        assert callers.batcher.stats().refused == {"queue_full": 20}
    assert callers.runs == [[1, 3], [5]]


async def timed_once(callers: Busy) -> float:
    """The seconds that a batch takes, when one has run and the next is held."""
    await callers.queue("second")
    callers.gate.let_on()
    await callers.gate.entered(2)
    return callers.batcher.stats().compute.p50


async def test_the_estimated_wait_counts_the_batches_before(workers: Workers) -> None:
    async with busy(workers=workers, always=True, max_batch_size=2, max_pending=5) as callers:
        seconds = await timed_once(callers)
        await callers.queue(1, 2, 3, 4, 5)
        with pytest.raises(aiopar.Overloaded) as caught:
            await callers.batcher(6)
        # Two full batches, and the rest of the running batch: at most one more.
        assert 2 * seconds <= caught.value.estimated_wait <= 3 * seconds


async def test_too_long_a_wait_is_refused_at_once(workers: Workers) -> None:
    async with busy(workers=workers, always=True, max_batch_size=2, max_wait=0.0) as callers:
        seconds = await timed_once(callers)
        # Until it has taken as long as the batch before: then the estimated rest is 0.
        overdue = monotonic() + seconds
        await until(lambda: monotonic() > overdue)
        await callers.queue(1, 2)
        with pytest.raises(aiopar.Overloaded, match="max_wait=0 s") as caught:
            await callers.batcher(3)
        assert caught.value.estimated_wait == pytest.approx(seconds)
        assert callers.batcher.stats().queued == 2
        assert callers.batcher.stats().refused == {"max_wait": 1}
    assert callers.runs == [["second"], [1, 2]]


@pytest.mark.parametrize("options", [{}, {"cost": lambda _: 1}])
async def test_a_wait_below_max_wait_is_accepted(workers: Workers, options: Any) -> None:
    options = {"max_batch_size": 1, "max_wait": LONG, **options}
    async with busy(workers=workers, always=True, **options) as callers:
        await callers.queue(0)
        callers.gate.let_on()
        await callers.gate.entered(2)
        await callers.queue(1, 2, 3)
    assert callers.runs == [[0], [1], [2], [3]]
