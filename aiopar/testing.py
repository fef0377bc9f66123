"""Deterministic helpers for tests of concurrent code: order by hand, never by sleeping.

Both work from threads and from tasks of any event loop, and neither can hang a test: every wait
has a time limit, after which it raises a `TimeoutError` that says what it waited for.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar, overload

import anyio

from ._base.arguments import check_int, check_number, short_repr
from .errors import BlockingWaitError
from .futures._future import Future, running_future
from .futures._wakeup import in_event_loop

__all__ = ["Gate", "Sequencer"]

T = TypeVar("T")


class _Signal:
    """Something that happens once; threads and tasks can wait for it."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._event = threading.Event()
        self._future: Future[None] = running_future()

    def set(self) -> None:
        """It happened; called once."""
        self._event.set()
        self._future.set_result(None)

    def wait(self, instead: str) -> bool:
        """Whether it happens in time; `instead` is what a task would call."""
        if in_event_loop() and not self._event.is_set():
            raise BlockingWaitError(
                f"this would block the event loop of this thread: use `{instead}`"
            )
        # Not the future's own wait, which would hand the queue of a waiting worker to another
        # thread: what these helpers hold is held, as by an operator that computes.
        return self._event.wait(self._timeout)

    async def wait_async(self) -> bool:
        """Whether it happens in time."""
        with anyio.move_on_after(self._timeout):
            await self._future
        return self._event.is_set()


