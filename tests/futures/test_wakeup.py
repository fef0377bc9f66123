"""`aiopar.futures._wakeup`: no delivery is lost, one wake-up serves many, nothing is kept."""

import asyncio
import contextvars
import gc
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import trio

from aiopar import Future
from aiopar.futures import _wakeup
from aiopar.futures._wakeup import (
    Waker,
    awaiter_here,
    delivered,
    in_event_loop,
    trio_waker,
    waker_of,
)
from tests.interruptions import Interruption, at_every_point


class _Noted:
    """A callback that appends its number to a list, and may call a function."""

    def __init__(self, seen: list[int], n: int, then: Callable[[], object] = int) -> None:
        self._seen = seen
        self._n = n
        self._then = then

    def __call__(self) -> None:
        self._seen.append(self._n)
        self._then()


class _ManualWaker(Waker):
    """Counts the wake-ups instead of waking anything."""

    wakes = 0

    def _wake(self) -> None:
        self.wakes += 1


def test_many_deliveries_cause_one_wake_up() -> None:
    waker, seen = _ManualWaker(), list[int]()
    for n in range(5):
        waker.post(_Noted(seen, n))
    assert (waker.wakes, seen) == (1, [])
    waker._drain()
    assert (waker.wakes, seen) == (1, list(range(5)))
    waker.post(_Noted(seen, 5))
    assert waker.wakes == 2


@pytest.mark.asyncio
async def test_a_task_does_not_run_inside_the_callback_that_wakes_it() -> None:
    """A nested event loop would hang otherwise."""
    loop, seen = asyncio.get_running_loop(), list[str]()

    async def wait(future: Future[int]) -> None:
        await future
        seen.append("task")

    futures: list[Future[int]] = [Future() for _ in range(2)]
    tasks = [asyncio.create_task(wait(future)) for future in futures]
    await asyncio.sleep(0)
    waker = waker_of(loop)
    for future in futures:
        future.set_result(1)
    waker.post(_Noted([], 0, lambda: seen.append("delivery")))
    await asyncio.gather(*tasks)
    assert seen == ["delivery", "task", "task"]


@pytest.mark.asyncio
async def test_a_cancelled_wait_may_be_ended_again() -> None:
    awaiter = awaiter_here()
    assert awaiter is not None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await awaiter
    awaiter.deliver()
    awaiter.deliver()


def test_a_delivery_is_freed_before_the_next_one() -> None:
    waker, seen = _ManualWaker(), list[int]()
    references: list[weakref.ref[_Noted]] = []
    alive: list[list[bool]] = []
    for n in range(3):
        noted = _Noted(seen, n, lambda: alive.append([one() is not None for one in references]))
        references.append(weakref.ref(noted))
        waker.post(noted)
        del noted
    waker._drain()
    assert alive == [[True, True, True], [False, True, True], [False, False, True]]


def test_deliveries_posted_during_a_drain_wake_the_loop_again() -> None:
    waker, seen = _ManualWaker(), list[int]()
    waker.post(_Noted(seen, 0, lambda: waker.post(_Noted(seen, 2))))
    waker.post(_Noted(seen, 1, lambda: waker.post(_Noted(seen, 3))))
    waker._drain()
    assert seen[:2] == [0, 1]
    assert waker.wakes == 2
    waker._drain()
    assert sorted(seen) == [0, 1, 2, 3]


def test_after_ctrl_c_the_next_turn_delivers_the_rest() -> None:
    """A delivery that was interrupted is made again."""
    waker, seen = _ManualWaker(), list[int]()
    interrupts = [KeyboardInterrupt()]

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()

    waker.post(_Noted(seen, 0, interrupted))
    waker.post(_Noted(seen, 1))
    with pytest.raises(KeyboardInterrupt):
        waker._drain()
    assert (waker.wakes, seen) == (2, [0])
    waker._drain()
    assert seen == [0, 0, 1]


def test_a_delivery_that_fails_is_not_made_again() -> None:
    waker, seen = _ManualWaker(), list[int]()
    waker.post(_Noted(seen, 0, partial(next, iter(()))))
    waker.post(_Noted(seen, 1))
    with pytest.raises(StopIteration):
        waker._drain()
    waker._drain()
    assert (waker.wakes, seen) == (2, [0, 1])


def _without_eventfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "eventfd", raising=False)


