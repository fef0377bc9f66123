"""`aiopar.Future` for who waits: blocking, awaiting, and what is done then."""

import asyncio
import concurrent.futures
import copy
import pickle
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, InvalidStateError
from typing import Any

import anyio
import pytest
import trio

import aiopar
from aiopar import Future
from tests.sample_futures import failed_future, until_awaited

# Values and errors


def test_result_waits_in_time() -> None:
    future: Future[int] = Future()
    for timeout in (0, 0.01, -1):
        with pytest.raises(TimeoutError):
            future.result(timeout)
        with pytest.raises(TimeoutError):
            future.exception(timeout)
    future.set_result(1)
    assert future.result(0) == 1
    assert future.exception(0) is None


@pytest.mark.parametrize("verb", [Future.result, Future.exception, Future.wait])
def test_blocked_until_done(verb: Callable[[Future[int]], Any]) -> None:
    future: Future[int] = Future()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(verb, future)
        while not future._blocked_threads:
            assert not waiting.done()
        future.set_result(1)
        assert waiting.result(30) == (None if verb is Future.exception else 1)


def test_value() -> None:
    future: Future[int] = Future()
    with pytest.raises(InvalidStateError, match="pending: await it first"):
        future.value()
    future.set_result(1)
    assert future.value() == 1
    with pytest.raises(ZeroDivisionError):
        failed_future(ZeroDivisionError()).value()
    future = Future()
    future.cancel()
    with pytest.raises(CancelledError):
        future.value()


@pytest.mark.anyio
async def test_wait_on_an_event_loop_refuses_to_block() -> None:
    future: Future[int] = Future()
    with pytest.raises(aiopar.BlockingWaitError, match="await"):
        future.wait()
    future.set_result(1)
    assert future.wait() == 1


@pytest.mark.anyio
async def test_awaited_by_many_tasks_and_again() -> None:
    future: Future[int] = Future()
    seen: list[int] = []

    async def read() -> None:
        seen.append(await future)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(read)
        await until_awaited(future, 5)
        future.set_result(7)
    assert seen == [7] * 5
    assert await future == 7


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_errors_reach_every_awaiter(error: type[BaseException]) -> None:
    future: Future[int] = Future()
    caught: list[BaseException] = []

    async def read() -> None:
        try:
            await future
        except BaseException as raised:  # noqa: BLE001
            caught.append(raised)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(read)
        await until_awaited(future, 2)
        future.set_exception(error())
    assert [type(raised) for raised in caught] == [error] * 2


@pytest.mark.anyio
async def test_errors_of_a_worker_reach_the_awaiter() -> None:
    def stop() -> None:
        raise StopIteration(3)

    def leave() -> None:
        raise SystemExit(3)

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        for call in (executor.submit, executor.run_sync):
            run: Callable[..., Awaitable[Any]] = call
            with pytest.raises(RuntimeError, match="StopIteration") as raised:
                await run(stop)
            assert isinstance(raised.value.__cause__, StopIteration)
            with pytest.raises(SystemExit):
                await run(leave)
            assert await run(abs, -1) == 1  # the worker lives on


def test_tracebacks_do_not_add_up() -> None:
    future = failed_future(ValueError())
    depths = set()
    for _ in range(3):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            future.result()
        depths.add(len(traceback.extract_tb(raised.value.__traceback__)))
    assert len(depths) == 1


@pytest.mark.asyncio
async def test_what_asyncio_takes() -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]
    for n, future in enumerate(futures):
        asyncio.get_running_loop().call_soon(future.set_result, n)
    gathered = asyncio.gather(*futures)
    assert await gathered == [0, 1, 2]
    pending: Future[int] = Future()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pending, 0.01)
    assert pending.cancelled()
    shielded: Future[int] = Future()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(shielded), 0.01)
    shielded.set_result(1)
    assert not asyncio.isfuture(shielded)


def test_awaited_in_trio_without_anyio() -> None:
    async def main() -> int:
        with trio.fail_after(30):
            return await aiopar.fork(abs, -3)

    assert trio.run(main) == 3


# Then


async def _later(_: object) -> None:
    raise AssertionError("nobody would await it")


def test_then() -> None:
    future: Future[int] = Future()
    chained = future.then(lambda done: done.value() + 1).then(lambda done: done.value() * 2)
    assert not chained.done()
    future.set_result(3)
    assert chained.value() == 8
    assert future.then(lambda done: done.value()).value() == 3


def test_then_is_called_whatever_way_it_ended() -> None:
    error = ZeroDivisionError()
    failed = failed_future(error).then(lambda done: done.value()).then(lambda done: done.value())
    assert failed.exception() is error
    assert failed_future(error).then(lambda done: done.exception()).value() is error
    cancelled: Future[int] = Future()
    after = cancelled.then(lambda done: done.cancelled())
    cancelled.cancel()
    assert after.value()


def test_then_of_what_cannot_be_called() -> None:
    future: Future[int] = Future()
    with pytest.raises(TypeError, match="expected a callable, got None"):
        future.then(None)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(TypeError, match="is a coroutine function"):
        future.then(_later)


def test_then_of_a_cancelled_child_is_skipped() -> None:
    future: Future[int] = Future()
    seen: list[Future[int]] = []
    child = future.then(seen.append)
    assert child.cancel()
    future.set_result(1)
    assert not seen


def test_a_chain_of_any_length() -> None:
    first: Future[int] = Future()
    last = first
    for _ in range(5000):
        last = last.then(lambda done: done.value() + 1)
    first.set_result(0)
    assert last.value() == 5000


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_there_are_no_copies(again: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        again(Future())
