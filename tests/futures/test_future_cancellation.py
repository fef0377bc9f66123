"""`aiopar.Future`: who gives up waiting, and what is cancelled by it."""

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiopar
from aiopar import Future
from aiopar.futures._future import running_future
from aiopar.testing import Gate
from tests.sample_futures import queued_future, until_awaited


@pytest.mark.anyio
async def test_the_last_to_give_up_cancels_what_has_not_started() -> None:
    future, call = queued_future()
    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_await_under, future, first)
        tasks.start_soon(_await_under, future, second)
        await until_awaited(future, 2)
        first.cancel()
        await until_awaited(future, 1)
        assert not future.done()
        second.cancel()
    assert future.cancelled()
    assert call.dropped


async def _await_under(future: Future[Any], scope: anyio.CancelScope) -> None:
    with scope:
        await future


async def _cancelled_await(future: Future[Any]) -> type[BaseException] | None:
    """Await `future`, be cancelled meanwhile, and return the class of the error."""
    caught: list[type[BaseException]] = []

    async def read() -> None:
        try:
            await future
        except BaseException as error:
            caught.append(type(error))
            raise

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await until_awaited(future)
        tasks.cancel_scope.cancel()
    return caught[0]


@pytest.mark.anyio
async def test_what_is_under_way_is_cancelled_by_nobody() -> None:
    future: Future[int] = running_future()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await future
    assert scope.cancelled_caught
    assert not future.cancel()
    assert future.running()
    future.set_result(1)
    assert await future == 1


@pytest.mark.anyio
async def test_being_cancelled_is_the_backends_own_error() -> None:
    future, _ = queued_future()
    assert issubclass(await _cancelled_await(future) or object, anyio.get_cancelled_exc_class())


@pytest.mark.anyio
async def test_cancelled_by_somebody_else() -> None:
    future, call = queued_future()

    async def cancel() -> None:
        await until_awaited(future)
        assert future.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel)
        with pytest.raises(CancelledError) as raised:
            await future
    assert not isinstance(raised.value, anyio.get_cancelled_exc_class())
    assert call.dropped


@pytest.mark.anyio
async def test_work_that_runs_is_not_cancelled_with_its_last_awaiter() -> None:
    future, _ = queued_future()
    future.claim()
    await _cancelled_await(future)
    assert future.running()
    future.set_result(1)
    assert await future == 1


@pytest.mark.anyio
@pytest.mark.parametrize("wish", ["callback", "then", "concurrent.futures.wait", "result"])
async def test_it_is_kept_for_whoever_else_waits(wish: str) -> None:
    future, call = queued_future()
    seen: list[Future[Any]] = []
    waits: dict[str, Callable[[], object]] = {
        "result": future.result,
        "concurrent.futures.wait": lambda: concurrent.futures.wait([future]),
    }
    thread = threading.Thread(target=waits.get(wish))
    if wish == "callback":
        future.add_done_callback(seen.append)
    elif wish == "then":
        child = future.then(lambda done: done.value())
    else:
        thread.start()
        while not (future._blocked_threads or future._waiters):
            await anyio.lowlevel.checkpoint()
    await _cancelled_await(future)
    assert not future.done()
    assert not call.dropped
    future.set_result(1)
    if thread.ident is not None:
        await anyio.to_thread.run_sync(thread.join)
    assert seen == ([future] if wish == "callback" else [])
    assert wish != "then" or child.value() == 1


MADE_OF: dict[str, Callable[[Future[Any]], Future[Any]]] = {
    "collect_all": lambda future: aiopar.collect_all([future]),
    "then": lambda future: future.then(Future.value),
}


@pytest.mark.anyio
@pytest.mark.parametrize("verb", MADE_OF)
async def test_what_was_cancelled_hangs_on_nothing(verb: str) -> None:
    future, call = queued_future()
    for _ in range(3):
        await _cancelled_await(MADE_OF[verb](future))
        assert MADE_OF[verb](future).cancel()
    assert not future.done(), "it was not theirs to cancel"
    assert not future._done_callbacks
    await _cancelled_await(future)
    assert future.cancelled()
    assert call.dropped


class _Probe:
    """A lock that calls `released` after each release."""

    def __init__(self, released: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._released = released

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()
        self._released()


@pytest.mark.anyio
async def test_nobody_who_joins_later_is_cancelled_with_the_last_awaiter() -> None:
    future, _ = queued_future()
    states: list[bool] = []

    def join() -> None:
        # As somebody would who comes just when the last awaiter has decided.
        if not future._awaiters and not states:
            states.append(future.done())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_await_under, future, anyio.CancelScope())
        await until_awaited(future)
        future._mutex = _Probe(join)  # type: ignore[assignment]
        tasks.cancel_scope.cancel()
    assert states == [True]


@pytest.mark.anyio
async def test_cancelled_between_completion_and_wake_up() -> None:
    future, call = queued_future()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_await_under, future, anyio.CancelScope())
            await until_awaited(future)
            future.claim()
            future.set_result(1)
            scope.cancel()
    assert future.value() == 1
    assert not call.dropped


@pytest.mark.anyio
async def test_a_storm_of_cancelled_awaits_leaves_nothing() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with Gate() as gate:
            held = executor.submit(gate)
            await gate.entered()
            for _ in range(20):
                futures = [executor.submit(abs, -1) for _ in range(100)]
                async with anyio.create_task_group() as tasks:
                    for future in futures:
                        tasks.start_soon(_await_under, future, anyio.CancelScope())
                    await until_awaited(futures[-1])
                    tasks.cancel_scope.cancel()
                assert all(future.cancelled() for future in futures)
            assert executor.stats().workers[0].queued == 0
        await held
        assert await executor.submit(abs, -1) == 1