def _without_add_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_reader(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", add_reader)


_ways: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "as it comes": lambda monkeypatch: None,
    "no eventfd": _without_eventfd,
    "no add_reader": _without_add_reader,
}


def _answer(asked: queue.SimpleQueue[Future[int]], count: int) -> None:
    for n in range(count):
        asked.get().set_result(n)


@pytest.mark.parametrize("way", _ways)
def test_no_wake_up_is_lost(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads complete futures one after the other while the loop goes to sleep each time."""

    async def main() -> int:
        loop = asyncio.get_running_loop()
        waker = waker_of(loop)
        assert isinstance(waker, _wakeup._AsyncioWaker)
        assert (waker._fd is None) == (way != "as it comes" or not hasattr(os, "eventfd"))

        async def ping_pong() -> int:
            asked: queue.SimpleQueue[Future[int]] = queue.SimpleQueue()
            thread = threading.Thread(target=_answer, args=(asked, 1000))
            thread.start()
            total = 0
            for _ in range(1000):
                future: Future[int] = Future()
                asked.put(future)
                total += await future
            thread.join()
            return total

        return sum(await asyncio.gather(*(ping_pong() for _ in range(3))))

    _ways[way](monkeypatch)
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        assert runner.run(asyncio.wait_for(main(), 60)) == 3 * sum(range(1000))


@pytest.mark.parametrize("way", [*_ways, "trio"])
def test_a_closed_loop_drops_what_is_posted(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Posted(_Noted):
        """Can be referred to weakly."""

    async def main() -> Waker:
        return trio_waker() if way == "trio" else waker_of(asyncio.get_running_loop())

    if way == "trio":
        waker = trio.run(main)
    else:
        _ways[way](monkeypatch)
        waker = asyncio.run(main())
    seen: list[int] = []
    for n in range(3):
        posted = Posted(seen, n)
        left = weakref.ref(posted)
        waker.post(posted)
        del posted
        assert left() is None
    assert not seen


def test_the_collector_may_register_a_loop_while_it_is_registered() -> None:
    """It closes a coroutine that a closed loop has left, and that awaits in its `finally`."""

    async def left() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            await Future[None]()

    async def main(interruption: Interruption) -> None:
        loop, coroutine = asyncio.get_running_loop(), left()
        coroutine.send(None)

        def collect() -> None:
            with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
                coroutine.close()

        with interruption.by(collect):
            waker = waker_of(loop)
        if not interruption.came:
            collect()
        assert waker_of(loop) is waker
        await asyncio.wait_for(delivered(), 10)

    def kept() -> int:
        return len(_wakeup._spare_eventfds) + len(_wakeup._wakers)

    before = kept()
    for interruption in at_every_point():
        asyncio.run(main(interruption))
    assert kept() <= before + 2, "a second waker gives its eventfd back"


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="Linux has eventfd")
def test_a_later_loop_uses_the_eventfd_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int | None:
        waker = waker_of(asyncio.get_running_loop())
        assert isinstance(waker, _wakeup._AsyncioWaker)
        return waker._fd

    first = asyncio.run(main())
    assert first is not None
    assert {asyncio.run(main()) for _ in range(5)} == {first}
    spare = len(_wakeup._spare_eventfds)
    _without_add_reader(monkeypatch)  # a loop that refuses an eventfd leaves it to later loops
    assert {asyncio.run(main()) for _ in range(3)} == {None}
    # The first of these loops has released the eventfd of the loop before.
    assert len(_wakeup._spare_eventfds) == spare + 1


def test_the_waker_does_not_keep_the_context_of_the_first_task() -> None:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")

    async def first() -> "weakref.ref[set[int]]":
        value: set[int] = set()
        variable.set(value)
        waker_of(asyncio.get_running_loop())
        return weakref.ref(value)

    async def main() -> object:
        left = await asyncio.create_task(first())
        await asyncio.sleep(0)  # the loop drops its reference to the task
        gc.collect()
        return left()

    assert asyncio.run(main()) is None


def test_in_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> bool:
        return in_event_loop()

    assert not in_event_loop()
    assert asyncio.run(main())
    assert trio.run(main)
    # As it is while another thread imports trio.
    monkeypatch.setitem(sys.modules, "trio.lowlevel", ModuleType("trio.lowlevel"))
    assert not in_event_loop()
