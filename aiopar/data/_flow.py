"""A stream that runs: its stages, built from the plan, and all that has to be closed.

It knows nothing of the `Stream` that reads it: that one may be collected while workers run.
"""

import threading
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias

import anyio

from .._base.arguments import is_async
from .._base.devices import any_accelerator
from .._base.thread_state import CallerState
from .._base.tracebacks import log_failure
from ..errors import ExecutorShutdown
from ..executor._call import FutureCall
from ..executor._executor import DeviceExecutor
from ..executor._loop_tasks import Tasks
from ..futures._future import Future, thread_hooks
from ..futures._wakeup import Awaiter, awaiter_here
from ._inline_steps import until_left
from ._outcome import END, PENDING, Leaving
from ._stages import AsyncSource, Stage, SyncSource, TaskStage, ThreadStage


@dataclass(frozen=True, slots=True)
class Map:
    """A function on each item, `concurrency` at once: a stage with a buffer.

    A plain function runs on workers, an `async def` (or whatever returns an awaitable, with
    `asynchronous`) as tasks on the event loop.
    """

    fn: Callable[[Any], Any] | None
    """None: nothing is done to the items, they are only fetched ahead."""
    concurrency: int = 1
    bound: int | None = None
    """The most items that run or are ready, also where that is less than `concurrency`; None: as
    many ready as run, and at least two."""
    in_order: bool = True
    name: str = "map"
    asynchronous: bool | None = None
    """None: as `fn` is."""
    first: int = 0
    """The position of the first item that comes, for messages."""

    @property
    def buffer(self) -> int:
        """The bound, with its default."""
        if self.bound is None:
            return self.concurrency + max(2, self.concurrency)
        return self.bound

    @property
    def on_loop(self) -> bool:
        """Whether it runs as tasks."""
        return is_async(self.fn) if self.asynchronous is None else self.asynchronous


@dataclass(frozen=True, slots=True)
class Link:
    """An iterator around an iterator, without workers or buffer of its own.

    It is stepped by who takes the items, one step at a time. `PENDING` and every `Failure` that
    comes are to be yielded as they are, at once.
    """

    around: Callable[[Iterator[Any]], Iterator[Any]]
    blocks: bool = True
    """Whether it may take long: it is then stepped on a worker, never on the event loop."""


Step: TypeAlias = Map | Link


# Containers: to step through them takes no time, and cannot block.
_AT_HAND = (range, list, tuple, dict, set, frozenset, str, bytes)


