"""The completing half of `aiopar.Future`: states, outcomes, callbacks, what the parent expects."""

import asyncio
import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any

import pytest

from aiopar import Future


def _finished(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _cancelled() -> Future[Any]:
    future: Future[Any] = Future()
    assert future.cancel()
    return future


class _Call:
    """Stands for a queued call, and says what state its future has when it is dropped."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future
        self.dropped: list[bool] = []

    def drop(self) -> None:
        self.dropped.append(self.future.cancelled())


def test_states_of_a_call_that_runs() -> None:
    future: Future[int] = Future()
    assert (future.done(), future.running(), future.cancelled()) == (False, False, False)
    assert future.claim()
    assert (future.done(), future.running(), future.cancelled()) == (False, True, False)
    assert not future.claim()
    assert not future.cancel()
    future.set_result(3)
    assert (future.done(), future.running(), future.cancelled()) == (True, False, False)
    assert not future.cancel()
    assert not future.claim()
    assert future.result() == 3


def test_a_cancelled_future_is_claimed_by_nobody() -> None:
    future = _cancelled()
    assert (future.done(), future.running(), future.cancelled()) == (True, False, True)
    assert future.cancel()
    assert not future.claim()
    assert not future.set_running_or_notify_cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    with pytest.raises(concurrent.futures.CancelledError):
        future.exception()


def _race(start: threading.Barrier, won: list[str], name: str, take: Callable[[], bool]) -> None:
    start.wait()
    if take():
        won.append(name)


def test_one_of_many_claims() -> None:
    for _ in range(200):
        future: Future[None] = Future()
        start = threading.Barrier(3)
        won: list[str] = []

        contenders = [("worker", future.claim), ("waiter", future.claim), ("user", future.cancel)]
        threads = [
            threading.Thread(target=_race, args=(start, won, name, take))
            for name, take in contenders
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert future.cancelled() == (won == ["user"])
        assert future.running() == (won != ["user"])


def test_set_running_or_notify_cancel() -> None:
    future: Future[int] = Future()
    assert future.set_running_or_notify_cancel()
    with pytest.raises(RuntimeError, match="already running"):
        future.set_running_or_notify_cancel()


@pytest.mark.parametrize("make", [lambda: _finished(1), _cancelled], ids=["finished", "cancelled"])
def test_completed_twice(make: Callable[[], Future[Any]]) -> None:
    future = make()
    with pytest.raises(InvalidStateError, match="already"):
        future.set_result(2)
    with pytest.raises(InvalidStateError, match="already"):
        future.set_exception(ValueError())


@pytest.mark.parametrize("wrong", [None, ValueError, "ValueError"])
def test_an_exception_must_be_one(wrong: Any) -> None:
    future: Future[int] = Future()
    with pytest.raises(TypeError, match="expected an exception instance"):
        future.set_exception(wrong)
    assert not future.done()


def test_stop_iteration_is_replaced() -> None:
    future: Future[int] = Future()
    stop = StopIteration(3)
    future.set_exception(stop)
    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        future.result()
    assert raised.value.__cause__ is stop


def test_the_call_goes_when_it_is_claimed_and_is_dropped_when_cancelled() -> None:
    claimed: Future[int] = Future()
    claimed.call = kept = _Call(claimed)
    claimed.claim()
    assert claimed.call is None
    cancelled: Future[int] = Future()
    cancelled.call = call = _Call(cancelled)
    cancelled.cancel()
    cancelled.cancel()
    assert cancelled.call is None
    assert (kept.dropped, call.dropped) == ([], [True])


def test_callbacks_are_called_in_order_by_the_completing_thread() -> None:
    future: Future[int] = Future()
    seen: list[tuple[int, Future[int], str]] = []

    def see(n: int, done: Future[int]) -> None:
        seen.append((n, done, threading.current_thread().name))

    for n in range(3):
        future.add_done_callback(functools.partial(see, n))
    thread = threading.Thread(target=future.set_result, args=(1,), name="completer")
    thread.start()
    thread.join()
    assert seen == [(n, future, "completer") for n in range(3)]


@pytest.mark.parametrize("make", [lambda: _finished(1), _cancelled], ids=["finished", "cancelled"])
def test_a_callback_on_a_done_future_is_called_at_once(make: Callable[[], Future[Any]]) -> None:
    seen: list[Future[Any]] = []
    future = make()
    future.add_done_callback(seen.append)
    assert seen == [future]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_what_a_callback_raises_is_logged(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    future: Future[int] = Future()
    seen: list[Future[int]] = []

    def fail(_: Future[int]) -> None:
        raise error

    future.add_done_callback(fail)
    future.add_done_callback(seen.append)
    thread = threading.Thread(target=future.set_result, args=(1,))
    thread.start()
    thread.join()
    assert seen == [future]
    [record] = caplog.records
    assert (record.name, record.levelno) == ("concurrent.futures", logging.ERROR)
    assert record.exc_info is not None
    assert record.exc_info[0] is error


def test_ctrl_c_in_a_callback_on_the_main_thread_is_not_swallowed() -> None:
    def interrupted(_: Future[int]) -> None:
        raise KeyboardInterrupt

    future: Future[int] = Future()
    future.add_done_callback(interrupted)
    with pytest.raises(KeyboardInterrupt):
        future.set_result(1)
    assert future.result() == 1


def test_repr() -> None:
    failed: Future[int] = Future()
    failed.set_exception(ValueError())
    futures = [Future[int](), _finished(1), failed, _cancelled()]
    states = [repr(future).split(" ", 3)[3] for future in futures]
    assert states == [
        "state=pending>",
        "state=finished returned int>",
        "state=finished raised ValueError>",
        "state=cancelled>",
    ]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize(
    "return_when",
    [
        concurrent.futures.ALL_COMPLETED,
        concurrent.futures.FIRST_COMPLETED,
        concurrent.futures.FIRST_EXCEPTION,
    ],
)
def test_concurrent_futures_wait(when: str, return_when: str) -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]

    def complete() -> None:
        futures[0].set_result(1)
        futures[1].cancel()
        futures[2].set_exception(ValueError())

    thread = threading.Thread(target=complete)
    if when == "before":
        complete()
    else:
        # Starts to complete them once the waiter is in.
        assert futures[0]._condition  # from here on there is a list of waiters
        futures[0]._waiters = _Starting(thread)
    done, pending = concurrent.futures.wait(futures, timeout=30, return_when=return_when)
    assert done
    if return_when == concurrent.futures.ALL_COMPLETED:
        assert (done, pending) == (set(futures), set())
    if return_when == concurrent.futures.FIRST_EXCEPTION:
        assert futures[2] in done
    if when == "meanwhile":
        thread.join()
    assert not any(future._waiters for future in futures)


class _Starting(list[Any]):
    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self._thread = thread

    def append(self, waiter: object) -> None:
        super().append(waiter)
        self._thread.start()


def test_concurrent_futures_as_completed() -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]
    futures[2].set_result(2)
    order = concurrent.futures.as_completed(futures, timeout=30)
    assert next(order) is futures[2]
    futures[1].cancel()
    assert next(order) is futures[1]
    futures[0].set_exception(ValueError())
    assert next(order) is futures[0]


def test_concurrent_futures_wait_gives_up_in_time() -> None:
    future: Future[int] = Future()
    assert concurrent.futures.wait([future], timeout=0.01).not_done == {future}
    with pytest.raises(TimeoutError):
        next(concurrent.futures.as_completed([future], timeout=0.01))


@pytest.mark.asyncio
async def test_asyncio_wrap_future() -> None:
    good: Future[int] = Future()
    bad: Future[int] = Future()
    dropped: Future[int] = Future()
    wrapped = [asyncio.wrap_future(future) for future in (good, bad, dropped)]
    good.set_result(1)
    bad.set_exception(ValueError("bad"))
    dropped.cancel()
    outcomes = await asyncio.gather(*wrapped, return_exceptions=True)
    assert outcomes[0] == 1
    assert repr(outcomes[1]) == "ValueError('bad')"
    assert isinstance(outcomes[2], asyncio.CancelledError)
    unwanted: Future[int] = Future()
    asyncio.wrap_future(unwanted).cancel()
    await asyncio.sleep(0)
    assert unwanted.cancelled()
