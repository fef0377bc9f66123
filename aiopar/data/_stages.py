"""The stages of a running stream: bounded buffers and the pumps that fill them."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Self, TypeAlias

from .._base.thread_state import CallerState
from .._base.tracebacks import stand_in
from ..errors import ExecutorShutdown
from ..executor._call import Call
from ..executor._executor import DeviceExecutor
from ..executor._loop_tasks import Tasks, is_cancellation
from ..futures._future import Future, running_future
from ._outcome import END, PENDING, UNAWAITED, Failure, failure, unawaited


@dataclass(frozen=True, slots=True)
class StageStats:
    """The work of one stage of a stream.

    Attributes:
        name: The name in messages.
        items: How many items the stage has handed on.
        buffered: How many items run or are ready now.
        bound: The most items that may run or be ready.
        waited_seconds: How long workers waited because the buffer was full, summed over the
            workers.
    """

    name: str
    items: int
    buffered: int
    bound: int
    waited_seconds: float


Slot: TypeAlias = list[Any]
"""The place of one item in a buffer: empty until the outcome is in it."""


@dataclass(frozen=True, slots=True)
class MapStep:
    """A declared stage: a function of each item, with pumps and a buffer of its own."""

    fn: Callable[[Any], Any] | None
    """None: items are only fetched ahead."""
    concurrency: int = 1
    """How many pumps there may be at once."""
    bound: int | None = None
    """The most items that run or are ready, even if this is less than `concurrency`. None: as many
    items may be ready as may run, and at least two."""
    in_order: bool = True
    """Whether outcomes leave in the order in which their items came."""
    name: str = "map"
    """The name in errors and statistics."""
    asynchronous: bool | None = None
    """Whether the result of `fn` is awaited. None: if `fn` is an `async def`."""
    here: bool = False
    """Whether `fn` runs in this process, also if the workers of the executor are elsewhere."""
    first: int = 0
    """The position of the first item."""
    before: str = "the step before it"
    """What gives the items, in messages."""

    @property
    def buffer(self) -> int:
        """The bound, or its default."""
        if self.bound is None:
            return self.concurrency + max(2, self.concurrency)
        return self.bound


class Stage:
    """A bounded buffer that pumps fill and one reader at a time empties with `pull`.

    A pump is a call on a worker, or a task. It claims an item of the stage before, which reserves a
    slot, runs the function, and leaves the outcome in the slot. A pump ends when there is nothing
    to claim. A new pump starts when the reader has made room or the stage before has an item.

    Args:
        step: The declaration.
        items: The items of the stage before: an iterator, which may yield `PENDING`.
    """

    def __init__(self, step: MapStep, items: Iterator[Any]) -> None:
        self.name = step.name
        self.concurrency = step.concurrency
        self.bound = step.buffer
        self._before = step.before
        self._items = items
        self.listener: Callable[[], object] = _do_nothing
        """Called from any thread when there is an outcome for a reader that got `PENDING`."""
        # One slot for each item, from its claim until it is pulled; their number is bounded. Out of
        # order, outcomes are in `_ready`, and the reader removes any one slot for each outcome.
        self._slots: deque[Slot] = deque()
        self._ready: deque[Any] | None = None if step.in_order else deque()
        self._half = self.bound // 2
        # Held while the stage before is asked for an item, which may block. The reader never
        # takes it.
        self._upstream_lock = threading.Lock()
        # Guards the attributes below; no user code runs under it. Re-entrant, because the garbage
        # collector may close a stream at any moment, on any thread.
        self._lock = threading.RLock()
        self._pumps = 0  # those that claim items
        self._alive = 0  # calls and tasks that have not ended
        self._upstream_ready = True  # False: the stage before had no item, and will call `notify`
        self._reader_waits = False
        self.claimed = step.first
        """The position of the next item."""
        self.ended = False
        """Whether the stage before has no more items."""
        self.closed = False
        self.gone = running_future()
        """Done when the stage is closed and nothing of it runs any more."""
        self._delivered = 0
        self._idle = 0  # pumps that have ended because the buffer was full
        self._idle_since = 0.0
        self._idle_seconds = 0.0

    def _start(self) -> None:
        """Start a pump; from any thread."""
        raise NotImplementedError

    # The reader's side.

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        outcome = self.pull()
        if outcome is END:
            raise StopIteration
        return outcome

    def pull(self) -> Any:
        """The next outcome, `PENDING` or `END`; never blocks."""
        outcome = self._take()
        if outcome is PENDING:
            with self._lock:
                # Look again: `leave` looks for a waiting reader under this lock.
                outcome = self._take()
                if outcome is PENDING:
                    if self.ended and not self._slots:
                        return END
                    self._reader_waits = True
        if outcome is not PENDING:
            self._delivered += 1
        if self._pumps < self.concurrency and len(self._slots) <= self._half:
            self._start_pumps()
        return outcome

    def _take(self) -> Any:
        slots, ready = self._slots, self._ready
        if ready is None:
            # Only the reader removes slots: the first slot stays the first.
            return slots.popleft()[0] if slots and slots[0] else PENDING
        if not ready:
            return PENDING
        slots.pop()
        return ready.popleft()

    def notify(self) -> None:
        """The stage before has an item, or has ended; from any thread."""
        self._upstream_ready = True
        self._start_pumps()

    def close(self) -> None:
        """Let no pump claim another item; from any thread, any number of times."""
        with self._lock:
            first, self.closed = not self.closed, True
            gone = first and not self._alive
        # The listener is the next stage or the flow, which refer to this stage.
        self.listener = _do_nothing
        if gone:
            self._all_gone()

    # The pumps' side.

    def claim(self) -> tuple[Slot, int, Any] | None:
        """A slot, the position of an item, and the item. None: the pump must end.

        Blocks if the stage before does.
        """
        with self._upstream_lock:
            while not self.closed and not self.ended:
                if len(self._slots) >= self.bound:
                    with self._lock:
                        self._count_idle(self._idle + 1)
                    break
                try:
                    item = next(self._items, END)
                except BaseException as error:  # noqa: BLE001  # the reader gets it
                    self.fail(error)
                    break
                if item is PENDING:
                    if not self._upstream_ready:
                        break
                    self._upstream_ready = False  # and look again: an item may have come
                elif item is END or self.closed:
                    self._end()
                else:
                    self._upstream_ready = True
                    return *self._reserve(), item
        return None

    def leave(self, slot: Slot, outcome: Any) -> None:
        """Put an outcome into its slot, and tell a reader that waits for it."""
        with self._lock:
            # In order, the reader can only take the outcome of the first slot.
            tell = self._reader_waits and (self._ready is not None or self._slots[0] is slot)
            (slot if self._ready is None else self._ready).append(outcome)
            if tell:
                self._reader_waits = False
        if tell:
            self.listener()

    def pump_paused(self) -> None:
        """A pump claims no more items until it is started again."""
        with self._lock:
            self._pumps -= 1
        # A `notify` or `pull` may have come after the last claim, when the pump still counted.
        self._start_pumps()

    def pump_ended(self) -> None:
        """The call or task of a pump has ended."""
        with self._lock:
            self._alive -= 1
            gone = self.closed and not self._alive
        if gone:
            self._all_gone()
        self.pump_paused()

    def fail(self, error: BaseException) -> None:
        """End the stage with an error: a worker or the stage before was lost."""
        # Without `_upstream_lock`, which may be held for long. An item that is claimed meanwhile
        # comes after the failure, and nobody reads it.
        slot, position = self._reserve()
        self.leave(slot, failure(error, self.name, position, fatal=True))
        self._end()

    def _start_pumps(self) -> None:
        with self._lock:
            if self.closed or self.ended or not self._upstream_ready:
                return
            # Once the buffer was full, pumps start again when it is half empty.
            if self._idle and len(self._slots) > self._half:
                return
            count = min(self.concurrency - self._pumps, self.bound - len(self._slots))
            if count <= 0:
                return
            if self._idle:
                self._count_idle(max(0, self._idle - count))
            self._pumps += count
            self._alive += count
        for _ in range(count):
            self._start()

    def _reserve(self) -> tuple[Slot, int]:
        slot: Slot = []
        with self._lock:
            position = self.claimed
            self.claimed = position + 1
            self._slots.append(slot)
        return slot, position

    def _end(self) -> None:
        with self._lock:
            self.ended = True
            tell, self._reader_waits = self._reader_waits, False
        if tell:
            self.listener()

    def _all_gone(self) -> None:
        # Nobody will read these outcomes. Taking an error ends its reference cycle.
        for outcome in [*(self._ready or ()), *(slot[0] for slot in self._slots if slot)]:
            if type(outcome) is Failure:
                outcome.take()
        self._slots.clear()
        if self._ready is not None:
            self._ready.clear()
        if not self.gone.done():
            self.gone.set_result(None)

    # Statistics.

    @property
    def doing(self) -> str:
        """What the stage does now, in words."""
        slots = self._slots.copy()
        ready = sum(map(bool, slots)) if self._ready is None else len(self._ready)
        running = max(0, len(slots) - ready)
        if not slots and not self.ended:
            return f"stage {self.name!r} waits for {self._before} after {self.claimed} items"
        return f"stage {self.name!r} runs {running} items and has {ready} ready"

    def _count_idle(self, count: int) -> None:
        now = perf_counter()
        self._idle_seconds += self._idle * (now - self._idle_since)
        self._idle, self._idle_since = count, now

    def stats(self) -> StageStats:
        """The statistics of the stage up to now."""
        with self._lock:
            self._count_idle(self._idle)
            waited = self._idle_seconds
        return StageStats(self.name, self._delivered, len(self._slots), self.bound, waited)


def _do_nothing() -> None:
    pass


# After so many seconds, a pump queues again, so that other calls of the executor get the worker.
_TIME_SLICE = 0.005


class WorkerStage(Stage):
    """A stage whose pumps are calls on the CPU workers of an executor.

    Args:
        step: The declaration.
        items: As for `Stage`; this iterator may block.
        caller: The state under which the function and `items` run.
        executor: The workers.
    """

    def __init__(
        self, step: MapStep, items: Iterator[Any], caller: CallerState, executor: DeviceExecutor
    ) -> None:
        super().__init__(step, items)
        # Each item is a call of its own, which sees nothing that an earlier item left behind.
        self._fn = None if step.fn is None else partial(caller.run, step.fn)
        self.caller = caller
        self._dispatcher = executor._dispatcher

    def _start(self) -> None:
        try:
            self._dispatcher.put(_PumpCall(self))
        except RuntimeError as error:  # the executor is shut down, or no thread can be started
            self.fail(error)
            self.pump_ended()

    def pump(self) -> bool:
        """Fill the buffer; return whether the pump must be queued again."""
        fn, claim, leave = self._fn, self.claim, self.leave
        until = perf_counter() + _TIME_SLICE
        while (claimed := claim()) is not None:
            slot, position, item = claimed
            if fn is not None and type(item) is not Failure:
                try:
                    item = fn(item)
                    if type(item) in UNAWAITED:
                        raise unawaited(item)
                except BaseException as error:  # noqa: BLE001  # the reader gets it
                    item = failure(error, self.name, position)
            leave(slot, item)
            # Hold no item while `claim` blocks.
            del claimed, slot, item
            if perf_counter() > until:
                return True
        return False

    def call_ended(self, again: bool | None, error: BaseException | None) -> None:
        """The call of a pump has ended with a result or an error."""
        if error is not None:
            self.fail(error)
            del error  # its traceback may hold this frame
        if again:
            self._start()
        else:
            self.pump_ended()

    def close_items(self) -> None:
        """Close the iterator of the items; waits until nobody advances it."""
        with self._upstream_lock:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()


class _PumpCall(Call[bool]):
    """The call of a pump; it has no `Future`, because nobody awaits it."""

    helpable = False

    def __init__(self, stage: WorkerStage) -> None:
        super().__init__(stage.pump, (), stage.caller)
        self._stage = stage

    def finish(self) -> None:
        result, error = self.result, self.error
        self.result = self.error = None
        self._stage.call_ended(result, error)

    def cancel(self) -> None:
        if self.claim():
            self.drop()
            error = ExecutorShutdown("the executor of the stream was shut down")
            self._stage.call_ended(None, error)


class TaskStage(Stage):
    """A stage whose pumps are tasks on the event loop of the reader.

    Args:
        step: The declaration.
        fn: Awaited for each item.
        items: As for `Stage`; this iterator never blocks.
        caller: The state under which the function runs.
        tasks: The tasks of the stream.
    """

    def __init__(
        self,
        step: MapStep,
        fn: Callable[[Any], Awaitable[Any]],
        items: Iterator[Any],
        caller: CallerState,
        tasks: Tasks,
    ) -> None:
        super().__init__(step, items)
        self._fn = partial(caller.drive, fn)  # as in `WorkerStage`
        self._tasks = tasks

    def _start(self) -> None:
        self._tasks.spawn(self._pump, self.pump_ended)

    async def _pump(self) -> None:
        while (claimed := self.claim()) is not None:
            slot, position, item = claimed
            if type(item) is not Failure:
                try:
                    item = await self._fn(item)
                except Exception as error:  # noqa: BLE001  # the reader gets it
                    item = failure(error, self.name, position)
                except BaseException as error:
                    self.leave(slot, _ended_by(error, self.name, position))
                    self._end()  # else another pump would start, perhaps on a loop that ends
                    if self._tasks.must_propagate(error):
                        raise
                    return
            self.leave(slot, item)
            del claimed, slot, item


def _ended_by(error: BaseException, name: str, position: int) -> Failure:
    """The `Failure` for a task that was cancelled, or that a BaseException has ended."""
    # Raised by a read, the error itself would look like a cancellation of the reader.
    cancelled = isinstance(error, asyncio.CancelledError) or is_cancellation(error)
    how = "cancelled from outside" if cancelled else f"ended by {type(error).__name__}"
    error = stand_in(f"a task of stage {name!r} was {how}", error)
    return failure(error, name, position, fatal=True)


class AsyncSource(Stage):
    """The items of an async iterable, fetched ahead by one task.

    One task runs all steps, because a task group or a timeout that an async generator holds open
    between its items belongs to the task that entered it. The task also closes the generator.
    """

    def __init__(self, source: AsyncIterable[Any], tasks: Tasks, *, bound: int) -> None:
        super().__init__(MapStep(None, bound=bound, name="source"), iter(()))
        self._source: AsyncIterable[Any] | None = source
        self._tasks = tasks
        self._room: Future[None] | None = None

    def _start(self) -> None:
        room, self._room = self._room, None
        if room is None:
            self._tasks.spawn(self._pump, self.pump_ended)
        else:
            with self._lock:
                self._alive -= 1  # the task that waits for room counts already
            room.set_result(None)

    async def _pump(self) -> None:
        source, self._source = self._source, None
        iterator: Any = None
        try:
            iterator = aiter(source)  # type: ignore[arg-type]
            while await self._has_room():
                item = await anext(iterator, END)
                if item is END:
                    break
                self.leave(self._reserve()[0], item)
                del item
        except Exception as error:  # noqa: BLE001  # the reader gets it
            self.fail(error)
        except BaseException as error:
            slot, position = self._reserve()
            self.leave(slot, _ended_by(error, self.name, position))
            if self._tasks.must_propagate(error):
                raise
        finally:
            await self._tasks.close(iterator, "an async source")
            self._end()

    async def _has_room(self) -> bool:
        """Wait until there is room for an item; False: the stage is closed."""
        while len(self._slots) >= self.bound and not self.closed:
            self._room = room = running_future()
            with self._lock:
                self._count_idle(self._idle + 1)
            self.pump_paused()
            await room
        return not self.closed
