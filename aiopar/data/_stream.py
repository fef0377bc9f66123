"""`Stream`: what `async for` reads; made by `Pipeline`, `aiopar.map` and `AsyncDataLoader`."""

import sys
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Protocol, Self, TypeVar

import anyio
import anyio.lowlevel

from .._base.arguments import short_repr
from .._base.thread_state import CallerState
from ..executor._executor import DeviceExecutor
from ..futures._waiting import close_fully
from ..futures._wakeup import in_event_loop
from ._cursor import Cursor
from ._flow import Flow, Step
from ._outcome import END, PENDING, FailedItem, Failure, without_frames

T = TypeVar("T")

# A reader that always finds an item never waits: after so many seconds it lets the loop's others
# have a turn, and sees whether it was cancelled.
_TURN = 0.005


@dataclass(frozen=True, slots=True)
class StageStats:
    """What one stage of a stream has done.

    Attributes:
        name: What messages call it.
        items: How many it has handed on.
        buffered: How many run or are ready, now.
        bound: The most that may be.
        waited_seconds: How long its workers had nothing to do because its buffer was full, summed
            over them.
    """

    name: str
    items: int
    buffered: int
    bound: int
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class StreamStats:
    """What a stream has done, and who waited for whom.

    Attributes:
        items: How many were delivered.
        failures: How many were skipped.
        consumer_seconds: How long who reads the stream waited for it.
        worker_seconds: How long workers of the last stage with any waited for who reads the stream.
        elapsed_seconds: Since the first read.
        stages: In the order in which items pass them; empty until the first read.
    """

    items: int
    failures: int
    consumer_seconds: float
    worker_seconds: float
    elapsed_seconds: float
    stages: tuple[StageStats, ...]

    @property
    def bottleneck(self) -> str:
        """In one line, which side the other waits for."""
        share = self.consumer_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0
        side = "stream" if share >= 0.1 else "consumer"
        return (
            f"the {side} is the bottleneck: in {self.elapsed_seconds:.2f} s the consumer waited "
            f"{self.consumer_seconds:.2f} s for items, and workers {self.worker_seconds:.2f} s for "
            "the consumer"
        )


class Bar(Protocol):
    """A progress bar."""

    def update(self, count: int) -> object:
        """Count more delivered items."""

    def close(self) -> object:
        """There are no more items."""


