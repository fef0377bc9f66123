"""A stage of a stream: a bounded buffer, and the pumps that fill it.

A *pump* takes an item from upstream, runs the stage's function on it, leaves the outcome in the
buffer, and goes on until the buffer is full, upstream has nothing, or the stage is closed; then it
ends. It is a call on a worker (`ThreadStage`) or a task on the event loop (`TaskStage`): none waits
while it has nothing to do. Whoever takes items out starts pumps again when the buffer is half
empty.

Stages are chained by `pull`, which never blocks: it returns an item, `PENDING` or `END`. After
`PENDING` the stage calls its `listener`, once, from any thread, when it is worth asking again.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum, auto
from time import perf_counter
from typing import Any, TypeAlias

from .._error_handling import stand_in
from .._future import running_future
from .._tasks import is_cancellation
from ._item import END, PENDING, Failure, failure

Claimed: TypeAlias = tuple[list[Any], Any, int]
"""A cell for the outcome, the item, and its position."""


class Idle(Enum):
    """Why a pump has nothing to do."""

    FULL = auto()
    STARVED = auto()
    OVER = auto()


class Stage:
    """The buffer of one stage. Many pumps fill it; one party at a time pulls.

    Args:
        name: For errors and statistics.
        concurrency: How many pumps there may be at once.
        bound: How many items there may be at most: those that run and those that are ready. With
            less than `concurrency`, no more than this run.
        in_order: Whether outcomes leave in the order in which their items came.
    """

    def __init__(self, name: str, *, concurrency: int, bound: int, in_order: bool) -> None:
        self.name = name
        self.concurrency = concurrency
        self.bound = bound
        self.listener: Callable[[], object] = _nobody
        # One cell an item, from the moment it was claimed: its length is what the bound bounds. A
        # cell is a list, empty until the outcome is in it. Out of order, who pulls takes from
        # `_ready`, and any cell goes.
        self._cells: deque[list[Any]] = deque()
        self._ready: deque[Any] | None = None if in_order else deque()
        self._low = self.bound // 2
        self._wanted = False
        # Of the next item: held while upstream is asked, which may block. Never by who pulls.
        self._source_lock = threading.Lock()
        self.first = self.claimed = 0  # positions
        # Of the pumps: never held while anybody else's code runs.
        self._lock = threading.Lock()
        self._pumps = 0
        self._alive = 0  # calls or tasks that have not ended: also of pumps that count no more
        self.gone = running_future()
        """Done when the stage was closed and nothing of it runs any more."""
        self._startable = True
        """Whether a look at `fill` is worth it."""
        self._starved = self._notified = False
        self.ended = False
        """Whether upstream has no more."""
        self.closed = False
        self.delivered = 0
        self._full = 0  # how many pumps ended because the buffer was full, and were not started
        self._full_since = 0.0
        self._full_seconds = 0.0

    # What a kind of stage says.

    def _next(self) -> Any:
        """The next item, `PENDING` or `END`; called by one pump at a time."""
        raise NotImplementedError

    def _start(self) -> None:
        """Begin a pump, soon; from any thread."""
        raise NotImplementedError

    # Who pulls.

    def pull(self) -> Any:
        """The next outcome, `PENDING` or `END`; never blocks. One party at a time."""
        cells, ready = self._cells, self._ready
        if ready is None:
            # Only who pulls takes cells out: the head stays the head.
            if not cells or not cells[0]:
                return self._pull_late()
            outcome = cells.popleft()[0]
        else:
            if not ready:
                return self._pull_late()
            outcome = ready.popleft()
            cells.pop()
        self.delivered += 1
        if self._startable and len(cells) <= self._low:
            self.fill()
        return outcome

    def _pull_late(self) -> Any:
        # First say so, then look again; a pump first leaves its outcome (`leave`), then looks here.
        # The look takes the lock of what the outcome is put into, and so comes before that, and
        # the pump sees the wish; or after it, and there is the outcome. Also without a GIL.
        self._wanted = True
        ended = self.ended  # before the look: what was claimed before the end counts
        if self._has_outcome():
            self._wanted = False
            return self.pull()
        if ended and not self._cells:
            return END
        self.fill()
        return PENDING

    def _has_outcome(self) -> bool:
        if self._ready is not None:
            return bool(self._ready.copy())
        return bool(self._cells) and bool(self._cells[0].copy())

    def fill(self) -> None:
        """Start the pumps that have something to do; from any thread."""
        with self._lock:
            if self.closed or self.ended or self._starved:
                self._startable = False
                return
            count = max(0, min(self.concurrency - self._pumps, self.bound - len(self._cells)))
            if self._full and count:
                self._count_full(max(0, self._full - count))
            self._pumps += count
            self._alive += count
            self._startable = self._pumps < self.concurrency
        for _ in range(count):
            self._start()

    def notify(self) -> None:
        """Upstream has something: its listener."""
        with self._lock:
            self._notified, self._starved = True, False
        self.fill()

    def close(self) -> None:
        """No pump claims another item; from any thread, more than once does no harm."""
        with self._lock:
            first, self.closed = not self.closed, True
            gone = first and not self._alive
        # A cycle: this stage's listener is the next stage, or the stream, which pull from it.
        self.listener = _nobody
        if gone:
            self._all_gone()

    @property
    def running(self) -> bool:
        """Whether there are pumps."""
        return self._alive > 0

    # Pumps.

    def claim(self) -> Claimed | None:
        """An item to run, and where its outcome goes; None: the pump is to end, and counts no more.

        May block where `_next` does.
        """
        with self._source_lock:
            while True:
                if self.closed or self.ended:
                    idle = Idle.OVER
                elif len(self._cells) >= self.bound:
                    idle = Idle.FULL
                else:
                    try:
                        item = self._next()
                    except BaseException as error:  # noqa: BLE001  # who reads gets it
                        self._fail(error)
                        item = END
                    if item is PENDING:
                        idle = Idle.STARVED
                    elif item is END or self.closed:  # meanwhile: nothing starts any more
                        self._end()
                        idle = Idle.OVER
                    else:
                        cell, position = self.new_cell()
                        return cell, item, position
                if self._retire(idle):
                    return None

    def leave(self, cell: list[Any], outcome: Any) -> None:
        """Put an outcome where `claim` said, and tell who waits for it."""
        cell.append(outcome)
        if self._ready is not None:
            self._ready.append(outcome)
            if self._wanted:
                self._tell()
        elif self._wanted:
            # Another cell than the head is of no use to who waits.
            try:
                head = self._cells[0]
            except IndexError:  # pulled just now
                return
            if head:
                self._tell()

    def _tell(self) -> None:
        self._wanted = False
        self.listener()

    def _end(self) -> None:
        self.ended = True
        if self._wanted:
            self._tell()

    def _retire(self, idle: Idle) -> bool:
        """The calling pump ends, and counts no more; False: there is something to do after all."""
        with self._lock:
            if idle is Idle.FULL:
                # Who pulled meanwhile saw this pump run, and started none.
                if len(self._cells) < self.bound:
                    return False
                self._count_full(self._full + 1)
            elif idle is Idle.STARVED:
                if self._notified:
                    self._notified = False
                    return False
                self._starved = True
            self._pumps -= 1
            self._startable = idle is Idle.FULL
        return True

    def pump_ended(self) -> None:
        """The call or task of a pump has ended."""
        with self._lock:
            self._alive -= 1
            gone = self.closed and not self._alive
        if gone:
            self._all_gone()

    def _all_gone(self) -> None:
        # What nobody will read is not kept, however long the stream is.
        for outcome in self._unread():
            if type(outcome) is Failure:
                outcome.take()
        self._cells.clear()
        self.gone.set_result(None)

    def _unread(self) -> Iterator[Any]:
        """The outcomes that are ready, taken out one by one: nobody else has them."""
        with suppress(IndexError):
            while True:
                if self._ready is not None:
                    yield self._ready.popleft()
                else:
                    yield from self._cells.popleft()

    def fail(self, error: BaseException) -> None:
        """A pump was taken away with `error`: nothing more can come."""
        # Not under the source's lock, which may be held for long. What is claimed after this comes
        # after it, and nobody reads that far.
        self._fail(error)
        self._end()

    def cancellation(self, error: BaseException, position: int) -> Failure:
        """The outcome where a task was ended: by others, if the stage is not closed."""
        cancelled = isinstance(error, asyncio.CancelledError) or is_cancellation(error)
        how = "cancelled from outside" if cancelled else f"ended by {type(error).__name__}"
        # As it is it would look as if who reads the stream had been cancelled.
        known = stand_in(f"a task of stage {self.name!r} was {how}", error)
        return failure(known, self.name, position, fatal=True)

    def new_cell(self) -> tuple[list[Any], int]:
        """Where the outcome of one more item will be, and the item's position."""
        cell: list[Any] = []
        # Together: while a pump claims, another thread may find that its executor is gone (`fail`).
        with self._lock:
            position = self.claimed
            self.claimed = position + 1
            self._cells.append(cell)
        return cell, position

    def _fail(self, error: BaseException) -> None:
        cell, position = self.new_cell()
        self.leave(cell, failure(error, self.name, position, fatal=True))

    # Statistics.

    def _count_full(self, count: int) -> None:
        now = perf_counter()
        self._full_seconds += self._full * (now - self._full_since)
        self._full, self._full_since = count, now

    @property
    def buffered(self) -> int:
        """How many items run or are ready."""
        return len(self._cells)

    def full_seconds(self) -> float:
        """How long pumps had nothing to do because the buffer was full, summed over them."""
        with self._lock:
            self._count_full(self._full)
            return self._full_seconds


def _nobody() -> None:
    pass
