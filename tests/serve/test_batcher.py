"""`Batcher`: when a batch leaves, which items it has, and in what order."""

from typing import Any

import anyio
import pytest

import aiopar
from aiopar.serve import Batcher, BatcherStats
from tests.workers import KINDS, MakeWorkers, Workers

from .batches import LONG, Callers, Recorder, busy, open_batcher, outcomes_of, until

pytestmark = pytest.mark.anyio
ON_RAY = True


# When a batch leaves.


@pytest.mark.parametrize("options", [{}, {"max_wait": 0.0}])
async def test_a_lone_item_goes_at_once(workers: Workers, options: dict[str, Any]) -> None:
    recorder = Recorder()
    async with open_batcher(workers, recorder, **options) as batcher:
        assert [await batcher(item) for item in (1, 2)] == ["1", "2"]
    assert recorder.runs == [[1], [2]]


async def test_waiting_items_become_a_batch_as_soon_as_a_worker_is_free(workers: Workers) -> None:
    async with busy(workers=workers) as callers:
        await callers.queue(1, 2, 3)
        assert callers.runs == []
        callers.gate.open()
        await until(lambda: len(callers.outcomes) == 4)
        assert callers.runs == [[1, 2, 3]]
        assert callers.outcomes == {"first": "first", 1: "1", 2: "2", 3: "3"}


@pytest.mark.parametrize("make", KINDS)
async def test_as_many_batches_run_at_once_as_concurrency_says(make: MakeWorkers) -> None:
    async with make(3) as executor, busy(workers=executor, always=True, concurrency=2) as callers:
        callers.call(1)
        await callers.gate.entered(2)
        await callers.queue(2, 3)
        assert callers.gate.held == 2
        callers.gate.let_on()
        await callers.gate.entered(3)
    assert callers.runs == [[1], [2, 3]]


async def test_the_default_executor_grows_for_them() -> None:
    await aiopar.get_executor().aclose()  # the next one is as small as at first
    executor = aiopar.get_executor()
    count = len(executor.devices) + 2
    async with executor:
        with aiopar.use_executor(executor):
            async with busy(always=True, concurrency=count, max_batch_size=1) as callers:
                for item in range(1, count):
                    callers.call(item)
                await callers.gate.entered(count)
                callers.gate.open()
    assert len(executor.devices) == count


@pytest.mark.parametrize("full", [{"max_batch_size": 3}, {"max_batch_size": 4, "max_pending": 3}])
async def test_max_queue_delay_waits_for_a_full_batch_or_queue(
    workers: Workers, full: dict[str, int]
) -> None:
    recorder = Recorder()
    async with open_batcher(workers, recorder, max_queue_delay=LONG, **full) as batcher:
        assert await outcomes_of(batcher, range(3)) == ["0", "1", "2"]
    assert list(map(sorted, recorder.runs)) == [[0, 1, 2]]


async def test_max_queue_delay_is_the_longest_wait_for_other_items(workers: Workers) -> None:
    recorder = Recorder()
    async with open_batcher(workers, recorder, max_queue_delay=0.01) as batcher:
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                callers = Callers(batcher, tasks)
                callers.call(1)
                callers.call(2)
            assert sorted(recorder.runs.pop()) == [1, 2]
            assert recorder.runs == []
        assert batcher.stats().queue_wait.p50 > 0.005


