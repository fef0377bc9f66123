"""`Stream`: the async iterator that `Pipeline`, `aiopar.map` and `AsyncDataLoader` return.

A `Flow` runs the stages. It does not refer to its `Stream`, which may be collected meanwhile.
"""

import math
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

import anyio
import anyio.lowlevel

from .._base.arguments import AsyncOnly, is_async, short_repr
from .._base.destructors import destructor
from .._base.devices import is_accelerator
from .._base.thread_state import CallerState
from .._base.tracebacks import log_failure, without_frames
from ..errors import ExecutorShutdown
from ..executor._call import FutureCall
from ..executor._executor import DeviceExecutor
from ..executor._generators import END, Steps
from ..executor._loop_tasks import Tasks
from ..futures._future import Future, thread_hooks
from ..futures._waiting import cancel_scope, close_fully
from ..futures._wakeup import Awaiter, awaiter_here, in_event_loop, ki_protected
from ._cursor import Cursor
from ._stages import AsyncSource, Stage, StageStats, TaskStage, WorkerStage
from ._steps import (
    CONTAINERS,
    PENDING,
    FailedItem,
    Failure,
    InlineStep,
    MapStep,
    Step,
    StopFlag,
    stepped,
    until_stopped,
)

T = TypeVar("T")

# A read of a ready item does not suspend. A reader that has not suspended for so many seconds gives
# other tasks a turn, and sees a cancellation.
_TURN = 0.005

_READING = -math.inf
"""Stands for the end of the turn while a read waits."""


@dataclass(frozen=True, slots=True)
class StreamStats:
    """The work of a stream, and how long the reader and the workers waited for each other.

    Attributes:
        items: How many items were delivered.
        failures: How many failed items were skipped.
        consumer_seconds: How long the reader waited for items.
        worker_seconds: How long the workers of the last stage waited for the reader.
        elapsed_seconds: The time since the first read.
        stages: The stages in the order of the items; empty before the first read.
    """

    items: int
    failures: int
    consumer_seconds: float
    worker_seconds: float
    elapsed_seconds: float
    stages: tuple[StageStats, ...]

    @property
    def bottleneck(self) -> str:
        """One line that says whether the stream or the consumer is the bottleneck."""
        share = self.consumer_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0
        side = "stream" if share >= 0.1 else "consumer"
        return (
            f"the {side} is the bottleneck: in {self.elapsed_seconds:.2f} s the consumer waited "
            f"{self.consumer_seconds:.2f} s for items, and workers {self.worker_seconds:.2f} s for "
            "the consumer"
        )