class Flow:
    """The stages of one stream, from the first read to its end.

    Args:
        source: A sync or an async iterable.
        steps: What its items go through.
        caller: Whose state everything runs under.
        executor: Where plain functions run. None: on CPU workers of the stream's own, as many as
            all stages together have at once.

    Raises:
        RuntimeError: There is no running event loop, and the source or a function needs one.
    """

    def __init__(
        self,
        source: Iterable[Any] | AsyncIterable[Any],
        steps: Sequence[Step],
        caller: CallerState,
        executor: DeviceExecutor | None,
    ) -> None:
        self._caller = caller
        self._given = executor
        # Of its own workers, not of its pool: it may be a view on the CPU ones of many.
        self._on_accelerators = executor is not None and any_accelerator(executor.devices)
        self._workers = 1 + sum(step.concurrency for step in steps if isinstance(step, Map))
        self._own: DeviceExecutor | None = None
        self._tasks: Tasks | None = None
        self._leaving = Leaving()
        self._lock = threading.Lock()
        self._iterators_closed: Future[None] | None = None
        self._waiting: list[Awaiter] = []
        self.stages: list[Stage] = []
        self._items: Iterator[Any]
        self._blocks: bool
        bounds = [step.buffer for step in steps if isinstance(step, Map)]
        self._build_source(source, bounds[0] if bounds else 2)
        for step in steps:
            self._build_step(step)
        if self._blocks or not self.stages:
            self._build_step(Map(None, name="fetch"))
        # Between the last stage and here there may be links, which do not block.
        self.pull = self._nonblocking_pull()
        self.stages[-1].listener = self.notify

    # Building.

    def _build_source(self, source: Iterable[Any] | AsyncIterable[Any], bound: int) -> None:
        self._source: SyncSource | None = None
        if isinstance(source, AsyncIterable):
            self._add(AsyncSource("source", source, self.tasks(), bound=bound))
        elif type(source) in _AT_HAND:
            self._items, self._blocks = iter(source), False
        else:
            self._items = self._source = SyncSource(source, self._caller)
            self._blocks = True

    def _build_step(self, step: Step) -> None:
        if not isinstance(step, Map):
            # One step of it may take many items until there is something to hand on.
            self._items = step.around(until_left(self._items, self._leaving))
            self._blocks = self._blocks or step.blocks
        elif step.on_loop:
            if self._blocks:
                self._build_step(Map(None, bound=step.buffer, name="fetch"))
            self._add(self._task_stage(step, step.fn), step.first)
        elif step.fn is not None and self._given is not None and self._on_accelerators:
            # One call an item: its result is complete on the device before it is handed on, and
            # ordered after what its caller had launched.
            self._build_step(Map(None, bound=step.buffer, name="fetch"))
            run: Callable[..., Any] = self._given.run_sync
            self._add(self._task_stage(step, partial(run, step.fn)), step.first)
        else:
            self._add(self._thread_stage(step), step.first)

    def _add(self, stage: Stage, first: int = 0) -> None:
        stage.first = stage.claimed = first
        if self.stages:
            self.stages[-1].listener = stage.notify
        self.stages.append(stage)
        self._items = _Pulled(stage)
        self._blocks = False

    def _nonblocking_pull(self) -> Callable[[], Any]:
        items = self._items
        return items.pull if isinstance(items, _Pulled) else partial(next, items, END)

    def _task_stage(self, step: Map, fn: Callable[[Any], Any] | None) -> Stage:
        assert fn is not None  # noqa: S101
        return TaskStage(
            step.name,
            fn,
            self._nonblocking_pull(),
            self.tasks(),
            concurrency=step.concurrency,
            bound=step.buffer,
            in_order=step.in_order,
        )

    def _thread_stage(self, step: Map) -> Stage:
        return ThreadStage(
            step.name,
            step.fn,
            self._items,
            self._caller,
            self.executor(),
            concurrency=step.concurrency,
            bound=step.buffer,
            in_order=step.in_order,
        )

    def executor(self) -> DeviceExecutor:
        """Where plain functions run, on CPU workers."""
        if self._given is not None and not self._on_accelerators:
            return self._given
        if self._own is None:
            self._own = DeviceExecutor(["cpu"] * self._workers, thread_name_prefix="aiopar-data")
        return self._own

    def tasks(self) -> Tasks:
        """Where async functions and sources run."""
        if self._tasks is None:
            self._tasks = Tasks(self._caller)
        return self._tasks

    # Reading: one reader at a time.

    async def wait(self) -> Any:
        """The next outcome or `END`, waited for."""
        while not self._leaving.left:
            # First this, then the look: who has something from now on finds it.
            waiting = awaiter_here()
            assert waiting is not None  # noqa: S101  # the stream has seen to it
            self._waiting[:] = [waiting]
            item = self.pull()
            if item is not PENDING:
                return item
            thread_hooks.about_to_block()
            await waiting
        return END

    def notify(self) -> None:
        """It is worth looking again; from any thread."""
        try:
            waiting = self._waiting.pop()  # several may come at once: one of them gets it
        except IndexError:
            return
        waiting.wake()

    # Closing.

    def close(self) -> None:
        """No stage takes another item, tasks are cancelled, threads end; returns at once.

        From any thread; more than once does no harm.
        """
        with self._lock:
            if self._leaving.left:
                return
            self._leaving.left = True
        for stage in self.stages:
            stage.close()
        if self._tasks is not None:
            self._tasks.cancel()
        if self._has_iterators():
            self._iterators_closed = self._close_iterators()
            self._iterators_closed.add_done_callback(partial(log_failure, "a source"))
        if self._own is not None:
            self._own.shutdown(wait=False)
        self.notify()

    async def aclose(self) -> None:
        """Close, and wait until nothing is left: no task, thread or open iterator.

        Raises what a generator raises when it is closed.
        """
        self.close()
        with anyio.CancelScope(shield=True):
            for stage in self.stages:
                await stage.gone
            if self._own is not None:
                await self._own.aclose()
            if self._iterators_closed is not None:
                await self._iterators_closed

    @property
    def gone(self) -> bool:
        """Whether nothing of it runs any more."""
        closed = self._iterators_closed
        return all(stage.gone.done() for stage in self.stages) and (closed is None or closed.done())

    def _has_iterators(self) -> bool:
        """Whether there may be generators that have begun."""
        return any(
            isinstance(stage, ThreadStage) and (stage.claimed > stage.first or stage.running)
            for stage in self.stages
        )

    def _close_iterators(self) -> Future[None]:
        """Have generators closed on a worker, after the step that runs."""
        try:
            return self._submit(self.executor())
        except ExecutorShutdown:  # one that was given
            executor = DeviceExecutor(["cpu"], thread_name_prefix="aiopar-data")
            closed = self._submit(executor)
            executor.shutdown(wait=False)
            return closed

    def _submit(self, executor: DeviceExecutor) -> Future[None]:
        stages = [stage for stage in self.stages if isinstance(stage, ThreadStage)]
        call = FutureCall(partial(_close_iterators, stages, self._source), (), self._caller)
        executor._dispatcher.put(call)
        return call.future


def _close_iterators(stages: Sequence[ThreadStage], source: SyncSource | None) -> None:
    for stage in reversed(stages):
        stage.close_items()
    if source is not None:
        source.close()


class _Pulled:
    """The outcomes of a stage, as an iterator; `PENDING` among them."""

    __slots__ = ("pull",)

    def __init__(self, stage: Stage) -> None:
        self.pull = stage.pull

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        item = self.pull()
        if item is END:
            raise StopIteration
        return item
