"""`Batcher`: when a batch leaves, on which runner, which items it has, and in what order."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar.serve import Batcher, BatcherStats
from aiopar.testing import Gate
from tests.workers import KINDS, MakeWorkers, Workers

from .batches import (
    LONG,
    Bad,
    Callers,
    Recorder,
    busy,
    on_asyncio,
    open_batcher,
    outcomes_of,
    until,
)
from .replicas import Scale, X, open_pool

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
    assert Batcher(str).stats() == BatcherStats(0, 0, 0, {}, 0, 0, 0, 0, (), {}, none, none)
    async with busy(workers=workers, always=True, max_batch_size=3) as callers:
        await callers.queue(*range(4))
        stats = callers.batcher.stats()
        assert (stats.queued, stats.in_flight, stats.answered) == (4, 1, 0)
        callers.gate.let_on()
        await callers.gate.entered(2)
        await until(lambda: "first" in callers.outcomes)
        stats = callers.batcher.stats()
        assert (stats.queued, stats.in_flight, stats.answered) == (1, 3, 1)
        assert stats.compute.p50 == stats.compute.p99 > 0
    stats = callers.batcher.stats()
    assert (stats.queued, stats.in_flight, stats.answered) == (0, 0, 5)
    assert stats.batch_sizes == {1: 2, 3: 1}
    assert 0 < stats.queue_wait.p50 <= stats.queue_wait.p90 <= stats.queue_wait.p99


# Which runner takes the next batch, and when; batches that are given back.


@on_asyncio
async def test_an_item_with_a_deadline_waits_at_most_half_of_it_for_others() -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"max_queue_delay": LONG, "timeout": 1}
    async with Batcher(recorder, collate_fn=list, **options) as batcher:
        assert await batcher(1) == "1"
        assert await outcomes_of(batcher, [2, 3]) == ["2", "3"]
    assert [sorted(run) for run in recorder.runs] == [[1], [2, 3]]


async def test_items_without_a_deadline_leave_with_an_item_that_has_one() -> None:
    recorder = Recorder()
    async with (
        Batcher(recorder, collate_fn=list, max_queue_delay=LONG) as batcher,
        anyio.create_task_group() as tasks,
    ):
        for timeout in (None, 2, 1000):
            tasks.start_soon(lambda given: batcher(0, timeout=given), timeout)
    assert recorder.runs == [[0, 0, 0]]


async def test_items_of_two_keys_run_on_two_runners_at_once() -> None:
    async with busy(always=True, concurrency=2, batch_key=lambda item: item[0]) as callers:
        callers.call("a")
        await callers.gate.entered(2)
        await callers.queue("a3", "b3", "a4", "b4")
        callers.gate.let_on(2)
        await callers.gate.entered(4)
    assert sorted(callers.runs) == [["a"], ["a3", "a4"], ["b3", "b4"]]


class Key:
    """A key that calls a function when it is hashed and compared."""

    def __init__(self, called: Callable[[], object]) -> None:
        self._called = called

    def __hash__(self) -> int:
        self._called()
        return 1

    def __eq__(self, other: object) -> bool:
        self._called()
        return True


@pytest.mark.may_block("a comparison of keys waits for another thread")
async def test_no_lock_is_held_while_keys_are_compared() -> None:
    with ThreadPoolExecutor(1) as thread:

        def key(item: str) -> Key | None:
            if item == "first":
                return None
            return Key(lambda: thread.submit(callers.batcher.stats).result(30))

        async with busy(batch_key=key) as callers:
            await callers.queue("a", "b")
            callers.gate.open()
            await until(lambda: len(callers.outcomes) == 3)
    assert callers.runs == [["a", "b"]]


async def test_a_key_that_cannot_be_compared_fails_its_own_item_only() -> None:
    compared: list[object] = []

    def compare() -> None:
        compared.append(None)
        if fails:
            raise Bad

    fails = False
    async with busy(batch_key=lambda item: item if item == "first" else Key(compare)) as callers:
        await callers.queue("a")
        fails = True
        with pytest.raises(Bad):
            await callers.batcher("bad")
        fails = False
        await callers.queue("b")
        callers.gate.open()
        await until(lambda: len(callers.outcomes) == 3)
    assert callers.runs == [["a", "b"]]


async def test_a_call_that_waits_for_the_worker_runs_before_the_next_batch() -> None:
    events: list[Any] = []
    async with (
        aiopar.DeviceExecutor(["cpu"]) as executor,
        busy(events.append, workers=executor) as callers,
    ):
        await callers.queue("next")
        call = executor.submit(events.append, "call")
        callers.gate.open()
        await call
    assert events == ["first", "call", "next"]


async def test_each_batch_is_one_call_of_the_executor() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(list, collate_fn=list) as batcher:
                for item in range(3):
                    await batcher(item)
        await executor.aclose()
        [worker] = executor.stats().workers
        assert (worker.completed, worker.queued, worker.running) == (3, 0, 0)


async def test_a_batch_that_fails_while_its_executor_shuts_down_is_still_split() -> None:
    def check(item: str) -> str:
        if item == "bad":
            raise Bad
        return item

    async with aiopar.DeviceExecutor(["cpu"]) as executor, busy(check, workers=executor) as callers:
        await callers.queue("good", "bad", "better")
        callers.gate.open()
        await until(lambda: len(callers.outcomes) > 1)
        executor.shutdown(wait=False)
    assert callers.outcomes["good"] == "good"
    assert isinstance(callers.outcomes["bad"], Bad)
    assert callers.outcomes["better"] == "better"


async def test_collate_fn_may_wait_for_the_outcome_of_the_batch_before() -> None:
    with Gate() as told:

        def collate_fn(items: list[str]) -> list[str]:
            if items != ["first"]:
                told()
            return items

        async with busy(collate_fn=collate_fn) as callers:
            await callers.queue("next")
            callers.gate.open()
            await until(lambda: "first" in callers.outcomes)
            told.open()
    assert callers.outcomes == {"first": "first", "next": "next"}


async def test_an_item_is_given_back_once() -> None:
    """The item itself may have caused the failure after which it was given back."""
    zeros: list[torch.Tensor] = []

    def check(x: torch.Tensor) -> None:
        zeros.extend(x[x == 0])
        if zeros:  # its replica is broken, and so are all others
            raise Bad

    async with (
        aiopar.DeviceExecutor(["cpu"] * 3) as executor,
        open_pool(Scale(1.0, check), on=None, executor=executor, warmup=X + 1) as pool,
        Batcher(pool, max_batch_size=1) as batcher,
    ):
        with pytest.raises(Bad):
            await batcher(torch.zeros(1))
        assert len(zeros) == 2
        zeros.clear()
        assert (await batcher(torch.ones(1)))[0].item() == 1
