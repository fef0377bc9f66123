"""Turns: the calls of a gang, at once or one after the other."""

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, wait
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import pytest_asyncio
import torch

import aiopar
from aiopar.executor._gang import Gang, GangCall
from aiopar.executor._turns import Turns
from aiopar.testing import Gate
from tests.freeing import survivors, without_gc

# Longer than a test may take: whoever waits so long for a turn fails it.
FOR_EVER = 1000.0


@pytest_asyncio.fixture
async def executor() -> AsyncIterator[aiopar.DeviceExecutor]:
    async with aiopar.DeviceExecutor(["cpu"] * 3) as executor:
        yield executor


def start(
    executor: aiopar.DeviceExecutor, calls: list[Any], turns: Turns
) -> list[aiopar.Future[Any]]:
    gang = Gang(turns)
    members = [gang.add(call, ()) for call in calls]
    executor._dispatcher.submit_gang(members, executor._dispatcher.groups_for(len(calls)))
    return [member.future for member in members]


@pytest.mark.asyncio
async def test_each_starts_when_the_one_before_has_returned(
    executor: aiopar.DeviceExecutor,
) -> None:
    events: list[int] = []

    def call(index: int) -> None:
        events.append(index)
        torch.ones(8) + 1  # lets go of the interpreter
        events.append(index)

    for _ in range(100):
        events.clear()
        calls = [partial(call, index) for index in range(3)]
        await aiopar.collect_all(start(executor, calls, Turns(3, limit=FOR_EVER)))
        assert events[::2] == events[1::2]
        assert sorted(events[::2]) == [0, 1, 2]


@pytest.mark.asyncio
async def test_at_once_they_do_not_wait_for_each_other(executor: aiopar.DeviceExecutor) -> None:
    barrier = threading.Barrier(3)
    futures = start(executor, [barrier.wait] * 3, Turns(3))
    assert sorted(await asyncio.gather(*futures)) == [0, 1, 2]


@pytest.mark.asyncio
async def test_who_meets_the_others_lets_them_start(executor: aiopar.DeviceExecutor) -> None:
    def call() -> list[int]:
        replica = aiopar.current_replica()
        return replica.exchange(replica.index)

    futures = start(executor, [call] * 3, Turns(3, limit=FOR_EVER))
    assert await asyncio.gather(*futures) == [[0, 1, 2]] * 3


@pytest.mark.asyncio
async def test_who_waits_for_another_call_lets_them_start(
    executor: aiopar.DeviceExecutor,
) -> None:
    started = aiopar.Future[str]()
    futures = start(
        executor,
        [started.wait, partial(started.set_result, "started")],
        Turns(2, limit=FOR_EVER),
    )
    assert await asyncio.gather(*futures) == ["started", None]


@pytest.mark.asyncio
async def test_a_wait_that_nobody_sees_is_over_after_the_limit(
    executor: aiopar.DeviceExecutor,
) -> None:
    barrier = threading.Barrier(3)
    futures = start(executor, [barrier.wait] * 3, Turns(3, limit=0.01))
    assert sorted(await asyncio.gather(*futures)) == [0, 1, 2]


@pytest.mark.asyncio
async def test_who_fails_ends_its_turn(executor: aiopar.DeviceExecutor) -> None:
    def fails() -> None:
        raise KeyError("mine")

    ran: list[int] = []
    calls = [fails, partial(ran.append, 1), partial(ran.append, 2)]
    futures = start(executor, calls, Turns(3, limit=FOR_EVER))
    results = await asyncio.gather(*futures, return_exceptions=True)
    # Those that had come before it are through, the others do not run.
    through = [result for result in results if result is None]
    assert isinstance(results[0], KeyError)
    assert len(through) == len(ran)
    assert {type(result) for result in results if result is not None} <= {
        KeyError,
        aiopar.ReplicaAborted,
        CancelledError,
    }


def abs_of_one() -> int:
    return abs(-1)