class Gate:
    """A function that says when it was entered, and returns when it is let on.

    Hand it to an executor (or call it in the middle of a function) to hold a worker at a point
    that the test chooses, do what is to be tested, and let it on. The worker is really held: it
    serves nobody else meanwhile. Calls are let on in no particular order. Leaving a `with` block
    opens the gate, so that a test that fails does not hang on its way out.

    Args:
        timeout: How many seconds any one wait may take.

    Raises:
        TypeError: `timeout` is no number.
        ValueError: `timeout` is not positive.

    Example:
        >>> import asyncio, aiopar
        >>> from aiopar.testing import Gate
        >>> async def main():
        ...     async with aiopar.DeviceExecutor(["cpu"]) as executor:
        ...         with Gate() as gate:
        ...             held = executor.submit(gate, "held")
        ...             queued = executor.submit(print, "never")
        ...             await gate.entered()
        ...             print(held.running(), queued.cancel())
        ...         return await held
        >>> asyncio.run(main())
        True True
        'held'
    """

    def __init__(self, *, timeout: float = 30.0) -> None:
        self._timeout = check_number("timeout", timeout, zero=False)
        self._changed = threading.Condition()
        self._count = 0
        self._held = 0
        self._permits = 0
        self._open = False
        self._awaited: dict[int, _Signal] = {}

    @short_repr
    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"{state}, {self.held} held, {self.count} entered"

    @property
    def count(self) -> int:
        """How many calls have entered so far."""
        return self._count

    @property
    def held(self) -> int:
        """How many calls wait to be let on, now."""
        return self._held

    @overload
    def __call__(self) -> None: ...
    @overload
    def __call__(self, value: T) -> T: ...
    def __call__(self, value: Any = None) -> Any:
        """Say that a call entered, wait to be let on, and return `value`.

        Raises:
            TimeoutError: Nobody let it on in time.
            BlockingWaitError: This is an event loop's thread, and the gate is not open.
        """
        if in_event_loop() and not self._open:
            raise BlockingWaitError("a closed gate would block the event loop: use it in a worker")
        with self._changed:
            self._count += 1
            self._held += 1
            place = self._count
            reached = self._awaited.pop(place, None)
        if reached is not None:
            reached.set()
        with self._changed:
            let_on = self._changed.wait_for(lambda: self._open or self._permits, self._timeout)
            self._held -= 1
            if not let_on:
                raise TimeoutError(
                    f"call {place} entered the gate, but was not let on within {self._timeout} s"
                )
            if not self._open:
                self._permits -= 1
        return value

    def open(self) -> None:
        """Let everyone on, now and from now on."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def let_on(self, count: int = 1) -> None:
        """Let `count` calls on: those that wait, else the next to come."""
        count = check_int("count", count, at_least=1)
        with self._changed:
            self._permits += count
            self._changed.notify(count)

    async def entered(self, count: int = 1) -> None:
        """Await the moment when `count` calls have entered (since the gate was made).

        Raises:
            TimeoutError: They did not in time.
        """
        if not await self._signal(count).wait_async():
            raise self._not_entered(count)

    def wait_entered(self, count: int = 1) -> None:
        """`entered` for threads: block until `count` calls have entered.

        Raises:
            TimeoutError: They did not in time.
            BlockingWaitError: This is an event loop's thread, and they have not yet.
        """
        if not self._signal(count).wait("await gate.entered()"):
            raise self._not_entered(count)

    def _signal(self, count: int) -> _Signal:
        count = check_int("count", count, at_least=1)
        with self._changed:
            if count > self._count:
                return self._awaited.setdefault(count, _Signal(self._timeout))
        happened = _Signal(self._timeout)
        happened.set()
        return happened

    def _not_entered(self, count: int) -> TimeoutError:
        return TimeoutError(
            f"{self._count} of {count} calls entered the gate within {self._timeout} s"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.open()


class Sequencer:
    """Steps that happen in the order of their numbers, whatever threads and tasks take them.

    Step `n` is the body of `with sequence(n)` (in a task: `async with`); it begins when step
    `n - 1` has ended, the first is 0. Each number is used once, and each step entered once: again
    is a `ValueError`. When a step fails, so do those that come after it. A worker that waits for
    its turn is held.

    As `trio.testing.Sequencer`, but for threads as well, on asyncio too, and with a time limit.

    Args:
        timeout: How many seconds any one wait may take.

    Raises:
        TypeError: `timeout` is no number.
        ValueError: `timeout` is not positive.

    Example:
        >>> import asyncio, aiopar
        >>> from aiopar.testing import Sequencer
        >>> sequence, seen = Sequencer(), []
        >>> def in_worker():
        ...     with sequence(1):
        ...         seen.append("in a worker")
        >>> async def main():
        ...     future = aiopar.fork(in_worker)
        ...     async with sequence(0):
        ...         seen.append("before")
        ...     async with sequence(2):
        ...         seen.append("after")
        ...     await future
        >>> asyncio.run(main())
        >>> seen
        ['before', 'in a worker', 'after']
    """

    def __init__(self, *, timeout: float = 30.0) -> None:
        self._timeout = check_number("timeout", timeout, zero=False)
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._entered: set[int] = set()
        self._ended = 0  # how many steps have
        self._running = False
        self._failed: float = math.inf  # the first step that did
        self._turns: dict[int, _Signal] = {}

    @short_repr
    def __repr__(self) -> str:
        return f"at step {self._ended}{'' if self._failed == math.inf else ', failed'}"

    def __call__(self, number: int) -> "_Step":
        """The step of this number, to be entered by `with` or `async with`.

        Raises:
            TypeError: `number` is no int.
            ValueError: It is negative, or was used before.
        """
        number = check_int("a step's number", number, at_least=0)
        with self._lock:
            if number in self._taken:
                raise ValueError(f"step {number} was used before: each number is used once")
            self._taken.add(number)
        return _Step(self, number)

    def _turn(self, number: int) -> _Signal:
        """What happens when step `number` may begin, or when it never will."""
        turn = _Signal(self._timeout)
        with self._lock:
            if self._ended < number < self._failed:
                self._turns[number] = turn
                return turn
        turn.set()
        return turn

    def _enter(self, number: int) -> None:
        with self._lock:
            if number in self._entered:  # it would wind the sequence back
                raise ValueError(f"step {number} was entered before: each is taken once")
            self._entered.add(number)

    def _begin(self, number: int, *, in_time: bool) -> None:
        with self._lock:
            if self._failed < number:
                raise RuntimeError(f"step {number} cannot be taken: step {self._failed} failed")
            if not in_time:
                state = "ended" if self._running else "begun"
                raise TimeoutError(
                    f"step {number} waited {self._timeout} s for its turn: step {self._ended} "
                    f"has not {state}"
                )
            self._running = True

    def _end(self, number: int, *, failed: bool) -> None:
        with self._lock:
            if number == self._ended:
                self._running = False
            if failed:
                self._failed = min(self._failed, number)
            else:
                self._ended = number + 1
            first, last = min(self._ended, self._failed), self._failed
            turns = [self._turns.pop(n) for n in list(self._turns) if n <= first or n > last]
        for turn in turns:
            turn.set()


class _Step:
    """One step of a sequence: the body of a `with` block."""

    def __init__(self, sequence: Sequencer, number: int) -> None:
        self._sequence = sequence
        self._number = number

    def __enter__(self) -> None:
        sequence, number = self._sequence, self._number
        sequence._enter(number)
        with self._failing():
            in_time = sequence._turn(number).wait(f"async with sequence({number})")
            sequence._begin(number, in_time=in_time)

    async def __aenter__(self) -> None:
        sequence, number = self._sequence, self._number
        sequence._enter(number)
        with self._failing():  # also by being cancelled: it will not come any more
            in_time = await sequence._turn(number).wait_async()
            sequence._begin(number, in_time=in_time)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._sequence._end(self._number, failed=True)
            raise

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        self._sequence._end(self._number, failed=exc_type is not None)

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        self.__exit__(exc_type, *exc_info)
