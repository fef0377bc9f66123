"""`Batcher.aclose`, and executors and pools that end first: no caller waits forever."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from torch import nn

import aiopar
from aiopar.serve import Batcher, ReplicaPool
from aiopar.testing import Gate
from tests.home import AtHome
from tests.workers import MakeWorkers, Workers

from .batches import (
    Callers,
    Recorder,
    busy,
    on_asyncio,
    open_batcher,
    outcomes_in,
    outcomes_of,
    until,
)
from .test_observer import Watcher

pytestmark = pytest.mark.anyio


def closed(outcome: object) -> bool:
    return isinstance(outcome, aiopar.ServiceClosed)


async def test_queued_items_run_and_new_items_are_refused(workers: Workers) -> None:
    async with (
        busy(workers=workers, max_batch_size=2) as callers,
        anyio.create_task_group() as tasks,
    ):
        await callers.queue(1, 2, 3)
        tasks.start_soon(callers.batcher.aclose)
        await until(lambda: not callers.batcher.ready)
        with pytest.raises(aiopar.ServiceClosed, match="closed, or about to be"):
            await callers.batcher(4)
        assert callers.runs == []
        assert callers.batcher.stats().refused == {"closed": 1}
        callers.gate.open()
        await callers.batcher.aclose()
        await until(lambda: len(callers.outcomes) == 4)
        stats = callers.batcher.stats()
        assert (stats.queued, stats.in_flight, stats.answered) == (0, 0, 4)
    assert callers.runs == [[1, 2], [3]]
    assert callers.outcomes == {"first": "first", 1: "1", 2: "2", 3: "3"}


async def test_without_drain_queued_items_fail_and_running_items_get_results(
    workers: Workers,
) -> None:
    async with busy(workers=workers) as callers:
        await callers.queue(1, 2)
        async with anyio.create_task_group() as tasks:

            async def close() -> None:
                await callers.batcher.aclose(drain=False)

            tasks.start_soon(close)
            await until(lambda: {1, 2} <= callers.outcomes.keys())
            assert "first" not in callers.outcomes
            callers.gate.open()
    assert callers.runs == []
    assert callers.outcomes.pop("first") == "first"
    assert all(map(closed, callers.outcomes.values()))


async def timed_out(batcher: Batcher[Any, Any]) -> None:
    await batcher.aclose(timeout=0.01)


async def timed_out_at_once(batcher: Batcher[Any, Any]) -> None:
    await batcher.aclose(timeout=0)


async def cancelled(batcher: Batcher[Any, Any]) -> None:
    with anyio.move_on_after(0.01) as scope:
        await batcher.aclose()
    assert scope.cancelled_caught


async def second(batcher: Batcher[Any, Any]) -> None:
    """The second one is less patient."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(batcher.aclose)
        await until(lambda: not batcher.ready)
        await batcher.aclose(timeout=0.01)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("close", [timed_out, timed_out_at_once, cancelled, second])
async def test_after_its_timeout_or_cancelled_all_get_an_error_and_it_waits_no_more(
    workers: Workers, close: Callable[[Any], Any]
) -> None:
    async with busy(workers=workers) as callers:
        await callers.queue(1)
        await close(callers.batcher)
        await until(lambda: {"first", 1} <= callers.outcomes.keys())
        assert all(map(closed, callers.outcomes.values()))
        assert callers.gate.held == 1, "no worker can be interrupted"
        assert callers.batcher.stats().in_flight == 0, "each caller has its outcome"
        callers.gate.open()
        await callers.batcher.aclose()
    assert callers.runs == []