async def abort_who_waits(
    executor: aiopar.DeviceExecutor, second: Any
) -> tuple[Gate, list[GangCall[Any]]]:
    """A gang that is aborted when its second member has come to wait; the gate of its first."""
    gate, other = Gate(), Gate()
    held = executor.on(worker=1).submit(other)
    await other.entered()
    gang = Gang(Turns(2, limit=FOR_EVER))
    members: list[GangCall[Any]] = [gang.add(gate, ()), gang.add(second, ())]
    workers = executor._dispatcher.workers
    executor._dispatcher.submit_gang(members, [[workers[0]], [workers[1]]])
    await gate.entered()
    other.open()
    await held
    while not members[1].future.running():  # about to wait for its turn, or at it
        await anyio.lowlevel.checkpoint()
    gang.abort(None)
    return gate, members


@pytest.mark.asyncio
async def test_who_waits_for_its_turn_is_let_go_of_by_an_abort(
    executor: aiopar.DeviceExecutor,
) -> None:
    gate, members = await abort_who_waits(executor, partial(pytest.fail, "it ran"))
    with pytest.raises(aiopar.ReplicaAborted):
        await members[1].future
    gate.open()
    await members[0].future


@pytest.mark.asyncio
async def test_what_an_abort_raises_in_who_waits_for_its_turn_keeps_no_call(
    executor: aiopar.DeviceExecutor,
) -> None:
    with without_gc():
        gate, members = await abort_who_waits(executor, abs_of_one)
        gate.open()
        await anyio.to_thread.run_sync(wait, [member.future for member in members])
        kept = [weakref.ref(member) for member in members]
        del members
        assert await survivors(kept) == []


@pytest.mark.asyncio
async def test_nobody_waits_for_a_call_that_is_queued() -> None:
    async with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
        gate = Gate()
        held = executor.on(worker=0).submit(gate)
        await gate.entered()
        gang = Gang(Turns(2, limit=FOR_EVER))
        members = [gang.add(abs_of_one, ()) for _ in range(2)]
        workers = executor._dispatcher.workers
        executor._dispatcher.submit_gang(members, [[workers[0]], [workers[1]]])
        assert await members[1].future == 1
        gate.open()
        await held
        assert await members[0].future == 1


@pytest.mark.parametrize("limit", [0.0, FOR_EVER])
def test_what_is_reported(limit: float) -> None:
    reports: list[tuple[float, float]] = []
    turns = Turns(2, limit=limit, report=lambda *report: reports.append(report))
    turns.ended(10.0, 13.0, 1.0)
    assert not reports
    turns.ended(10.0, 14.0, 2.0)
    assert reports == [(4.0, 0.75)]


def test_nothing_is_reported_of_those_that_ran_at_once_in_name_only() -> None:
    reports: list[float] = []
    turns = Turns(2, report=lambda *report: reports.extend(report))
    turns.ended(10.0, 12.0, 2.0)
    turns.ended(12.0, 14.0, 2.0)
    assert not reports


@pytest.mark.asyncio
async def test_nothing_is_reported_of_turns_that_were_none(
    executor: aiopar.DeviceExecutor,
) -> None:
    def call() -> None:
        aiopar.current_replica().barrier()

    reports: list[float] = []
    turns = Turns(2, limit=FOR_EVER, report=lambda *report: reports.extend(report))
    await asyncio.gather(*start(executor, [call] * 2, turns))
    assert not reports


@pytest.mark.asyncio
async def test_a_worker_is_not_busy_while_a_call_waits_for_its_turn() -> None:
    async with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
        work = partial(time.sleep, 0.05)
        await asyncio.gather(*start(executor, [work, abs_of_one], Turns(2, limit=FOR_EVER)))
        times = [worker.busy_seconds for worker in executor.stats().workers]
        assert min(times) < 0.025 < max(times)


@pytest.mark.asyncio
async def test_nothing_is_kept(executor: aiopar.DeviceExecutor) -> None:
    class Reporter:
        def __call__(self, seconds: float, threads: float) -> None:
            pass

    with without_gc():
        reporter = Reporter()
        kept = weakref.ref(reporter)
        futures = start(executor, [abs_of_one] * 2, Turns(2, limit=FOR_EVER, report=reporter))
        del reporter
        assert await asyncio.gather(*futures) == [1, 1]
        assert await survivors([kept]) == []
