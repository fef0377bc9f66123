"""Turns: the calls of a gang, at once or one after the other."""

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio.lowlevel
import pytest
import pytest_asyncio
import torch

import aiopar
from aiopar._gang import Gang
from aiopar._turns import Turns
from aiopar.testing import Gate
from tests import simdevice

from .freeing import survivors, without_gc

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
    executor._submit_gang(members, executor._groups_for(len(calls)))
    return [member.future for member in members]


@pytest.mark.asyncio
async def test_each_starts_when_the_one_before_has_returned(
    executor: aiopar.DeviceExecutor,
) -> None:
    events: list[str] = []

    def call(index: int) -> None:
        events.append(f"{index} starts")
        torch.ones(8) + 1  # lets go of the interpreter
        events.append(f"{index} returns")

    for _ in range(100):
        events.clear()
        calls = [partial(call, index) for index in range(3)]
        await aiopar.collect_all(start(executor, calls, Turns(3, limit=FOR_EVER)))
        assert events == [f"{i} {what}" for i in range(3) for what in ("starts", "returns")]


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

    futures = start(executor, [fails, abs_of_one, abs_of_one], Turns(3, limit=FOR_EVER))
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(results[0], KeyError)


def abs_of_one() -> int:
    return abs(-1)


@pytest.mark.asyncio
async def test_an_abort_lets_all_start() -> None:
    async with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
        gate = Gate()
        gang = Gang(Turns(2, limit=FOR_EVER))
        members = [gang.add(gate, ()), gang.add(abs, (-1,))]
        executor._submit_gang(members, executor._groups_for(2))
        await gate.entered()
        while not members[1].future.running():  # about to wait for its turn, or at it
            await anyio.lowlevel.checkpoint()
        gang.abort(None)
        assert await members[1].future == 1
        gate.open()
        await members[0].future


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


@pytest.mark.sim
@pytest.mark.asyncio
async def test_on_an_accelerator_the_next_launches_while_kernels_run() -> None:
    devices = ["sim:0", "sim:1"]
    async with aiopar.DeviceExecutor(devices) as executor:
        launched = [aiopar.Future[None](), aiopar.Future[None]()]

        def call(index: int) -> torch.Tensor:
            y = torch.ones(2, device=devices[index]) + 1
            launched[index].set_result(None)
            return y

        with simdevice.paused():
            calls = [partial(call, 0), partial(call, 1)]
            futures = start(executor, calls, Turns(2, limit=FOR_EVER))
            await asyncio.gather(*launched)
            assert not futures[0].done()
        assert [y.tolist() for y in await asyncio.gather(*futures)] == [[2, 2]] * 2
