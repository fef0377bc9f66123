"""A stage whose function runs on workers: plain functions, and all sync sources."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from time import perf_counter
from typing import Any, Self, TypeAlias

from .._base.thread_state import CallerState
from .._base.tracebacks import stand_in
from ..errors import ExecutorShutdown
from ..executor._call import TokenCall
from ..executor._executor import DeviceExecutor
from ..executor._generators import Steps
from ..executor._loop_tasks import Tasks, is_cancellation
from ..futures._future import Future, running_future
from ._checks import UNAWAITED, unawaited
from ._outcome import END, PENDING, Failure, failure


class SyncSource:
    """An iterator over a source that yields an error of the source as a `Failure`.

    The `Failure` ends the source. With `position`, the source is what came of one item, at this
    position, and the stream goes on. One thread at a time may take items, under the caller's state.
    """

    def __init__(
        self,
        source: Iterable[Any],
        caller: CallerState,
        name: str = "source",
        *,
        position: int | None = None,
    ) -> None:
        self._steps: Steps[Any] = Steps(partial(iter, source), caller)
        self._name = name
        self._position = position
        self.taken = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next item."""
        try:
            item = next(self._steps)
        except StopIteration:
            raise
        except BaseException as error:  # noqa: BLE001  # the reader of the stream gets it
            if self._position is not None:
                return failure(error, self._name, self._position)
            return failure(error, self._name, self.taken, fatal=True)
        self.taken += 1
        return item

    @property
    def suspended(self) -> bool:
        """Whether `close` has work to do."""
        return self._steps.closable

    def close(self) -> None:
        """Leave a generator's `with` and `finally` blocks; when no thread takes items."""
        self._steps.close()


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


