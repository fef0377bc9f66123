"""`aiopar.Future`: states, completion, callbacks, `then`, and how threads and tasks wait."""

import asyncio
import concurrent.futures
import copy
import functools
import logging
import pickle
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, InvalidStateError
from contextlib import suppress
from typing import Any

import anyio
import pytest
import trio

import aiopar
from aiopar import Future
from tests.blocked_threads import until_blocked
from tests.interruptions import at_every_point


def _finished(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _cancelled() -> Future[Any]:
    future: Future[Any] = Future()
    assert future.cancel()
    return future


def test_states_of_a_call_that_runs() -> None:
    future: Future[int] = Future()
    assert (future.done(), future.running(), future.cancelled()) == (False, False, False)
    assert future.set_running_or_notify_cancel()
    assert (future.done(), future.running(), future.cancelled()) == (False, True, False)
    with pytest.raises(RuntimeError, match="already running"):
        future.set_running_or_notify_cancel()
    assert not future.claim()
    assert not future.cancel()
    future.set_result(3)
    assert (future.done(), future.running(), future.cancelled()) == (True, False, False)
    assert not future.cancel()
    assert not future.claim()
    assert future.result() == 3


def test_states_of_a_cancelled_future() -> None:
    future = _cancelled()
    assert (future.done(), future.running(), future.cancelled()) == (True, False, True)
    assert future.cancel()
    assert not future.claim()
    assert not future.set_running_or_notify_cancel()
    for read in (future.result, future.exception, future.value):
        with pytest.raises(CancelledError):
            read()


def test_one_of_many_claims() -> None:
    def race(name: str, take: Callable[[], bool]) -> None:
        start.wait()
        if take():
            won.append(name)

    for _ in range(200):
        future: Future[None] = Future()
        start = threading.Barrier(3)
        won: list[str] = []
        contenders = [("worker", future.claim), ("waiter", future.claim), ("user", future.cancel)]
        threads = [threading.Thread(target=race, args=one) for one in contenders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert future.cancelled() == (won == ["user"])
        assert future.running() == (won != ["user"])


@pytest.mark.parametrize("make", [lambda: _finished(1), _cancelled], ids=["finished", "cancelled"])
def test_a_future_that_is_done(make: Callable[[], Future[Any]]) -> None:
    """It cannot be completed again, and callbacks are called at once."""
    future = make()
    with pytest.raises(InvalidStateError, match="already"):
        future.set_result(2)
    with pytest.raises(InvalidStateError, match="already"):
        future.set_exception(ValueError())
    seen: list[Future[Any]] = []
    future.add_done_callback(seen.append)
    assert seen == [future]


@pytest.mark.parametrize("wrong", [None, ValueError, "ValueError"])
def test_set_exception_refuses_other_objects(wrong: Any) -> None:
    future: Future[int] = Future()
    with pytest.raises(TypeError, match="expected an exception instance"):
        future.set_exception(wrong)
    assert not future.done()


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_callbacks_are_called_in_order_by_the_completing_thread(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """An error of one of them is logged."""
    future: Future[int] = Future()
    seen: list[tuple[int, Future[int], str]] = []

    def see(n: int, done: Future[int]) -> None:
        seen.append((n, done, threading.current_thread().name))
        if n == 1:
            raise error

    for n in range(3):
        future.add_done_callback(functools.partial(see, n))
    thread = threading.Thread(target=future.set_result, args=(1,), name="completer")
    thread.start()
    thread.join()
    assert seen == [(n, future, "completer") for n in range(3)]
    [record] = caplog.records
    assert (record.name, record.levelno) == ("concurrent.futures", logging.ERROR)
    assert record.exc_info is not None
    assert record.exc_info[0] is error


@pytest.mark.parametrize("nested", [0, 49, 50, 120])
def test_ctrl_c_in_a_callback_is_raised_after_the_other_callbacks(nested: int) -> None:
    def interrupted(done: Future[int]) -> None:
        seen.append(done)
        raise KeyboardInterrupt

    seen: list[Future[Any]] = []
    future = last = Future[int]()
    for _ in range(nested):  # callbacks inside callbacks, up to a limit
        last = last.then(Future.value)
    last.add_done_callback(interrupted)
    last.add_done_callback(seen.append)
    future.add_done_callback(seen.append)
    with pytest.raises(KeyboardInterrupt):
        future.set_result(1)
    assert sorted(map(id, seen)) == sorted(map(id, [last, last, future]))
    assert last.result(0) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["set_result", "cancel"])
async def test_ctrl_c_at_any_point_of_a_completion(verb: str) -> None:
    """Every task is woken, and every callback is called once."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def wait(future: Future[Any]) -> None:
        await future

    def complete(future: Future[Any]) -> None:
        future.cancel() if verb == "cancel" else future.set_result(1)

    for interruption in at_every_point():
        future: Future[Any] = Future()
        tasks = [asyncio.create_task(wait(future)) for _ in range(3)]
        seen: list[Any] = []
        for _ in range(3):
            future.add_done_callback(seen.append)
        await asyncio.sleep(0)
        with suppress(KeyboardInterrupt), interruption.by(interrupt):
            complete(future)
        if not future.done():  # interrupted before it had begun
            complete(future)
        assert seen == [future] * 3
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)


def test_repr() -> None:
    futures = [Future[int](), _finished(1), _failed(ValueError()), _cancelled()]
    states = [repr(future).split(" ", 3)[3] for future in futures]
    assert states == [
        "state=pending>",
        "state=finished returned int>",
        "state=finished raised ValueError>",
        "state=cancelled>",
    ]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("return_when", ["ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"])
def test_concurrent_futures_wait(when: str, return_when: str) -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]

    def complete() -> None:
        if when == "meanwhile":
            until_blocked(threading.main_thread())
        futures[0].set_result(1)
        futures[1].cancel()
        futures[2].set_exception(ValueError())

    assert concurrent.futures.wait(futures, timeout=0.01).not_done == {*futures}
    thread = threading.Thread(target=complete)
    thread.start()
    if when == "before":
        thread.join()
    done, pending = concurrent.futures.wait(futures, timeout=30, return_when=return_when)
    thread.join()
    assert done
    if return_when == "ALL_COMPLETED":
        assert (done, pending) == (set(futures), set())
    if return_when == "FIRST_EXCEPTION":
        assert futures[2] in done


def test_concurrent_futures_as_completed() -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]
    with pytest.raises(TimeoutError):
        next(concurrent.futures.as_completed(futures, timeout=0.01))
    futures[2].set_result(2)
    order = concurrent.futures.as_completed(futures, timeout=30)
    assert next(order) is futures[2]
    futures[1].cancel()
    assert next(order) is futures[1]
    futures[0].set_exception(ValueError())
    assert next(order) is futures[0]


@pytest.mark.asyncio
async def test_asyncio_wrap_future() -> None:
    good, bad, dropped, unwanted = (Future[int]() for _ in range(4))
    wrapped = [asyncio.wrap_future(future) for future in (good, bad, dropped)]
    good.set_result(1)
    bad.set_exception(ValueError("bad"))
    dropped.cancel()
    outcomes = await asyncio.gather(*wrapped, return_exceptions=True)
    assert list(map(repr, outcomes[:2])) == ["1", "ValueError('bad')"]
    assert isinstance(outcomes[2], asyncio.CancelledError)
    asyncio.wrap_future(unwanted).cancel()
    await asyncio.sleep(0)
    assert unwanted.cancelled()


# Waiting


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
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(verb(future)))
    thread.start()
    until_blocked(thread)
    assert not seen
    future.set_result(1)
    thread.join()
    assert seen == [None if verb is Future.exception else 1]


def test_value() -> None:
    future: Future[int] = Future()
    with pytest.raises(InvalidStateError, match="pending: await it first"):
        future.value()
    future.set_result(1)
    assert future.value() == 1
    with pytest.raises(ZeroDivisionError):
        _failed(ZeroDivisionError()).value()
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        _failed(StopIteration(3)).value()


@pytest.mark.anyio
@pytest.mark.parametrize("error", [None, ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_awaited_by_many_tasks_and_again(error: type[BaseException] | None) -> None:
    future: Future[int] = Future()
    seen: list[object] = []

    async def read() -> None:
        try:
            seen.append(await future)
        except BaseException as raised:  # noqa: BLE001
            seen.append(type(raised))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        future.set_result(7) if error is None else future.set_exception(error())
    await read()
    assert seen == [error or 7] * 4


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
    future = _failed(ValueError())
    depths = set()
    for _ in range(3):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            future.result()
        depths.add(len(traceback.extract_tb(raised.value.__traceback__)))
    assert len(depths) == 1


@pytest.mark.asyncio
async def test_asyncio_functions_that_accept_a_future() -> None:
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
    raise AssertionError("never called")


def test_then() -> None:
    future: Future[int] = Future()
    chained = future.then(lambda done: done.value() + 1).then(lambda done: done.value() * 2)
    skipped: list[Future[int]] = []
    assert future.then(skipped.append).cancel()
    assert not chained.done()
    future.set_result(3)
    assert chained.value() == 8
    assert future.then(lambda done: done.value()).value() == 3
    assert not skipped


def test_then_is_called_however_the_future_ended() -> None:
    error = ZeroDivisionError()
    failed = _failed(error).then(lambda done: done.value()).then(lambda done: done.value())
    assert failed.exception() is error
    assert _failed(error).then(lambda done: done.exception()).value() is error
    assert _cancelled().then(lambda done: done.cancelled()).value()


def test_then_refuses_functions_that_cannot_be_called() -> None:
    future: Future[int] = Future()
    with pytest.raises(TypeError, match="expected a callable, got None"):
        future.then(None)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="is a coroutine function"):
        future.then(_later)


def test_a_chain_of_any_length() -> None:
    first: Future[int] = Future()
    last = first
    for _ in range(5000):
        last = last.then(lambda done: done.value() + 1)
    first.set_result(0)
    assert last.value() == 5000


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_future_cannot_be_copied(again: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        again(Future())