@on_asyncio
async def test_a_cancellation_of_asyncios_own_does_the_same(workers: Workers) -> None:
    async with busy(workers=workers) as callers:
        await callers.queue(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await callers.batcher.aclose()
        await until(lambda: len(callers.outcomes) == 2)
        callers.gate.open()
    assert all(map(closed, callers.outcomes.values()))


async def test_an_unread_stream_does_not_delay_a_cancelled_exit() -> None:
    def endless(items: list[str]) -> Iterator[list[str]]:
        while True:
            yield items

    with anyio.CancelScope() as scope:
        async with Batcher(endless, collate_fn=list) as batcher:
            stream = batcher.stream("x")
            assert await anext(stream) == "x"
            scope.cancel()
    assert scope.cancelled_caught
    with pytest.raises(aiopar.ServiceClosed):
        assert [part async for part in stream] == ["x"]  # the part that was made ahead


async def test_a_batch_that_fills_runs_when_the_batcher_closes(workers: Workers) -> None:
    recorder = Recorder()
    async with (
        open_batcher(workers, recorder, max_queue_delay=1000) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        await callers.queue(1, 2)
        await batcher.aclose()
    assert recorder.runs == [[1, 2]]


async def test_before_it_was_opened() -> None:
    batcher = Batcher(Recorder(), collate_fn=list)
    assert not batcher.ready
    await batcher.aclose()
    with pytest.raises(aiopar.ServiceClosed):
        await batcher(1)
    assert not batcher.ready
    async with batcher:
        assert batcher.ready
        assert await batcher(1) == "1"
    assert batcher.alive
    assert not batcher.ready


async def test_a_closed_batcher_does_not_open_its_pool() -> None:
    pool = ReplicaPool(nn.Linear(2, 2), ["cpu"])
    batcher = Batcher(pool)
    await batcher.aclose()
    with pytest.raises(aiopar.ServiceClosed):
        await batcher(torch.ones(2))
    assert pool.stats().replicas == ()


@pytest.mark.parametrize("seconds", [-1, "1", float("nan")])
async def test_a_bad_timeout_closes_nothing(workers: Workers, seconds: Any) -> None:
    async with open_batcher(workers, Recorder()) as batcher:
        with pytest.raises((TypeError, ValueError), match="timeout must be"):
            await batcher.aclose(timeout=seconds)
        assert await batcher(1) == "1"


# Opened again.


@pytest.mark.parametrize("drain", [True, False])
async def test_opened_again_it_serves_and_nothing_is_left_of_the_first_run(
    workers: Workers, drain: bool
) -> None:
    async with busy(workers=workers) as callers:
        batcher = callers.batcher
        batcher.add_observer(watcher := Watcher())
        await callers.queue(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(batcher.aclose, drain=drain))
            await until(lambda: not batcher.ready)
            with pytest.raises(aiopar.ServiceClosed):
                await batcher(2)
            callers.gate.open()
        assert not batcher.ready
        async with batcher:
            assert batcher.ready
            assert batcher.stats() == Batcher(str).stats()
            assert await batcher(3) == "3"
            assert batcher.stats().answered == 1
        assert list(watcher.batches[-1].items) == [watcher.of("completed")[-1][0]], "observers stay"
        assert not batcher.ready
        with pytest.raises(aiopar.ServiceClosed):
            await batcher(4)
    assert callers.outcomes["first"] == "first"
    assert callers.outcomes[1] == "1" or (not drain and closed(callers.outcomes[1]))


@pytest.mark.parametrize("how", [{}, {"timeout": 0.0}], ids=["drains", "timed out"])
async def test_opened_again_it_waits_for_the_batches_of_the_first_run(
    workers: Workers, how: dict[str, Any]
) -> None:
    opened = anyio.Event()

    async def reopen(batcher: Batcher[Any, Any]) -> None:
        async with batcher:
            opened.set()
            assert await batcher("again") == "again"

    async with busy(workers=workers, max_batch_size=1) as callers:
        await callers.queue(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(callers.batcher.aclose, **how))
            await until(lambda: not callers.batcher.ready)
            for _ in range(2):
                tasks.start_soon(reopen, callers.batcher)
            await anyio.wait_all_tasks_blocked()
            assert not opened.is_set()
            callers.gate.open()
    served = {"first", 1} if not how else set()
    assert {item for item, outcome in callers.outcomes.items() if not closed(outcome)} == served
    assert callers.runs[-1] == ["again"]


@on_asyncio
async def test_opened_again_it_counts_a_request_that_waits_for_the_pool_since_then() -> None:
    class Gated(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            gate()
            return batch

    gate = Gate()
    batcher = Batcher(ReplicaPool(Gated(), ["cpu"], warmup=torch.zeros(1)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(batcher, torch.ones(()))
        await gate.entered()
        await batcher.aclose()
        tasks.start_soon(batcher.__aenter__)
        await until(lambda: not batcher.closed)
        gate.open()
    assert outcomes_in(batcher.stats()) == {"answered": 1}
    await batcher.aclose()


async def test_opened_again_it_uses_the_executor_of_that_time(make_workers: MakeWorkers) -> None:
    batcher = Batcher(AtHome(Recorder()), collate_fn=list)
    for _ in range(2):
        async with make_workers(1) as executor:
            with aiopar.use_executor(executor):
                async with batcher:
                    assert await batcher(1) == "1"
            assert executor.stats().workers[0].completed > 0


async def test_a_batcher_and_its_pool_are_opened_again(workers: Workers) -> None:
    pool = ReplicaPool(nn.Linear(2, 2), executor=workers)
    batcher = Batcher(pool)
    for _ in range(3):
        async with pool, batcher:
            assert (await batcher(torch.ones(2))).shape == (2,)
            assert batcher.ready
    with pytest.raises(aiopar.ServiceClosed, match="the pool is closed"):
        async with batcher:
            pytest.fail("its pool is closed")


async def test_an_open_batcher_follows_its_pool_that_is_opened_again(workers: Workers) -> None:
    pool = ReplicaPool(nn.Linear(2, 2), ["cpu"], executor=workers)
    async with Batcher(pool) as batcher:
        for _ in range(3):
            async with pool:
                assert (await batcher(torch.ones(2))).shape == (2,)
                assert batcher.ready
            with pytest.raises(aiopar.ReplicaUnavailable):
                await batcher(torch.ones(2))


# Executors.


async def test_the_executor_is_shut_down_before_a_call(make_workers: MakeWorkers) -> None:
    executor = make_workers(1)
    async with open_batcher(executor, Recorder()) as batcher:
        assert await batcher(1) == "1"
        await executor.aclose()
        for outcome in await outcomes_of(batcher, [1, 2, 3]):
            assert isinstance(outcome, aiopar.ExecutorShutdown)
        assert batcher.stats().queued == 0


async def test_queued_items_fail_when_the_executor_drains(make_workers: MakeWorkers) -> None:
    """The running batch goes on; the next batch is refused, and its callers get the error."""
    executor = make_workers(1)
    async with busy(workers=executor, max_batch_size=2) as callers:
        await callers.queue(1, 2, 3)
        executor.shutdown(wait=False)
        callers.gate.open()
        await until(lambda: len(callers.outcomes) == 4)
    await executor.aclose()
    assert callers.outcomes.pop("first") == "first"
    assert {type(it) for it in callers.outcomes.values()} == {aiopar.ExecutorShutdown}


async def test_the_executor_drops_a_batch_before_it_has_begun(make_workers: MakeWorkers) -> None:
    executor = make_workers(1)
    with Gate() as gate:
        async with open_batcher(executor, Recorder()) as batcher:
            executor.submit(AtHome(gate))  # somebody else's
            await gate.entered()
            async with anyio.create_task_group() as tasks:
                callers = Callers(batcher, tasks)
                await callers.queue(1, 2)
                executor.shutdown(wait=False, cancel_futures=True)
            assert {type(it) for it in callers.outcomes.values()} == {aiopar.ExecutorShutdown}
            gate.open()
    await executor.aclose()


# Pools.


async def test_a_batcher_leaves_its_pool_as_it_was(workers: Workers) -> None:
    async with ReplicaPool(nn.Linear(2, 2), executor=workers) as pool:
        for _ in range(2):
            async with Batcher(pool) as batcher:
                assert (await batcher(torch.ones(2))).shape == (2,)
        assert (await pool(torch.ones(1, 2))).shape == (1, 2)


@pytest.mark.parametrize("on_loop", [False, True])
def test_when_it_returns_the_callers_have_their_outputs(on_loop: bool) -> None:
    async def coroutine(batch: torch.Tensor) -> torch.Tensor:
        return batch + 1

    async def main() -> list[bool]:
        batcher = Batcher(coroutine if on_loop else lambda batch: batch + 1, max_batch_size=2)
        async with batcher:
            tasks = [asyncio.create_task(batcher(torch.tensor(n))) for n in range(5)]
            await asyncio.sleep(0)
        # The program may end here, and the callers that still wait with it.
        return [task.done() for task in tasks]

    for _ in range(20):
        assert asyncio.run(main()) == [True] * 5
