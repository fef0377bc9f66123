"""`Stream`: the async iterator that `Pipeline`, `aiopar.map` and `AsyncDataLoader` return."""

import sys
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

import anyio
import anyio.lowlevel

from .._base.arguments import AsyncOnly, short_repr
from .._base.thread_state import CallerState
from .._base.tracebacks import without_frames
from ..executor._executor import DeviceExecutor
from ..executor._generators import END
from ..futures._waiting import cancel_scope, close_fully
from ..futures._wakeup import in_event_loop, ki_protected
from ._cursor import Cursor
from ._flow import Flow, Step
from ._outcome import PENDING, FailedItem, Failure
from ._stages import StageStats

T = TypeVar("T")

# A read of a ready item does not suspend. After so many seconds without suspending, a read gives
# other tasks a turn and sees a cancellation.
_TURN = 0.005

_GOES_ON = "; a function that runs in a thread cannot be interrupted, and goes on"


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


def progress_bar(total: int | None, initial: int = 0, unit: str = "item") -> Any:
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

    return Unwatched(total=total, initial=initial, unit=unit)


class Stream(AsyncOnly, Generic[T]):
    """An async iterator over the results of its stages; made by `aiopar.map` and `Pipeline`.

    Nothing starts before the first read. Then workers and tasks run ahead of the reader, up to the
    bounds of their buffers. Everything runs under the state that the caller had when the stream was
    made (grad mode, autocast, context variables, ...). Each item begins with this state, whatever a
    function has changed for an earlier item. A generator keeps its own state between its items. The
    stream owns its source, and closes a generator at the end.

    One task may read at a time. A read that is cancelled or times out loses no item. A read of a
    ready item does not suspend, except to give other tasks a turn every few milliseconds.

    A stream ends after its last item, after an error, by `aclose`, or when `async with` is left.
    Then no item starts any more, tasks are cancelled, and threads end after the items that they
    run. `aclose` and `async with` wait for all of this, and until the source is closed. They do not
    wait for tasks of an event loop that was closed. If a plain `async for` is left early, the
    stream ends when it is collected, and nothing waits for it.

    A read raises the error of a function or of the source in place of the item, with its own type
    and a note that names the stage and the position. It raises `TimeoutError` if it waits longer
    than the pipeline's `timeout`, and `RuntimeError` if another task reads or no event loop runs.
    If the last read timed out, the end of `async with` does not wait: a function that is stuck in a
    thread cannot be interrupted.

    Attributes:
        name: The name in messages.
        closed: Whether no item will come any more.

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
    # `in_threads` is False if closing ends stuck functions, which run in processes.
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
        self._timed_out = False  # the last read: a thread may be in a function that never returns
        self.name = name
        self._failures: list[FailedItem] = []
        self._position = position or Cursor()
        self._first = self._position.delivered
        self._make_bar = bar
        self._bar: Any = None
        self._reading = False
        self.closed: bool = False
        self._began = self._ended = 0.0
        self._turn_ends = 0.0
        self._waited = 0.0

    @short_repr
    def __repr__(self) -> str:
        return f"{self.name!r} at item {self.delivered}{', closed' * self.closed}"

    def __aiter__(self) -> Self:
        return self

    @ki_protected
    async def __anext__(self) -> T:
        if self._reading:
            raise RuntimeError(
                f"{self.name} is already read by another task: give each task its own"
            )
        flow = self._flow
        if flow is None or perf_counter() > self._turn_ends:
            flow = await self._turn()
        item = flow.pull() if not self.closed else END
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
        if not in_event_loop():
            raise RuntimeError(f"{self.name} needs an event loop, and none runs here")
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

    async def _slow_next(self, flow: Flow, item: Any) -> T:
        """The next item after a `PENDING`, `END` or `Failure`: wait, end or skip it."""
        self._reading = True
        try:
            while True:
                if item is PENDING:
                    item = await self._wait(flow)
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
            self._reading = False
            del item  # an error's traceback holds this frame

    async def _wait(self, flow: Flow) -> Any:
        began = perf_counter()
        self._timed_out = False
        try:
            if self._timeout is None:
                return await flow.wait()
            with cancel_scope(self._timeout):
                return await flow.wait()
        finally:
            now = perf_counter()
            self._waited += now - began
            self._turn_ends = now + _TURN
        self._timed_out = self._in_threads
        raise TimeoutError(
            f"{self.name}: item {self.delivered} did not come within {self._timeout} s; "
            + ", ".join(stage.doing for stage in flow.stages)
            + (_GOES_ON if self._in_threads else "")
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
            self.closed = True
            self._plan = None
            self._ended = perf_counter()
            if self._bar is not None:
                self._bar.close()
            if self._flow is not None:
                self._flow.close()

    @ki_protected
    async def aclose(self) -> None:
        """Stop everything; wait until threads and tasks have ended and the source is closed.

        May be called twice, and by another task than the reader, whose loop then ends. Raises the
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

    def __del__(self) -> None:
        if not sys.is_finalizing() and getattr(self, "_flow", None) is not None:
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
