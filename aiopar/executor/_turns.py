"""Turns: the calls of one gang run at once or one after the other, and are measured."""

import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import TypeAlias

from ..errors import ReplicaAborted

Report: TypeAlias = Callable[[float, float], None]


class Turns:
    """When the calls of one gang run, once a worker has come to them.

    At once; or in turn, in the order of coming: while one runs, the others wait. They wait no
    longer when one of them is about to wait (for the others, say, which have to come), nor after
    `limit` seconds, should one wait in a way that nobody sees. None waits for a call that is still
    in a queue: gangs that share their workers do not wait for each other.

    Args:
        count: How many calls there are.
        limit: How many seconds a call waits for its turn at most; 0: they run at once.
        report: Called when the last has returned, in its thread, with the seconds since the first
            has begun, and with how many of them have computed at a time, on average. Not called
            if one has failed, or if they did not run in the way that was asked for: each in its
            turn, or all beside each other for half of the time at least.
    """

    def __init__(self, count: int, *, limit: float = 0.0, report: Report | None = None) -> None:
        self.limit = limit
        self._count = count
        self._report = report
        self._lock = threading.RLock()  # as that of the gang, whose abort comes here
        self._in_turn = limit > 0
        self._running = False
        self._waiting: deque[threading.Lock] = deque()
        self._returned: list[tuple[float, float, float]] = []
        self._aborted = False

    def wait(self) -> None:
        """Wait for the turn of the calling call.

        Raises:
            ReplicaAborted: The gang was aborted: it shall not run.
        """
        with self._lock:
            gate = self._gate() if self._in_turn and self._running else None
            self._running = True
        if gate is not None and not gate.acquire(timeout=self.limit):
            self.open()
        if self._aborted:
            raise ReplicaAborted("another replica failed, or all was cancelled, before its turn")

    def _gate(self) -> threading.Lock:
        gate = threading.Lock()
        gate.acquire()
        self._waiting.append(gate)
        return gate

    def open(self) -> None:
        """Nobody waits for a turn, from now on."""
        with self._lock:
            if self._in_turn:
                self._in_turn = False
                self._report = None
                while self._waiting:
                    self._waiting.popleft().release()

    def abort(self) -> None:
        """Those that wait for their turn, or come later, shall not run."""
        self._aborted = True
        self.open()

    def ended(self, began: float, now: float, computed: float) -> None:
        """A call has returned that has run since `began`: the next one's turn has come."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._running = False
            self._returned.append((began, now, computed))
            report = self._report if len(self._returned) == self._count else None
        if report is None:
            return
        starts, returns, times = zip(*self._returned, strict=True)
        seconds = max(returns) - min(starts)
        beside_each_other = sum(returns) - sum(starts) > seconds * (1 + self._count) / 2
        if seconds > 0 and (self.limit or beside_each_other):
            report(seconds, sum(times) / seconds)


class Turn:
    """The turn of one call, used by the thread that runs it."""

    __slots__ = ("_began", "_computed_before", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._began = self._computed_before = 0.0

    def wait(self) -> None:
        """Wait until it has come; raises as `Turns.wait` does."""
        self._turns.wait()
        self._began, self._computed_before = perf_counter(), thread_time()

    def end(self, *, failed: bool) -> None:
        """The call has returned, or failed: then the abort that follows lets the others go."""
        if not failed:
            computed = thread_time() - self._computed_before
            self._turns.ended(self._began, perf_counter(), computed)
