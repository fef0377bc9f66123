"""The stages of a running stream: bounded buffers and the pumps that fill them."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from time import perf_counter
from typing import Any, Self, TypeAlias

from .._base.thread_state import CallerState
from .._base.tracebacks import stand_in
from ..errors import ExecutorShutdown
from ..executor._call import Call
from ..executor._executor import DeviceExecutor
from ..executor._generators import END
from ..executor._loop_tasks import Tasks, is_cancellation
from ..futures._future import Future, running_future
from ._steps import PENDING, UNAWAITED, Failure, MapStep, failure, unawaited


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
"""The place of one item in a buffer: a list that is empty until it has the outcome."""


class _Idle:
    """Counts the pumps that wait for room in the buffer, and their waiting times."""

    def __init__(self) -> None:
        self.pumps = 0
        self._seconds = 0.0

    def add(self, pumps: int) -> None:
        """Count `pumps` more, or fewer if negative; with the lock of the stage held."""
        self.pumps += pumps
        self._seconds -= pumps * perf_counter()

    @property
    def seconds(self) -> float:
        """The waiting time up to now, summed over the pumps."""
        return self._seconds + self.pumps * perf_counter()


class _StageState(Enum):
    """The state of a stage. Pumps start in `OPEN`, while there is room in the buffer."""

    #     the previous stage has no item
    # OPEN ------------------------------> STARVED
    #   |  <------------------------------    |
    #   |  the previous stage calls `notify`  |
    #   '-- no item will come: `_end` --------'--> ENDED    the reader takes the rest
    #   in any state: `close` -------------------> CLOSED   nobody reads; `gone` is done when
    #                                                       the last pump has ended
    OPEN = auto()
    STARVED = auto()
    ENDED = auto()
    CLOSED = auto()


_OPEN, _STARVED, _ENDED, _CLOSED = _StageState


class Stage:
    """A bounded buffer that pumps fill and one reader at a time empties with `pull`.

    A pump is a call on a worker, or a task on the event loop. A pump claims the next item of the
    previous stage, and a slot. Then the pump runs the function, and puts the outcome into the slot.
    A pump ends when there is nothing to claim. A new pump starts when the reader has made room, or
    when the previous stage has an item.

    `items` are the items of the previous stage; they may include `PENDING`. `run` calls the
    function of the step under the state of the caller.
    """

    def __init__(self, step: MapStep, items: Any, run: Callable[..., Any]) -> None:
        fn = None if step.fn is None else partial(run, step.fn)
        self.step = replace(step, fn=fn, bound=step.buffer)
        self._items = items
        self.listener: Callable[[], object] = _do_nothing
        """Called from any thread when there is an outcome for a reader that got `PENDING`."""
        # One slot for each item that was claimed and not pulled, the oldest first.
        self._slots: deque[Slot] = deque()
        # Out of order, an outcome goes into the oldest of the empty slots.
        self._empty: deque[Slot] | None = None if step.in_order else deque()
        # Held while a pump asks the previous stage for an item. The previous stage may block, so
        # the reader never takes this lock.
        self._upstream_lock = threading.Lock()
        # Guards the attributes below; no user code runs under this lock. Re-entrant, because the
        # garbage collector may close a stream at any moment, on any thread.
        self._lock = threading.RLock()
        self._state = _OPEN
        self._pumps = 0
        self._idle = _Idle()
        self._reader_waits = False
        self._claimed = step.first  # the position of the next item
        self.gone = running_future()
        """Done when the stage is closed and no pump runs any more."""

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
                # The reader looks again, because `leave` tells only a reader that waits.
                outcome = self._take()
                if outcome is PENDING:
                    if self._state is _ENDED and not self._slots:
                        return END
                    self._reader_waits = True
        if self._state is _OPEN and self._pumps < self.step.concurrency:
            self._start_pumps()
        return outcome

    def _take(self) -> Any:
        # Without the lock: only the reader removes slots.
        slots = self._slots
        return slots.popleft()[0] if slots and slots[0] else PENDING

    def notify(self) -> None:
        """The previous stage has an item, or has ended; from any thread."""
        with self._lock:
            if self._state is _STARVED:
                self._state = _OPEN
        self._start_pumps()

    def close(self) -> None:
        """Let no pump claim another item; from any thread, any number of times."""
        with self._lock:
            self._state = _CLOSED
        self.listener = _do_nothing  # the old one refers to this stage: a reference cycle
        self._drop_outcomes()

    # The pumps' side.

    def claim(self) -> tuple[Slot, int, Any] | None:
        """Claim the next item, and return a slot, the item's position and the item.

        Blocks while the previous stage blocks. None: there is nothing to claim; the pump must end.
        """
        with self._upstream_lock:
            while self._state is _OPEN or self._state is _STARVED:
                if len(self._slots) >= self.step.bound:
                    with self._lock:
                        self._idle.add(1)
                    break
                try:
                    item = next(self._items, END)
                except BaseException as error:  # noqa: BLE001  # the reader gets it
                    self.fail(error)
                    break
                if item is PENDING:
                    with self._lock:
                        if self._state is _STARVED:
                            break
                        if self._state is _OPEN:
                            self._state = _STARVED  # look again: a `notify` may have come before
                elif item is END:
                    self._end()
                elif self._state is not _CLOSED:
                    return *self._reserve(), item
        return None

    def leave(self, slot: Slot, outcome: Any) -> None:
        """Put an outcome into its slot, and tell a reader that waits for it."""
        with self._lock:
            if self._empty is not None:
                slot = self._empty.popleft()
            # The reader can only take the outcome of the first slot. While this slot is empty, the
            # reader does not take it.
            tell = self._reader_waits and self._slots[0] is slot
            slot.append(outcome)
            if tell:
                self._reader_waits = False
        if tell:
            self.listener()

    def pump_ended(self) -> None:
        with self._lock:
            self._pumps -= 1
        self._drop_outcomes()
        # A `notify` or `pull` after the last claim has started no pump, because this pump still
        # counted.
        self._start_pumps()

    def fail(self, error: BaseException) -> None:
        """End the stage with an error: a worker or the previous stage was lost."""
        # Without `_upstream_lock`, which another pump may hold for long. An item that the other
        # pump claims meanwhile comes after the failure, so nobody reads it.
        slot, position = self._reserve()
        self.leave(slot, failure(error, self.step.name, position, fatal=True))
        self._end()

    def _start_pumps(self) -> None:
        with self._lock:
            count = min(self.step.concurrency - self._pumps, self.step.bound - len(self._slots))
            if count <= 0 or self._state is not _OPEN:
                return
            self._pumps += count
            self._idle.add(-min(count, self._idle.pumps))
        for _ in range(count):
            self._start()

    def _reserve(self) -> tuple[Slot, int]:
        slot: Slot = []
        with self._lock:
            if self._state is _STARVED:
                self._state = _OPEN
            position = self._claimed
            self._claimed = position + 1
            self._slots.append(slot)
            if self._empty is not None:
                self._empty.append(slot)
        return slot, position

    def _end(self) -> None:
        with self._lock:
            if self._state is not _CLOSED:
                self._state = _ENDED
            tell, self._reader_waits = self._reader_waits, False
        if tell:
            self.listener()

    def _drop_outcomes(self) -> None:
        """If the stage is closed and no pump runs, drop what nobody will read."""
        with self._lock:
            if self._state is not _CLOSED or self._pumps:
                return
            # The reader may be in `_take`, and goes on with the deque that it has.
            left, self._slots = self._copy_of_slots(), deque()
            self._claimed -= len(left)  # those items were not handed on
        for slot in left:
            if slot and type(slot[0]) is Failure:
                slot[0].error = None  # else the error would stay in a reference cycle
        if not self.gone.done():
            self.gone.set_result(None)

    def _copy_of_slots(self) -> deque[Slot]:
        while True:
            with suppress(RuntimeError):  # without a GIL: the reader has taken a slot meanwhile
                return self._slots.copy()

    # Statistics.

    @property
    def doing(self) -> str:
        slots = self._copy_of_slots()
        ready = sum(map(bool, slots))
        if not slots and self._state is not _ENDED:
            return f"stage {self.step.name!r} waits for input after {self._claimed} items"
        return f"stage {self.step.name!r} runs {len(slots) - ready} items and has {ready} ready"

    def stats(self) -> StageStats:
        with self._lock:
            buffered, waited = len(self._slots), self._idle.seconds
            delivered = self._claimed - self.step.first - buffered
        return StageStats(self.step.name, delivered, buffered, self.step.bound, waited)


def failed(error: BaseException, step: MapStep, position: int, item: Any) -> Failure:
    """The `Failure` of an item."""
    return failure(error, step.name, position, *((item,) if step.described else ()))


def _do_nothing() -> None:
    pass


# After so many seconds on a worker, a pump is queued again, so that other calls get the worker.
_TIME_SLICE = 0.005


class WorkerStage(Stage):
    """A stage whose pumps are calls on the CPU workers of an executor; `items` may block."""

    def __init__(
        self, step: MapStep, items: Iterator[Any], caller: CallerState, executor: DeviceExecutor
    ) -> None:
        # `run` applies the state anew for each item, whatever an earlier item left behind.
        super().__init__(step, items, caller.run)
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
        fn, claim, leave = self.step.fn, self.claim, self.leave
        until = perf_counter() + _TIME_SLICE
        while (claimed := claim()) is not None:
            slot, position, item = claimed
            if fn is not None and type(item) is not Failure:
                try:
                    item = fn(item)
                    if type(item) in UNAWAITED:
                        raise unawaited(item)
                except BaseException as error:  # noqa: BLE001  # the reader gets it
                    item = failed(error, self.step, position, claimed[2])
            leave(slot, item)
            del claimed, slot, item  # the next `claim` may block, and must hold no item
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
        """Wait until no pump advances the items, and close their iterator."""
        with self._upstream_lock:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()


class _PumpCall(Call[bool]):
    """The call of a pump. Nobody awaits this call, so there is no `Future`."""

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
            self._stage.call_ended(
                None, ExecutorShutdown("the executor of the stream was shut down")
            )


class TaskStage(Stage):
    """A stage whose pumps are tasks on the event loop of the reader; `items` never blocks."""

    def __init__(
        self, step: MapStep, items: Iterator[Any], caller: CallerState, tasks: Tasks
    ) -> None:
        super().__init__(step, items, caller.drive)
        self._tasks = tasks

    def _start(self) -> None:
        self._tasks.spawn(self._pump, self.pump_ended)

    async def _pump(self) -> None:
        fn: Any = self.step.fn
        while (claimed := self.claim()) is not None:
            slot, position, item = claimed
            if type(item) is not Failure:
                try:
                    item = await fn(item)
                except Exception as error:  # noqa: BLE001  # the reader gets it
                    item = failed(error, self.step, position, claimed[2])
                except BaseException as error:
                    self.leave(slot, _ended_by(error, self.step.name, position))
                    self._end()  # else another pump would start, perhaps on a loop that ends
                    if self._tasks.must_propagate(error):
                        raise
                    return
            self.leave(slot, item)
            del claimed, slot, item


def _ended_by(error: BaseException, name: str, position: int) -> Failure:
    """The `Failure` for a task that was cancelled, or that a BaseException has ended."""
    # A stand-in: a read that raised `error` would look as if the reader were cancelled.
    cancelled = isinstance(error, asyncio.CancelledError) or is_cancellation(error)
    how = "cancelled from outside" if cancelled else f"ended by {type(error).__name__}"
    error = stand_in(f"a task of stage {name!r} was {how}", error)
    return failure(error, name, position, fatal=True)


class AsyncSource(TaskStage):
    """The items of an async iterable, fetched ahead by one task.

    The task is the only pump, and takes all items. An async generator may hold a task group or a
    timeout open between two items, and only the task that has entered a task group may leave it.
    The task waits while the buffer is full, and closes the generator at the end.
    """

    def __init__(self, source: Any, caller: CallerState, tasks: Tasks, *, bound: int) -> None:
        super().__init__(MapStep(None, bound=bound, name="source"), source, caller, tasks)
        self._room: Future[None] | None = None  # done when the reader has made room

    def pull(self) -> Any:
        outcome = super().pull()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        return outcome

    async def _pump(self) -> None:
        source, self._items = self._items, None
        iterator: Any = None
        try:
            iterator = aiter(source)
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
            self.leave(slot, _ended_by(error, self.step.name, position))
            if self._tasks.must_propagate(error):
                raise
        finally:
            await self._tasks.close(iterator, "an async source")
            self._end()

    async def _has_room(self) -> bool:
        """Wait until there is room for an item; False: the stage is closed."""
        if len(self._slots) >= self.step.bound:
            self._room = room = running_future()
            # The task looks again: a worker that pulled before has not seen the future.
            if len(self._slots) >= self.step.bound:
                with self._lock:
                    self._idle.add(1)
                await room
                with self._lock:
                    self._idle.add(-1)
        return self._state is not _CLOSED
