"""`aiopar.Future`: what a cancelled `await` cancels, and what it leaves alone."""

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiopar
from aiopar import Future
from tests.blocked_threads import is_blocked
from tests.interruptions import at_every_point


async def _await_under(future: Future[Any], scope: anyio.CancelScope) -> None:
    with scope:
        await future


async def _cancelled_await(future: Future[Any]) -> type[BaseException]:
    """Await `future`, cancel this `await`, and return the class of the error that it raises."""
    caught: list[type[BaseException]] = []

    async def read() -> None:
        try:
            await future
        except BaseException as error:
            caught.append(type(error))
            raise

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    return caught[0]


@pytest.mark.anyio
async def test_the_last_cancelled_await_cancels_a_call_that_has_not_started() -> None:
    future: Future[int] = Future()
    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_await_under, future, first)
        tasks.start_soon(_await_under, future, second)
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not future.done()
        second.cancel()
    assert future.cancelled()


@pytest.mark.anyio
async def test_the_loop_and_concurrent_futures_have_cancelled_errors_of_their_own() -> None:
    cancelled = anyio.get_cancelled_exc_class()
    assert issubclass(await _cancelled_await(Future()), cancelled)
    future: Future[int] = Future()

    async def cancel() -> None:
        await anyio.wait_all_tasks_blocked()
        assert future.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel)
        with pytest.raises(CancelledError) as raised:
            await future
    assert not isinstance(raised.value, cancelled)


@pytest.mark.anyio
async def test_a_running_call_cannot_be_cancelled() -> None:
    future: Future[int] = Future()
    assert future.claim()
    await _cancelled_await(future)
    assert not future.cancel()
    assert future.running()
    future.set_result(1)
    assert await future == 1


@pytest.mark.anyio
@pytest.mark.parametrize("user", ["callback", "then", "concurrent.futures.wait", "result"])
async def test_a_cancelled_await_does_not_cancel_a_future_that_is_used_elsewhere(user: str) -> None:
    future: Future[int] = Future()
    seen: list[object] = []
    blocking: dict[str, Callable[[], object]] = {
        "result": future.result,
        "concurrent.futures.wait": lambda: concurrent.futures.wait([future]),
    }
    thread = threading.Thread(target=blocking.get(user))
    if user == "callback":
        future.add_done_callback(seen.append)
    elif user == "then":
        child = future.then(lambda done: done.value())
    else:
        thread.start()
        while not is_blocked(thread):
            await anyio.lowlevel.checkpoint()
    await _cancelled_await(future)
    assert not future.done()
    future.set_result(1)
    if thread.ident is not None:
        await anyio.to_thread.run_sync(thread.join)
    assert seen == ([future] if user == "callback" else [])
    assert user != "then" or child.value() == 1


MADE_OF: dict[str, Callable[[Future[Any]], Future[Any]]] = {
    "collect_all": lambda future: aiopar.collect_all([future]),
    "then": lambda future: future.then(Future.value),
}


@pytest.mark.anyio
@pytest.mark.parametrize("verb", MADE_OF)
async def test_a_cancelled_future_releases_the_futures_that_it_was_made_from(verb: str) -> None:
    future: Future[int] = Future()
    for _ in range(3):
        await _cancelled_await(MADE_OF[verb](future))
        assert MADE_OF[verb](future).cancel()
    assert not future.done()
    await _cancelled_await(future)
    assert future.cancelled(), "nothing else waited for it"


@pytest.mark.anyio
async def test_an_await_that_is_cancelled_after_the_completion_loses_nothing() -> None:
    future: Future[int] = Future()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_await_under, future, anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            future.set_result(1)
            scope.cancel()
    assert future.value() == 1


_STEPS: dict[str, Callable[[Future[Any]], object]] = {
    "result": lambda future: future.result(0),
    "wait": lambda future: concurrent.futures.wait([future], 0),
    "callback": lambda future: future.add_done_callback(id),
    "then": lambda future: future.then(id),
    "set_result": lambda future: future.set_result(1),
    "cancel": Future.cancel,
}
_ERRORS = TimeoutError, CancelledError, concurrent.futures.InvalidStateError


@pytest.mark.asyncio
@pytest.mark.may_block("waits for 0 seconds")
@pytest.mark.parametrize("step", _STEPS)
async def test_a_coroutine_that_awaits_it_may_be_collected_at_any_point(step: str) -> None:
    async def read(future: Future[Any]) -> None:
        await future

    for interruption in at_every_point():
        future: Future[Any] = Future()
        coroutine = read(future)
        coroutine.send(None)
        with interruption.by(coroutine.close), suppress(*_ERRORS):
            _STEPS[step](future)
        coroutine.close()
        assert not future.running()
