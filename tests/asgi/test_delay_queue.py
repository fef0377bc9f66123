"""`DelayQueue`: who is called, and when; one timer for all."""

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import cast

import pytest

from aiopar.asgi._disconnect import DelayQueue


class Clock:
    """A loop's time and timers, which the test sets off."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, fn: Callable[[], object], context: Context) -> None:
        assert list(context) == [], "not that of who came first"
        self.timers.append((when, fn))

    def call_later(self, delay: float, fn: Callable[[], object], context: Context) -> None:
        self.call_at(self.now + delay, fn, context)

    def pass_until(self, now: float) -> None:
        """Time passes, timer by timer."""
        while self.timers and self.timers[0][0] <= now:
            self.now, fn = self.timers.pop(0)
            fn()
        self.now = now


class Waiting:
    def __init__(self, called: list[tuple[str, float]], name: str, clock: Clock) -> None:
        self.called = called
        self.name = name
        self.clock = clock

    def due(self) -> None:
        self.called.append((self.name, self.clock.now))


def queue_on(clock: Clock, delay: float) -> DelayQueue:
    return DelayQueue(cast(asyncio.AbstractEventLoop, clock), delay)


def test_each_is_called_when_its_time_has_come() -> None:
    clock, called = Clock(), list[tuple[str, float]]()
    queue = queue_on(clock, 10)
    kept = []
    for name, now in [("a", 0), ("b", 3), ("c", 3.0005), ("d", 25)]:
        clock.pass_until(now)
        kept.append(Waiting(called, name, clock))
        queue.put(kept[-1])
        assert len(clock.timers) == 1
    clock.pass_until(100)
    assert called == [("a", 10), ("b", 13), ("c", 13), ("d", 35)]
    assert clock.timers == []


def test_who_was_let_go_of_is_passed_over() -> None:
    clock, called = Clock(), list[tuple[str, float]]()
    queue = queue_on(clock, 10)
    queue.put(Waiting(called, "gone", clock))
    clock.pass_until(5)
    kept = Waiting(called, "kept", clock)
    queue.put(kept)
    clock.pass_until(10)
    assert [when for when, _ in clock.timers] == [15]
    clock.pass_until(20)
    assert called == [("kept", 15)]


def test_no_timer_is_left_where_all_have_gone() -> None:
    clock = Clock()
    queue = queue_on(clock, 10)
    for _ in range(3):
        queue.put(Waiting([], "gone", clock))
    clock.pass_until(10)
    assert clock.timers == []


def test_an_error_of_one_does_not_keep_others_from_being_called() -> None:
    class Failing(Waiting):
        def due(self) -> None:
            raise RuntimeError

    clock, called = Clock(), list[tuple[str, float]]()
    queue = queue_on(clock, 10)
    failing, first, second = (kind(called, "x", clock) for kind in (Failing, Waiting, Waiting))
    queue.put(failing)
    queue.put(first)
    with pytest.raises(RuntimeError):
        clock.pass_until(10)
    queue.put(second)
    clock.pass_until(30)
    assert [when for _, when in called] == [20, 20]
