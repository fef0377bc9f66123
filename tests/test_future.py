"""`aiopar.Future` for who waits: blocking, awaiting, giving up, and what is left behind."""

import asyncio
import concurrent.futures
import contextlib
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, InvalidStateError
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio

import aiopar
from aiopar import Future
from aiopar._future import running_future
from aiopar.testing import Gate
from tests.freeing import without_gc


class _Call:
    """Stands for a queued call; says whether it was dropped."""

    dropped = False

    def drop(self) -> None:
        self.dropped = True


def _queued() -> tuple[Future[Any], _Call]:
    future: Future[Any] = Future()
    future.call = call = _Call()
    return future, call


def _failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


async def _until_awaited(future: Future[Any], count: int = 1) -> None:
    while len(future._awaiters) != count:
        await anyio.lowlevel.checkpoint()


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
        while not future._blocked:
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
        _failed(ZeroDivisionError()).value()
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
        await _until_awaited(future, 5)
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
        await _until_awaited(future, 2)
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
    future = _failed(ValueError())
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


# Then


def test_then() -> None:
    future: Future[int] = Future()
    chained = future.then(lambda done: done.value() + 1).then(lambda done: done.value() * 2)
    assert not chained.done()
    future.set_result(3)
    assert chained.value() == 8
    assert future.then(lambda done: done.value()).value() == 3


def test_then_is_called_whatever_way_it_ended() -> None:
    error = ZeroDivisionError()
    failed = _failed(error).then(lambda done: done.value()).then(lambda done: done.value())
    assert failed.exception() is error
    assert _failed(error).then(lambda done: done.exception()).value() is error
    cancelled: Future[int] = Future()
    after = cancelled.then(lambda done: done.cancelled())
    cancelled.cancel()
    assert after.value()


def test_then_of_a_cancelled_child_is_skipped() -> None:
    future: Future[int] = Future()
    seen: list[Future[int]] = []
    child = future.then(seen.append)
    assert child.cancel()
    future.set_result(1)
    assert not seen


# Giving up


@pytest.mark.anyio
async def test_the_last_to_give_up_cancels_what_has_not_started() -> None:
    future, call = _queued()
    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_await_under, future, first)
        tasks.start_soon(_await_under, future, second)
        await _until_awaited(future, 2)
        first.cancel()
        await _until_awaited(future, 1)
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
        await _until_awaited(future)
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
    future, _ = _queued()
    assert issubclass(await _cancelled_await(future) or object, anyio.get_cancelled_exc_class())


@pytest.mark.anyio
async def test_cancelled_by_somebody_else() -> None:
    future, call = _queued()

    async def cancel() -> None:
        await _until_awaited(future)
        assert future.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel)
        with pytest.raises(CancelledError) as raised:
            await future
    assert not isinstance(raised.value, anyio.get_cancelled_exc_class())
    assert call.dropped


@pytest.mark.anyio
async def test_work_that_runs_is_not_cancelled_with_its_last_awaiter() -> None:
    future, _ = _queued()
    future.claim()
    await _cancelled_await(future)
    assert future.running()
    future.set_result(1)
    assert await future == 1


@pytest.mark.anyio
@pytest.mark.parametrize("wish", ["callback", "then", "concurrent.futures.wait", "result"])
async def test_it_is_kept_for_whoever_else_waits(wish: str) -> None:
    future, call = _queued()
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
        while not (future._blocked or future._waiters):
            await anyio.lowlevel.checkpoint()
    await _cancelled_await(future)
    assert not future.done()
    assert not call.dropped
    future.set_result(1)
    if thread.ident is not None:
        await anyio.to_thread.run_sync(thread.join)
    assert seen == ([future] if wish == "callback" else [])
    assert wish != "then" or child.value() == 1


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
    future, _ = _queued()
    states: list[bool] = []

    def join() -> None:
        # As somebody would who comes just when the last awaiter has decided.
        if not future._awaiters and not states:
            states.append(future.done())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_await_under, future, anyio.CancelScope())
        await _until_awaited(future)
        future._mutex = _Probe(join)  # type: ignore[assignment]
        tasks.cancel_scope.cancel()
    assert states == [True]


@pytest.mark.anyio
async def test_cancelled_between_completion_and_wake_up() -> None:
    future, call = _queued()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_await_under, future, anyio.CancelScope())
            await _until_awaited(future)
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
                    await _until_awaited(futures[-1])
                    tasks.cancel_scope.cancel()
                assert all(future.cancelled() for future in futures)
            assert executor.stats().workers[0].queued == 0
        await held
        assert await executor.submit(abs, -1) == 1


# What is left behind


@pytest.fixture
def _no_gc() -> Iterator[None]:
    with without_gc():
        yield


class _Error(Exception):
    """Can be referred to weakly."""


def _fail() -> None:
    raise _Error


def _fail_anew(done: Future[Any]) -> None:
    del done
    raise _Error


def _let_on(gate: Gate) -> None:
    gate.wait_entered()
    gate.open()


async def _read(future: Future[Any]) -> None:
    try:
        await future
    finally:
        del future


_ways_to_fail: dict[str, Callable[[Future[Any]], Future[Any]]] = {
    "itself": lambda future: future,
    "then": lambda future: future.then(lambda done: done.value()).then(lambda done: done.value()),
    "another error": lambda future: future.then(_fail_anew),
}


@pytest.mark.anyio
@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("way", _ways_to_fail)
@pytest.mark.parametrize("done", [False, True], ids=["waiting", "done"])
async def test_an_awaited_error_goes_with_its_references(way: str, done: bool) -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with Gate() as gate:
            await_first = executor.submit(gate)
            failing = executor.submit(_fail)
            future = _ways_to_fail[way](failing)
            if done:
                gate.open()
                while not future.done():
                    await anyio.lowlevel.checkpoint()
            else:
                future.add_done_callback(lambda _: None)
                threading.Thread(target=_let_on, args=(gate,)).start()
            try:
                await _read(future)
            except _Error as error:
                left: list[weakref.ref[Any]] = [
                    weakref.ref(error),
                    weakref.ref(future),
                    weakref.ref(failing),
                ]
            await await_first
            del failing, future
            await executor.submit(str)
            assert [ref() for ref in left] == [None] * 3


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("verb", [Future.result, Future.value, Future.wait])
def test_a_raised_error_goes_with_its_references(verb: Callable[[Future[Any]], Any]) -> None:
    error = _Error()
    future = _failed(error)
    left: list[weakref.ref[Any]] = [weakref.ref(error), weakref.ref(future)]
    del error
    with contextlib.suppress(_Error):
        verb(future)
    del future
    assert [ref() for ref in left] == [None] * 2


@pytest.mark.anyio
@pytest.mark.usefixtures("_no_gc")
async def test_a_cancelled_await_leaves_nothing() -> None:
    future, call = _queued()
    left: list[weakref.ref[Any]] = [weakref.ref(future), weakref.ref(call)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, future)
        await _until_awaited(future)
        tasks.cancel_scope.cancel()
    del tasks, call, future
    await anyio.lowlevel.checkpoint()
    assert [ref() for ref in left] == [None] * 2


def test_awaited_in_trio_without_anyio() -> None:
    async def main() -> int:
        with trio.fail_after(30):
            return await aiopar.fork(abs, -3)

    assert trio.run(main) == 3
