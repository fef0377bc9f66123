"""`Gate` and `Sequencer`: they order the events of concurrent code, without sleeping."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar, overload

from .._base.arguments import check_int, check_number, short_repr
from ..errors import BlockingWaitError
from ..futures._future import Future, running_future
from ..futures._waiting import cancel_scope
from ..futures._wakeup import in_event_loop

T = TypeVar("T")


class _TimedEvent:
    """An event that threads and tasks can wait for, with a time limit."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._event = threading.Event()
        self._future: Future[None] = running_future()

    def set(self) -> None:
        """Set the event; called once."""
        self._event.set()
        self._future.set_result(None)

    def wait(self, instead: str) -> bool:
        """Block until it is set; False after the time limit. A task must use `instead`."""
        if in_event_loop() and not self._event.is_set():
            raise BlockingWaitError(
                f"this would block the event loop of this thread: use `{instead}`"
            )
        # Unlike the future's own `wait`, this lets no other thread run the queue of a held worker.
        return self._event.wait(self._timeout)

    async def wait_async(self) -> bool:
        """Wait until it is set; False after the time limit."""
        with cancel_scope(self._timeout):
            await self._future
        return self._event.is_set()


class Gate:
    """A function that holds its callers until the test lets them on.

    Submit it to an executor, or call it inside a function, to hold a worker at a point of your
    choice. `entered` waits until calls have come to the gate; `let_on` and `open` let them return.
    A held worker runs nothing else. Calls are let on in no particular order. Leaving a `with` block
    opens the gate, so that a failing test does not hang.

    Args:
        timeout: The time limit of each wait, in seconds.

    Raises:
        TypeError: `timeout` is not a number.
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
        self._awaited: dict[int, _TimedEvent] = {}  # by the count that they wait for

    @short_repr
    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"{state}, {self.held} held, {self.count} entered"

    @property
    def count(self) -> int:
        """How many calls have entered the gate so far."""
        return self._count

    @property
    def held(self) -> int:
        """How many calls are held now."""
        return self._held

    @overload
    def __call__(self) -> None: ...
    @overload
    def __call__(self, value: T) -> T: ...
    def __call__(self, value: Any = None) -> Any:
        """Enter the gate, wait to be let on, and return `value`.

        Raises:
            TimeoutError: The call was not let on in time.
            BlockingWaitError: This is the thread of an event loop, and the gate is closed.
        """
        if in_event_loop() and not self._open:
            raise BlockingWaitError("a closed gate would block the event loop: use it in a worker")
        with self._changed:
            self._count += 1
            self._held += 1
            number = self._count
            awaited = self._awaited.pop(number, None)
        if awaited is not None:
            awaited.set()
        with self._changed:
            let_on = self._changed.wait_for(lambda: self._open or self._permits, self._timeout)
            self._held -= 1
            if not let_on:
                raise TimeoutError(
                    f"call {number} entered the gate, but was not let on within {self._timeout} s"
                )
            if not self._open:
                self._permits -= 1
        return value

    def open(self) -> None:
        """Let all calls on, now and later."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def let_on(self, count: int = 1) -> None:
        """Let `count` calls on: held calls, or else the next calls that enter."""
        count = check_int("count", count, at_least=1)
        with self._changed:
            self._permits += count
            self._changed.notify(count)

    async def entered(self, count: int = 1) -> None:
        """Wait until `count` calls in total have entered the gate.

        Raises:
            TimeoutError: They have not entered in time.
        """
        if not await self._event(count).wait_async():
            raise self._not_entered(count)

    def wait_entered(self, count: int = 1) -> None:
        """As `entered`, for threads: block until `count` calls in total have entered the gate.

        Raises:
            TimeoutError: They have not entered in time.
            BlockingWaitError: This is the thread of an event loop, and they have not entered yet.
        """
        if not self._event(count).wait("await gate.entered()"):
            raise self._not_entered(count)

    def _event(self, count: int) -> _TimedEvent:
        count = check_int("count", count, at_least=1)
        with self._changed:
            if count > self._count:
                return self._awaited.setdefault(count, _TimedEvent(self._timeout))
        event = _TimedEvent(self._timeout)
        event.set()
        return event

    def _not_entered(self, count: int) -> TimeoutError:
        entered = f"{self._count} of {count} calls"
        return TimeoutError(f"{entered} entered the gate within {self._timeout} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.open()


class Sequencer:
    """Runs numbered steps in order, in whatever threads and tasks they are.

    Step `n` is the body of `with sequence(n)`, or of `async with sequence(n)` in a task. It begins
    when step `n - 1` has ended; the first step is 0. Each number is used once, and each step is
    entered once. When a step fails, all later steps fail too. A worker that waits for its turn runs
    nothing else.

    As `trio.testing.Sequencer`. Differences: it also works in threads and on asyncio, and has a
    time limit.

    Args:
        timeout: The time limit of each wait, in seconds.

    Raises:
        TypeError: `timeout` is not a number.
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
        self._used: set[int] = set()  # the numbers of all steps
        self._next = 0  # the step that runs or whose turn it is
        self._running = False
        self._failed: float = math.inf  # the first step that failed
        self._turns: dict[int, _TimedEvent] = {}  # of steps that wait

    @short_repr
    def __repr__(self) -> str:
        return f"at step {self._next}{'' if self._failed == math.inf else ', failed'}"

    def __call__(self, number: int) -> "_Step":
        """The step with this number, to enter by `with` or `async with`.

        Raises:
            TypeError: `number` is not an int.
            ValueError: `number` is negative or was used before.
        """
        number = check_int("a step's number", number, at_least=0)
        with self._lock:
            if number in self._used:
                raise ValueError(f"step {number} was used before: each number is used once")
            self._used.add(number)
        return _Step(self, number)

    def _turn(self, number: int) -> _TimedEvent:
        """An event: the step may begin, or an earlier step has failed."""
        turn = _TimedEvent(self._timeout)
        with self._lock:
            if self._next < number < self._failed:
                self._turns[number] = turn
                return turn
        turn.set()
        return turn

    def _begin(self, number: int, *, in_time: bool) -> None:
        with self._lock:
            if self._failed < number:
                raise RuntimeError(f"step {number} cannot be taken: step {self._failed} failed")
            if not in_time:
                state = "ended" if self._running else "begun"
                raise TimeoutError(
                    f"step {number} waited {self._timeout} s for its turn: step {self._next} "
                    f"has not {state}"
                )
            self._running = True

    def _end(self, number: int, *, failed: bool) -> None:
        with self._lock:
            if number == self._next:
                self._running = False
            if failed:
                self._failed = min(self._failed, number)
            else:
                self._next = number + 1
            first, last = min(self._next, self._failed), self._failed
            turns = [self._turns.pop(n) for n in list(self._turns) if n <= first or n > last]
        for turn in turns:
            turn.set()


class _Step:
    """One step of a sequence."""

    def __init__(self, sequence: Sequencer, number: int) -> None:
        self._sequence = sequence
        self._number = number
        self._entered = False

    def __enter__(self) -> None:
        with self._entering() as turn:
            in_time = turn.wait(f"async with sequence({self._number})")
            self._sequence._begin(self._number, in_time=in_time)

    async def __aenter__(self) -> None:
        with self._entering() as turn:
            in_time = await turn.wait_async()
            self._sequence._begin(self._number, in_time=in_time)

    @contextmanager
    def _entering(self) -> Iterator[_TimedEvent]:
        if self._entered:  # a second time it would set the sequence back
            raise ValueError(f"step {self._number} was entered before: each is taken once")
        self._entered = True
        try:
            yield self._sequence._turn(self._number)
        except BaseException:  # also a cancellation: the step will never be taken
            self._sequence._end(self._number, failed=True)
            raise

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        self._sequence._end(self._number, failed=exc_type is not None)

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        self.__exit__(exc_type, *exc_info)