def progress_bar(total: int | None, initial: int = 0, unit: str = "item") -> Bar:
    """A progress bar with rate and, if the total is known, time left; made with tqdm.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress needs tqdm: pip install 'aiopar[progress]'") from error

    class Unwatched(tqdm):  # type: ignore[type-arg]
        # No monitor thread, which would outlive the stream.
        monitor_interval = 0

    bar: Bar = Unwatched(total=total, initial=initial, unit=unit)
    return bar


class Stream(Generic[T]):
    """An async iterator over what its stages make of the items of a source.

    Made by `aiopar.map` and by `async for` over a `Pipeline`. Nothing begins before the first read.
    From then on workers and tasks run ahead of the reader, up to the bounds of their buffers.
    Everything runs under the state that its maker had then (grad mode, autocast, context variables,
    ...). The stream owns its source: a generator is closed at the end.

    One task reads at a time. A read that is cancelled, or out of time, loses no item. Items that
    are ready are handed out without suspending, but for a turn of the loop every few milliseconds.

    The end, in each case: after the last item, an error, `aclose`, or leaving `async with`, nothing
    starts any more, tasks are cancelled, and threads end after the items that they run; `aclose`
    and `async with` wait until all of that is gone, and the source is closed. A plain `async for`
    that is broken off does the same when the stream is collected, for workers do not hold it;
    nobody waits then.

    Raises, when it is read: what a function or the source raised, of its own type, with a note that
    names stage and position, after the items before it; `TimeoutError`, where one read takes longer
    than the pipeline's `timeout`; `RuntimeError`, where another task reads, or no event loop runs.

    Attributes:
        name: What messages call it.

    Example:
        >>> import asyncio, aiopar
        >>> async def main():
        ...     async with aiopar.map(str.upper, ["a", "b", "c"]) as stream:
        ...         return await anext(stream), stream.delivered
        >>> asyncio.run(main())
        ('A', 1)
    """

    # `steps` are those of `_plan`. `caller`: whose state; None: of who calls. `executor`: where
    # plain functions run; None: on CPU threads of the stream's own. More than `max_failures` failed
    # items raise; an error of the source does always. `position` is kept up to date; what it says
    # was delivered before is not counted again. `bar` makes a progress bar when the stream begins.
    def __init__(
        self,
        source: Iterable[Any] | AsyncIterable[Any],
        steps: Sequence[Step] = (),
        *,
        caller: CallerState | None = None,
        executor: DeviceExecutor | None = None,
        max_failures: int = 0,
        timeout: float | None = None,
        position: Cursor | None = None,
        bar: Callable[[], Bar] | None = None,
        name: str = "stream",
    ) -> None:
        self._flow: Flow | None = None
        self._plan: Any = (source, tuple(steps), caller or CallerState(), executor)
        self._max_failures = max_failures
        self._timeout = timeout
        self.name = name
        self._failures: list[FailedItem] = []
        self._position = position or Cursor()
        self._first = self._position.delivered
        self._make_bar = bar
        self._bar: Bar | None = None
        self._reading = False
        self._over = False
        self._began = self._ended = 0.0
        self._turn_ends = 0.0
        self._waited = 0.0

    @short_repr
    def __repr__(self) -> str:
        return f"{self.name!r} at item {self.delivered}{', closed' * self._over}"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._reading:
            raise RuntimeError(f"{self.name} is read by another task already: give each its own")
        flow = self._flow
        if flow is None or perf_counter() > self._turn_ends:
            flow = await self._turn()
        item = flow.pull() if not self._over else END
        if item is PENDING or item is END or type(item) is Failure:
            try:
                item = await self._next_late(flow, item)
            except BaseException:
                # An error's traceback holds this frame, which must not hold the error.
                del item
                raise
        self._position.delivered += 1
        if self._bar is not None:
            self._bar.update(1)
        return item  # type: ignore[no-any-return]

    async def _turn(self) -> Flow:
        if not in_event_loop():
            raise RuntimeError(
                f"{self.name} is read by a task of an event loop, and none runs here"
            )
        self._reading = True
        try:
            await anyio.lowlevel.checkpoint()
        finally:
            self._reading = False
        self._turn_ends = perf_counter() + _TURN
        return self._flow or self._begin()

    def _begin(self) -> Flow:
        plan, self._plan = self._plan, None
        if plan is None:
            raise StopAsyncIteration
        self._began = perf_counter()
        self._flow = Flow(*plan)
        if self._make_bar is not None:
            self._bar = self._make_bar()
        return self._flow

    async def _next_late(self, flow: Flow, item: Any) -> T:
        """`item`, or the first after it that is one."""
        self._reading = True
        try:
            while True:
                if item is PENDING:
                    item = await self._wait(flow)
                elif item is END:
                    if not self._over:
                        self._position.ended = True
                    await self.aclose()
                    raise StopAsyncIteration
                elif type(item) is Failure:
                    self._skip(item)
                    item = flow.pull()
                else:
                    return item  # type: ignore[no-any-return]
        finally:
            self._reading = False
            # An error's traceback holds this frame, which must not hold the error.
            del item

    async def _wait(self, flow: Flow) -> Any:
        began = perf_counter()
        try:
            if self._timeout is None:
                return await flow.wait()
            with anyio.move_on_after(self._timeout):
                return await flow.wait()
        finally:
            now = perf_counter()
            self._waited += now - began
            self._turn_ends = now + _TURN
        raise TimeoutError(
            f"{self.name}: item {self.delivered} did not come within {self._timeout} s; "
            f"{self._whereabouts(flow)}"
        )

    def _whereabouts(self, flow: Flow) -> str:
        return ", ".join(
            f"stage {stage.name!r} has {stage.buffered} of {stage.claimed} items under way"
            for stage in flow.stages
        )

    def _skip(self, failed: Failure) -> None:
        """Leave out an item that failed.

        Raises:
            BaseException: Its error, if that is one too many.
        """
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
        """The items that were left out, in the order in which they would have come."""
        return tuple(self._failures)

    @property
    def delivered(self) -> int:
        """How many items the reader got, those before a resume included."""
        return self._position.delivered

    def close(self) -> None:
        """Stop everything, soon; returns at once, and waits for nothing. See `aclose`."""
        if not self._over:
            self._over = True
            self._plan = None
            self._ended = perf_counter()
            if self._bar is not None:
                self._bar.close()
            if self._flow is not None:
                self._flow.close()

    async def aclose(self) -> None:
        """Stop everything, and wait until it has: threads, tasks, and the source closed.

        Raises what a generator raises when it is closed; what an async generator raises there is
        logged. May be called twice, and by another task than that which reads, whose loop then
        ends.
        """
        self.close()
        if self._flow is not None:
            await self._flow.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await close_fully(self.aclose)

    def __del__(self) -> None:
        if not sys.is_finalizing() and getattr(self, "_flow", None) is not None:
            self.close()

    def stats(self) -> StreamStats:
        """What the stream has done so far."""
        flow = self._flow
        stages = () if flow is None else tuple(map(_stage_stats, flow.stages))
        now = self._ended or perf_counter()
        return StreamStats(
            items=self.delivered - self._first,
            failures=len(self._failures),
            consumer_seconds=self._waited,
            worker_seconds=stages[-1].waited_seconds if stages else 0.0,
            elapsed_seconds=now - self._began if self._began else 0.0,
            stages=stages,
        )


def _stage_stats(stage: Any) -> StageStats:
    return StageStats(
        name=stage.name,
        items=stage.delivered,
        buffered=stage.buffered,
        bound=stage.bound,
        waited_seconds=stage.idle_seconds(),
    )
