"""Turns: the calls of one gang start at once or one after the other, and are measured."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter, thread_time
from typing import TypeAlias

Report: TypeAlias = Callable[[float, float], None]


class Turns:
    """When the calls of one gang may start.

    At once; or in turn: each when the one before has returned. It does not wait for its turn any
    longer when one of them is about to wait (for the others, say, which have to start), when the
    gang is aborted, or after `limit` seconds, should one wait in a way that nobody sees.

    Args:
        count: How many calls there are.
        limit: How many seconds a call waits for its turn at most; 0: they start at once.
        report: Called when the last has returned, in its thread, with the seconds since the first
            has started, and with how many of them have computed at a time, on average. Not called
            if they did not run in the way that was asked for: all waited for their turns, or all
            ran beside each other, for half of the time at least.
    """

    __slots__ = ("_closed", "_count", "_gates", "_report", "_returned", "limit")

    def __init__(self, count: int, *, limit: float = 0.0, report: Report | None = None) -> None:
        self.limit = limit
        self._count = count
        self._report = report
        self._returned: list[tuple[float, float, float]] = []
        self._gates = [None, *(_closed_gate() if limit else None for _ in range(count - 1))]
        self._closed = deque(gate for gate in self._gates if gate is not None)

    def turn(self, index: int) -> "Turn":
        """That of one call."""
        return Turn(self, self._gates[index])

    def open(self) -> None:
        """Let all start now."""
        if self._closed:
            self._report = None
            while self._pass_on():
                pass

    def _pass_on(self) -> bool:
        # Each is opened once: `popleft` is atomic.
        with suppress(IndexError):
            self._closed.popleft().release()
            return True
        return False

    def ended(self, began: float, now: float, computed: float) -> None:
        """A call that began to compute then has returned."""
        self._pass_on()
        self._returned.append((began, now, computed))
        if self._report is not None and len(self._returned) == self._count:
            starts, returns, times = zip(*self._returned, strict=True)
            seconds = max(returns) - min(starts)
            running = (sum(returns) - sum(starts)) / seconds
            if self.limit or running > (1 + self._count) / 2:
                self._report(seconds, sum(times) / seconds)


class Turn:
    """The turn of one call, used by the thread that runs it."""

    __slots__ = ("_began", "_computed_before", "_gate", "_turns")

    def __init__(self, turns: Turns, gate: "threading.Lock | None") -> None:
        self._turns = turns
        self._gate = gate
        self._began = self._computed_before = 0.0

    def wait(self) -> float:
        """Wait until it has come, and say when that was."""
        if self._gate is not None:
            self._gate.acquire(timeout=self._turns.limit)
        self._began, self._computed_before = perf_counter(), thread_time()
        return self._began

    def end(self) -> None:
        """The call has returned: the next one's has come."""
        computed = thread_time() - self._computed_before
        self._turns.ended(self._began, perf_counter(), computed)


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate
