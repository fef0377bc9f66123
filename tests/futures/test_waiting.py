"""Waiting for many futures: `collect_all`, `wait_all`, `as_completed`."""

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, assert_type

import anyio
import anyio.lowlevel
import pytest
import torch

import aiopar
from aiopar import Future
from aiopar.futures._waiting import close_fully
from aiopar.testing import Gate


@pytest.mark.parametrize("verb", [aiopar.collect_all, aiopar.wait_all, aiopar.as_completed])
def test_other_objects_are_refused(verb: Callable[[Any], object]) -> None:
    pending: Future[int] = Future()
    wrong: object
    for wrong in (3, torch.futures.Future()):
        with pytest.raises(TypeError, match=f"got {type(wrong).__name__} at index 1"):
            verb([pending, wrong])
    with pytest.raises(TypeError, match=r"futures must be an iterable of .*, not Future$"):
        verb(pending)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_collect_all_is_done_with_the_last(order: tuple[int, ...]) -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]
    complete: list[Callable[[], object]] = [
        lambda: futures[0].set_result(1),
        lambda: futures[1].set_exception(ValueError()),
        futures[2].cancel,
    ]
    everything = aiopar.collect_all(iter(futures))
    for n in order:
        assert not everything.done()
        complete[n]()
    assert everything.value() == futures


def test_collect_all_of_no_futures_of_done_futures_and_of_one_twice() -> None:
    assert aiopar.collect_all([]).value() == []
    future: Future[int] = Future()
    twice = aiopar.collect_all([future, future])
    future.set_result(1)
    assert twice.value() == [future, future]
    assert aiopar.collect_all([future]).value() == [future]


def test_wait_all_waits_for_all_and_raises_the_first_error_in_order() -> None:
    cancelled: Future[int] = Future()
    cancelled.cancel()
    with aiopar.DeviceExecutor(["cpu"] * 2) as executor, Gate() as gate:
        futures: list[Future[Any]] = [
            executor.submit(gate),
            *(executor.submit(int, text) for text in ("1", "x", "y")),
            cancelled,
        ]
        waited: Future[list[Any]] = executor.submit(aiopar.wait_all, futures)
        gate.wait_entered()
        assert not waited.done()
        gate.open()
        with pytest.raises(ValueError, match="'x'"):
            waited.result()
    with pytest.raises(CancelledError):
        aiopar.wait_all([cancelled])


def test_wait_all_in_a_worker_runs_calls_that_have_not_started() -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor:

        def tree(depth: int) -> int:
            if not depth:
                return 1
            return sum(aiopar.wait_all([executor.submit(tree, depth - 1) for _ in range(2)]))

        assert executor.submit(tree, 6).result() == 64


@pytest.mark.anyio
@pytest.mark.parametrize("verb", [Future.wait, lambda future: aiopar.wait_all([future])])
async def test_on_an_event_loop_a_wait_refuses_to_block(verb: Callable[[Any], object]) -> None:
    future: Future[int] = Future()
    with pytest.raises(aiopar.BlockingWaitError, match="use `await"):
        verb(future)
    future.set_result(1)
    assert verb(future) in (1, [1])


@pytest.mark.anyio
async def test_as_completed_yields_in_the_order_of_completion() -> None:
    futures: list[Future[int]] = [Future() for _ in range(4)]
    futures[2].set_result(2)
    completed = aiopar.as_completed([*futures, futures[0]])
    assert await anext(completed) is futures[2]
    futures[3].cancel()
    futures[0].set_exception(ValueError())
    assert await anext(completed) is futures[3]
    assert await anext(completed) is futures[0]
    futures[1].set_result(1)
    assert [future async for future in completed] == [futures[1]]
    with pytest.raises(StopAsyncIteration):
        await anext(completed)


@pytest.mark.anyio
async def test_futures_of_different_types_wait_together() -> None:
    number, text = aiopar.fork(int, "1"), aiopar.fork(str, 2)
    for future in await aiopar.collect_all([number, text]):
        assert assert_type(future, Future[Any]).done()
    assert assert_type(aiopar.wait_all([number, text]), list[Any]) == [1, "2"]
    async for future in assert_type(aiopar.as_completed((number, text)), aiopar.as_completed[Any]):
        assert future in (number, text)
    assert assert_type(aiopar.wait_all({"a": number}.values()), list[int]) == [1]


@pytest.mark.anyio
async def test_as_completed_is_read_by_many_tasks() -> None:
    futures: list[Future[int]] = [Future() for _ in range(6)]
    completed = aiopar.as_completed(futures)
    seen: list[Future[int]] = []

    async def read() -> None:
        async for future in completed:
            seen.append(future)  # noqa: PERF401  # shared

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(read)
        await anyio.lowlevel.checkpoint()
        for future in futures:
            future.set_result(1)
    assert sorted(map(id, seen)) == sorted(map(id, futures))


@pytest.mark.anyio
async def test_cancelled_reads_of_as_completed_leave_the_order() -> None:
    futures: list[Future[int]] = [Future() for _ in range(2)]
    completed = aiopar.as_completed(futures)

    async def read(scope: anyio.CancelScope) -> None:
        with scope:
            await anext(completed)

    scopes = [anyio.CancelScope() for _ in futures]
    async with anyio.create_task_group() as tasks:
        for scope in scopes:
            tasks.start_soon(read, scope)
            await anyio.wait_all_tasks_blocked()
        for scope in scopes:
            scope.cancel()
            await anyio.wait_all_tasks_blocked()
    futures[1].set_result(1)
    with anyio.fail_after(10):
        assert await anext(completed) is futures[1]


@pytest.mark.asyncio
async def test_close_fully_raises_a_cancelled_error_of_what_it_closes() -> None:
    raised = asyncio.CancelledError("raised by a generator that is closed")

    async def aclose() -> None:
        raise raised

    with pytest.raises(asyncio.CancelledError) as caught:
        await close_fully(aclose)
    assert caught.value is raised