async def test_a_full_batch_does_not_wait_for_another_to_fill(workers: Workers) -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"max_batch_size": 2, "batch_key": str.lower}
    async with (
        open_batcher(workers, recorder, max_queue_delay=LONG, **options) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        await callers.queue("a", priority=-1)
        await callers.queue("b")
        callers.call("B")
        await until(lambda: "B" in callers.outcomes)
        assert recorder.runs == [["b", "B"]]
        callers.call("A")
    assert recorder.runs == [["b", "B"], ["a", "A"]]


async def test_once_the_delay_has_passed_an_item_goes_when_a_worker_is_free(
    workers: Workers,
) -> None:
    async with busy(workers=workers, max_queue_delay=0.01) as callers:
        await callers.queue(1)
        with pytest.raises(aiopar.DeadlineExceeded):
            await callers.batcher("much later", timeout=0.05)
        await callers.queue(2)
    assert callers.runs == [[1, 2]]


async def test_a_cancelled_item_is_not_in_the_batch_that_fills(workers: Workers) -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"max_batch_size": 2, "max_queue_delay": LONG}
    async with open_batcher(workers, recorder, **options) as batcher:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            await callers.queue(1)
            callers.cancel(1)
            await until(lambda: batcher.stats().queued == 0)
            await callers.queue(2)
            callers.call(3)
        assert recorder.runs == [[2, 3]]


# Which items share a batch, and in what order.


@pytest.mark.parametrize(
    ("options", "items", "runs"),
    [
        ({}, ["1", "2", "3", "4", "5"], [["1", "2"], ["3", "4"], ["5"]]),
        (
            {"batch_key": str.lower},
            ["a", "b", "A", "B", "a1", "a ", "A "],
            [["a", "A"], ["b", "B"], ["a1"], ["a ", "A "]],
        ),
        ({"cost": len}, ["a", "b" * 50, "cc", "d" * 48], [["a", "cc"], ["b" * 50, "d" * 48]]),
        (
            {"cost": len, "max_batch_cost": 8, "padded": True, "max_batch_size": 5},
            ["aaa", "b", "cccc", "d", "eeee"],
            [["aaa", "cccc"], ["b", "d"], ["eeee"]],
        ),
    ],
)
async def test_items_of_a_batch(
    workers: Workers, options: dict[str, Any], items: list[str], runs: list[list[str]]
) -> None:
    async with busy(workers=workers, **{"max_batch_size": 2, **options}) as callers:
        await callers.queue(*items)
    assert callers.runs == runs


async def test_a_batch_costs_at_most_max_batch_cost(workers: Workers) -> None:
    async with busy(workers=workers, cost=len, max_batch_cost=8) as callers:
        await callers.queue("aaa", "bbb", "ccc", "d" * 8)
        with pytest.raises(aiopar.InvalidInput, match=r"costs 9, .* at most 8"):
            await callers.batcher("e" * 9)
    assert callers.runs == [["aaa", "bbb"], ["ccc"], ["d" * 8]]


async def test_lower_priority_goes_first_and_equal_ones_as_they_came(workers: Workers) -> None:
    async with busy(workers=workers, max_batch_size=2) as callers:
        for item, priority in enumerate([0, 5, -3, 0, 5, -3]):
            await callers.queue(item, priority=priority)
    assert callers.runs == [[2, 5], [0, 3], [1, 4]]


async def test_no_item_starves(workers: Workers) -> None:
    async with busy(workers=workers, max_batch_size=1) as callers:
        await callers.queue("patient", priority=9)
        await callers.queue(*range(40))
    assert callers.runs.index(["patient"]) == 32


# Numbers.


async def test_stats(workers: Workers) -> None:
    none = aiopar.serve.Percentiles(0.0, 0.0, 0.0)
    assert Batcher(str).stats() == BatcherStats(0, 0, 0, {}, {}, none, none)
    async with busy(workers=workers, always=True, max_batch_size=3) as callers:
        await callers.queue(*range(4))
        stats = callers.batcher.stats()
        assert (stats.queued, stats.in_flight, stats.completed) == (4, 1, 0)
        callers.gate.let_on()
        await callers.gate.entered(2)
        stats = callers.batcher.stats()
        assert (stats.queued, stats.in_flight, stats.completed) == (1, 3, 1)
        assert stats.compute.p50 == stats.compute.p99 > 0
    stats = callers.batcher.stats()
    assert (stats.queued, stats.in_flight, stats.completed) == (0, 0, 5)
    assert stats.batch_sizes == {1: 2, 3: 1}
    assert 0 < stats.queue_wait.p50 <= stats.queue_wait.p90 <= stats.queue_wait.p99