class TaskStage(Stage):
    """Pumps that are tasks.

    Args:
        name: As for `Stage`.
        fn: What is awaited for each item.
        pull: Where they come from; it never blocks.
        tasks: On which loop.
        concurrency: As for `Stage`.
        bound: As for `Stage`.
        in_order: As for `Stage`.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[[Any], Awaitable[Any]],
        pull: Callable[[], Any],
        tasks: Tasks,
        *,
        concurrency: int,
        bound: int,
        in_order: bool,
    ) -> None:
        super().__init__(name, concurrency=concurrency, bound=bound, in_order=in_order)
        self._fn = fn
        self._pull_upstream = pull
        self._tasks = tasks

    def _next(self) -> Any:
        return self._pull_upstream()

    def _start(self) -> None:
        self._tasks.spawn(self._pump, self.pump_ended)

    async def _pump(self) -> None:
        while (claimed := self.claim()) is not None:
            cell, item, position = claimed
            if type(item) is not Failure:
                try:
                    item = await self._fn(item)
                except Exception as error:  # noqa: BLE001  # who reads the stream gets it
                    item = failure(error, self.name, position)
                except BaseException as error:
                    self.leave(cell, self.cancellation(error, position))
                    if self._tasks.must_propagate(error):
                        raise
                    return
            self.leave(cell, item)
            # Nothing is held while upstream is asked.
            del claimed, cell, item


class AsyncSource(Stage):
    """The items of an async iterable, fetched ahead by one task.

    By one, from the first item to the end: what an async generator holds open between its items (a
    task group, a timeout) belongs to the task that has entered it. It also closes the generator.
    """

    def __init__(self, name: str, source: AsyncIterable[Any], tasks: Tasks, *, bound: int) -> None:
        super().__init__(name, concurrency=1, bound=bound, in_order=True)
        self._source: AsyncIterable[Any] | None = source
        self._tasks = tasks
        self._resumed: Future[None] | None = None

    def _start(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._tasks.spawn(self._pump, self.pump_ended)
        else:
            self.pump_ended()  # the task goes on, and counts already
            resumed.set_result(None)

    async def _pump(self) -> None:
        source, self._source = self._source, None
        iterator: Any = None
        try:
            iterator = aiter(source)  # type: ignore[arg-type]
            await self._fetch(iterator)
        except Exception as error:  # noqa: BLE001  # whatever it is, who reads the stream gets it
            self.fail(error)
        except BaseException as error:
            cell, position = self.new_cell()
            self.leave(cell, self.cancellation(error, position))
            if self._tasks.must_propagate(error):
                raise
        finally:
            await self._tasks.close(iterator, "an async source")
            self._end()

    async def _fetch(self, iterator: AsyncIterator[Any]) -> None:
        while await self._has_room():
            item = await anext(iterator, END)
            if item is END:
                break
            cell, _ = self.new_cell()
            self.leave(cell, item)
            del cell, item

    async def _has_room(self) -> bool:
        """Wait until there is; False: the stage is closed."""
        while len(self._cells) >= self.bound and not self.closed:
            self._resumed = resumed = running_future()
            if self._retire(Idle.FULL):
                await resumed
            else:
                self._resumed = None
        return not self.closed


# After so many seconds a pump goes to the end of its executor's queue: others use it too.
_SLICE = 0.005


class ThreadStage(Stage):
    """Pumps that are calls on the CPU workers of an executor.

    Args:
        name: As for `Stage`.
        fn: What is done to each item; None: nothing, the stage only fetches ahead.
        items: Where they come from: an iterator that may block, and may yield `PENDING`.
        caller: Whose state `fn` and `items` run under.
        executor: Where.
        concurrency: As for `Stage`.
        bound: As for `Stage`.
        in_order: As for `Stage`.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[[Any], Any] | None,
        items: Iterator[Any],
        caller: CallerState,
        executor: DeviceExecutor,
        *,
        concurrency: int,
        bound: int,
        in_order: bool,
    ) -> None:
        super().__init__(name, concurrency=concurrency, bound=bound, in_order=in_order)
        self._fn = fn
        self._items = items
        self.caller = caller
        self._calls: deque[_PumpCall] = deque()  # those that do not run
        self._dispatcher = executor._dispatcher

    def _next(self) -> Any:
        return next(self._items, END)

    def _start(self) -> None:
        try:
            call = self._calls.pop()
        except IndexError:
            call = _PumpCall(self)
        call.token.append(None)
        try:
            self._dispatcher.put(call)
        except RuntimeError as error:  # shut down, or there can be no more threads
            self.fail(error)
            self.pump_ended()

    def pump(self) -> bool:
        """Whether it is to be started again."""
        fn, claim, leave = self._fn, self.claim, self.leave
        until = perf_counter() + _SLICE
        while (claimed := claim()) is not None:
            cell, item, position = claimed
            if fn is not None and type(item) is not Failure:
                try:
                    item = fn(item)
                    if type(item) in UNAWAITED:
                        raise unawaited(item)
                except BaseException as error:  # noqa: BLE001  # who reads the stream gets it
                    item = failure(error, self.name, position)
            leave(cell, item)
            # Nothing is held while upstream is asked, which may block.
            del claimed, cell, item
            if perf_counter() > until:
                return True
        return False

    def _all_gone(self) -> None:
        self._calls.clear()  # a cycle
        super()._all_gone()

    def close_items(self) -> None:
        """Close the iterator that the items come from, after the step that runs."""
        with self._source_lock:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()

    def call_ended(self, call: "_PumpCall", again: bool, error: BaseException | None) -> None:
        """The call of a pump has ended, or was dropped by a shutdown with an error."""
        self._calls.append(call)
        if error is not None:
            self.fail(error)
        if again:
            self._start()
        else:
            self.pump_ended()


class _PumpCall(TokenCall[bool]):
    """A call that nobody awaits, used again and again: what it does goes to its stage's buffer."""

    helpable = False

    def __init__(self, stage: ThreadStage) -> None:
        super().__init__(stage.pump, (), stage.caller)
        self.token.clear()  # there is one whenever it is queued

    def end(self) -> None:
        if self.watch is not None:
            self.watch.completed(self.error)
            self.watch = None
        again, error = self.result, self.error
        self.result = self.error = None
        stage: ThreadStage = self.fn.__self__  # type: ignore[attr-defined]
        stage.call_ended(self, bool(again), error)

    def cancel(self) -> None:
        if self.claim():
            self.withdraw()
            self.error = ExecutorShutdown("the executor of the stream was shut down")
            self.end()