def progress_bar(
    total: int | None,
    initial: int = 0,
    unit: str = "item",
    expected: int | None = None,
    *,
    disable: bool | None = False,
) -> Any:
    """A progress bar with rate and, if the total is known, time left; made with tqdm.

    `expected` is used if `total` is None. `disable=None`: no bar unless stderr is a terminal.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress needs tqdm: pip install 'aiopar[progress]'") from error

    class Unwatched(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no monitor thread, which would outlive the stream

    total = expected if total is None else total
    return Unwatched(total=total, initial=initial, unit=unit, disable=disable)


class Flow:
    """The stages of one stream, from the first read to the end, on the running event loop."""

    def __init__(
        self,
        source: Iterable[Any] | AsyncIterable[Any],
        steps: Sequence[Step],
        caller: CallerState,
        executor: DeviceExecutor | None,
    ) -> None:
        self._caller = caller
        # A worker in another process or machine can run only the user's function, not a pump. On an
        # accelerator, only a call's result is complete, and ordered after the caller's launches.
        each = executor is not None and (
            not executor._dispatcher.shares_memory or any(map(is_accelerator, executor.devices))
        )
        self._each = executor if each else None  # gets a call for each item
        self._given = None if each else executor  # runs pumps
        self._own: DeviceExecutor | None = None  # made if there is no `_given`
        self._workers = 1 + sum(step.concurrency for step in steps if isinstance(step, MapStep))
        self._tasks = Tasks(caller)
        self._stop = StopFlag()
        # Emptied by the first `close`. Not a lock: a destructor may call `close` at any line.
        self._open = [None]
        self._waiting: list[Awaiter] = []
        self._source: Steps[Any] | None = None
        self._source_closed: Future[None] | None = None
        self.stages: list[Stage] = []
        self._items: Iterator[Any]  # of the last step so far
        self._blocks = False  # whether `next` of the items may block
        if isinstance(source, AsyncIterable):
            bounds = (step.buffer for step in steps if isinstance(step, MapStep))
            self._add(AsyncSource(source, self._caller, self._tasks, bound=next(bounds, 2)))
        elif type(source) in CONTAINERS:
            self._items = iter(source)
        else:
            self._source = Steps(lambda: source, self._caller)
            self._items, self._blocks = stepped(self._source, "source"), True
        for step in steps:
            if isinstance(step, InlineStep):
                # Each item checks `stop`, because a step may read many items before it yields one.
                self._items = step.wrap(until_stopped(self._items, self._stop))
                self._blocks = self._blocks or step.blocks
            else:
                self._build_stage(step)
        if self._blocks or not self.stages:
            self._build_stage(MapStep(None, name="fetch"))
        self.stages[-1].listener = self.notify
        last = self._items
        self.pull: Callable[[], Any] = (
            last.pull if isinstance(last, Stage) else partial(next, last, END)
        )

    def _build_stage(self, step: MapStep) -> None:
        fn, on_loop = step.fn, is_async(step.fn)
        if self._each is not None and fn is not None and not on_loop:
            run: Callable[..., Any] = self._each.run_sync
            kept = self._each._dispatcher.keep(fn)
            step, on_loop = replace(step, fn=partial(run, kept)), True
        if on_loop and self._blocks:
            self._build_stage(MapStep(None, bound=step.buffer, name="fetch"))
        if on_loop:
            self._add(TaskStage(step, self._items, self._caller, self._tasks))
        else:
            self._add(WorkerStage(step, self._items, self._caller, self._executor()))

    def _add(self, stage: Stage) -> None:
        if self.stages:
            self.stages[-1].listener = stage.notify
        self.stages.append(stage)
        self._items, self._blocks = stage, False

    def _executor(self) -> DeviceExecutor:
        """The executor of the pumps; its workers are threads of this process."""
        if self._given is not None:
            return self._given
        if self._own is None:
            self._own = DeviceExecutor(["cpu"] * self._workers, thread_name_prefix="aiopar-data")
        return self._own

    # Reading: one reader at a time.

    async def wait(self) -> Any:
        """Wait for the next outcome or `END`."""
        while not self._stop.is_set:
            if not self._tasks.loop_runs and len(self._ending) < len(self.stages):
                raise RuntimeError(
                    "the event loop on which this stream began does not run any more, and its "
                    "async functions or source ran there: read each stream on one loop"
                )
            # Before `pull`: an outcome that comes after `pull` must find the waiter.
            waiter = awaiter_here()
            assert waiter is not None  # noqa: S101  # the stream has checked that a loop runs
            self._waiting[:] = [waiter]
            item = self.pull()
            if item is not PENDING:
                return item
            thread_hooks.about_to_block()
            await waiter
        return END

    def notify(self) -> None:
        """Wake the reader; from any thread."""
        try:
            waiter = self._waiting.pop()
        except IndexError:
            return
        waiter.wake()

    # Closing.

    def close(self) -> None:
        """Claim no more items, cancel tasks and end threads, without waiting; from any thread."""
        try:
            self._open.pop()
        except IndexError:
            return
        self._stop.is_set = True
        for stage in self.stages:
            stage.close()
        self._tasks.cancel()
        if any(isinstance(stage, WorkerStage) for stage in self.stages):
            self._source_closed = self._close_items()
            self._source_closed.add_done_callback(partial(log_failure, "a source"))
        if self._own is not None:
            self._own.shutdown(wait=False)
        self.notify()

    async def aclose(self) -> None:
        """Close, and wait until no task, thread or open generator is left."""
        self.close()
        with cancel_scope(shield=True):
            for stage in self._ending:
                await stage.gone
            if self._own is not None:
                await self._own.aclose()
            if self._source_closed is not None:
                await self._source_closed

    @property
    def gone(self) -> bool:
        """Whether all stages have ended and the source is closed."""
        futures = [self._source_closed, *(stage.gone for stage in self._ending)]
        return all(future.done() for future in futures if future is not None)

    @property
    def _ending(self) -> list[Stage]:
        """The stages that end when the flow is closed; tasks of a closed loop do not end."""
        runs = self._tasks.loop_runs
        return [stage for stage in self.stages if runs or isinstance(stage, WorkerStage)]

    def _close_items(self) -> Future[None]:
        """Close the generators on a worker, which waits for their running steps."""
        stages = [stage for stage in self.stages if isinstance(stage, WorkerStage)]
        call = FutureCall(_close, (stages, self._source), self._caller)
        try:
            self._executor()._dispatcher.put(call)
        except ExecutorShutdown:
            if self._given is None:
                raise
            self._given = None  # it was shut down: use threads of the stream's own
            return self._close_items()
        return call.future


def _close(stages: Sequence[WorkerStage], source: Steps[Any] | None) -> None:
    for stage in reversed(stages):
        stage.close_items()
    if source is not None:
        source.close()


class Stream(AsyncOnly, Generic[T]):
    """An async iterator over the results of its stages; made by `aiopar.map` and `Pipeline`.

    Nothing starts before the first read. Then workers and tasks run ahead of the reader, up to the
    bounds of their buffers. Everything runs under the state that the caller had when the stream was
    made (grad mode, autocast, context variables, ...), anew for each item. A generator keeps its
    own state between its items. The stream owns its source, and closes a generator at the end.

    One task may read at a time. A read that is cancelled or times out loses no item. A read of a
    ready item does not suspend, except to give other tasks a turn every few milliseconds.

    A stream ends after its last item, after an error, by `aclose`, or when `async with` is left.
    Then no item starts any more, tasks are cancelled, and threads end after the items that they
    run. `aclose` and `async with` wait for all of this, and until the source is closed. They do not
    wait for tasks of a closed event loop. If a plain `async for` is left early, the stream ends
    when it is collected, and nothing waits for the end.

    A read raises the error of a function or of the source in place of the item, with its own type
    and a note that names the stage and the position. It raises `TimeoutError` if it waits longer
    than the pipeline's `timeout`, and `RuntimeError` if another task reads or no event loop runs.
    If the last read timed out, the end of `async with` does not wait: a function that is stuck in a
    thread cannot be interrupted.

    Attributes:
        name: The name in messages.

    Example:
        >>> import asyncio, aiopar
        >>> async def main():
        ...     async with aiopar.map(str.upper, ["a", "b", "c"]) as stream:
        ...         return await anext(stream), stream.delivered
        >>> asyncio.run(main())
        ('A', 1)
    """

    # An error of the source is always raised, and an item's error if there are more than
    # `max_failures`. Each read updates `position`. `bar` makes a progress bar at the first read.
    # `in_threads` is False if functions run in processes: closing the stream ends stuck ones there.
    def __init__(
        self,
        source: Iterable[Any] | AsyncIterable[Any],
        steps: Sequence[Step],
        *,
        name: str,
        caller: CallerState,
        executor: DeviceExecutor | None = None,
        max_failures: int = 0,
        timeout: float | None = None,
        position: Cursor | None = None,
        bar: Callable[[], Any] | None = None,
        in_threads: bool = True,
    ) -> None:
        self._flow: Flow | None = None
        self._plan: Any = (source, steps, caller, executor)
        self._max_failures = max_failures
        self._timeout = timeout
        self._in_threads = in_threads
        self._timed_out = False  # the last read; a thread may be stuck in a function
        self.name = name
        self._failures: list[FailedItem] = []
        self._position = position or Cursor()
        self._first = self._position.delivered
        self._bar: Any = bar  # replaced by its result
        self._began = self._ended = 0.0
        self._turn_ends = 0.0
        self._waited = 0.0

    @property
    def closed(self) -> bool:
        """Whether no item will come any more."""
        return self._ended > 0

    @short_repr
    def __repr__(self) -> str:
        return f"{self.name!r} at item {self.delivered}{', closed' * self.closed}"

    def __aiter__(self) -> Self:
        return self

    @ki_protected
    async def __anext__(self) -> T:
        flow = self._flow
        if flow is None or perf_counter() > self._turn_ends:
            flow = await self._turn()
        item = END if self._ended else flow.pull()
        if item is PENDING or item is END or type(item) is Failure:
            try:
                item = await self._slow_next(flow, item)
            except BaseException:
                del item  # the error's traceback holds this frame
                raise
        self._position.delivered += 1
        if self._bar is not None:
            self._bar.update(1)
        return item  # type: ignore[no-any-return]

    async def _turn(self) -> Flow:
        if self._turn_ends == _READING:
            raise RuntimeError(
                f"{self.name} is already read by another task: give each task its own"
            )
        if not in_event_loop():
            raise RuntimeError(f"{self.name} needs an event loop, and none runs here")
        self._turn_ends = _READING
        try:
            await anyio.lowlevel.checkpoint()
        finally:
            self._turn_ends = perf_counter() + _TURN
        if self._flow is None:
            if self._plan is None:
                raise StopAsyncIteration
            if self._bar is not None:
                self._bar = self._bar()
            self._began = perf_counter()
            plan, self._plan = self._plan, None
            self._flow = Flow(*plan)
        return self._flow

    async def _slow_next(self, flow: Flow, item: Any) -> T:
        """The next item after a `PENDING`, `END` or `Failure`: wait, end or skip it."""
        turn_ends, self._turn_ends = self._turn_ends, _READING
        try:
            while True:
                if item is PENDING:
                    item = await self._wait(flow)
                    turn_ends = perf_counter() + _TURN
                elif item is END:
                    if not self.closed:
                        self._position.ended = True
                    await self.aclose()
                    raise StopAsyncIteration
                elif type(item) is Failure:
                    self._skip(item)
                    item = flow.pull()
                else:
                    return item  # type: ignore[no-any-return]
        finally:
            self._turn_ends = turn_ends
            del item  # the error's traceback holds this frame

    async def _wait(self, flow: Flow) -> Any:
        began = perf_counter()
        self._timed_out = False
        try:
            if self._timeout is None:
                return await flow.wait()
            with cancel_scope(self._timeout):
                return await flow.wait()
        finally:
            self._waited += perf_counter() - began
        self._timed_out = self._in_threads
        raise TimeoutError(
            f"{self.name}: item {self.delivered} did not come within {self._timeout} s; "
            + ", ".join(stage.doing for stage in flow.stages)
            + "; a function that runs in a thread cannot be interrupted, and goes on"
            * self._in_threads
        )

    def _skip(self, failed: Failure) -> None:
        """Record a failed item, or raise its error if there are too many."""
        error = failed.take()
        try:
            if len(self._failures) >= self._max_failures or failed.fatal:
                self.close()
                raise error
            self._failures.append(FailedItem(without_frames(error), failed.stage, failed.position))
        finally:
            del error  # its traceback holds this frame

    @property
    def failures(self) -> Sequence[FailedItem]:
        """The failed items that were skipped, in the order of the stream."""
        return tuple(self._failures)

    @property
    def delivered(self) -> int:
        """How many items were delivered, including those before a resume."""
        return self._position.delivered

    @ki_protected
    def close(self) -> None:
        """Begin to stop everything, as `aclose` does, and return at once."""
        if not self.closed:
            self._ended = perf_counter()
            self._plan = None
            if self._bar is not None and self._began:
                self._bar.close()
            if self._flow is not None:
                self._flow.close()

    @ki_protected
    async def aclose(self) -> None:
        """Stop everything; wait until threads and tasks have ended and the source is closed.

        May be called twice. Any task may call it; the reader's `async for` then ends. Raises the
        error of a generator that fails when it is closed. The error of an async generator is logged
        instead.
        """
        self.close()
        if self._flow is not None:
            await self._flow.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._timed_out:
            self.close()
        else:
            await close_fully(self.aclose)

    @destructor
    def __del__(self) -> None:
        if getattr(self, "_flow", None) is not None:
            self.close()

    def stats(self) -> StreamStats:
        """The statistics of the stream up to now."""
        flow = self._flow
        stages = () if flow is None else tuple(stage.stats() for stage in flow.stages)
        now = self._ended or perf_counter()
        return StreamStats(
            items=self.delivered - self._first,
            failures=len(self._failures),
            consumer_seconds=self._waited,
            worker_seconds=stages[-1].waited_seconds if stages else 0.0,
            elapsed_seconds=now - self._began if self._began else 0.0,
            stages=stages,
        )
