"""A running stream: its stages, built from the declared steps, and how they are closed.

A `Flow` does not refer to the `Stream` that reads it: a stream may be collected while workers run.
"""

from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from .._base.arguments import is_async
from .._base.devices import is_accelerator
from .._base.thread_state import CallerState
from .._base.tracebacks import log_failure
from ..errors import ExecutorShutdown
from ..executor._call import FutureCall
from ..executor._executor import DeviceExecutor
from ..executor._generators import END, Steps
from ..executor._loop_tasks import Tasks
from ..futures._future import Future, thread_hooks
from ..futures._waiting import cancel_scope
from ..futures._wakeup import Awaiter, awaiter_here
from ._inline_steps import CONTAINERS, InlineStep, stepped, until_stopped
from ._outcome import PENDING, StopFlag
from ._stages import AsyncSource, MapStep, Stage, TaskStage, WorkerStage

Step: TypeAlias = MapStep | InlineStep


class Flow:
    """The stages of one stream, from the first read to the end.

    Args:
        source: A sync or an async iterable.
        steps: The declared steps.
        caller: The state under which everything runs.
        executor: The workers of plain functions. None: CPU threads of the stream's own, as many as
            all stages use at once.

    Raises:
        RuntimeError: No event loop runs here.
    """

    def __init__(
        self,
        source: Iterable[Any] | AsyncIterable[Any],
        steps: Sequence[Step],
        caller: CallerState,
        executor: DeviceExecutor | None,
    ) -> None:
        self._caller = caller
        each = executor is not None and _calls_each(executor)
        self._each = executor if each else None  # gets a call for each item
        self._given = None if each else executor  # runs pumps
        self._own: DeviceExecutor | None = None
        self._workers = 1 + sum(step.concurrency for step in steps if isinstance(step, MapStep))
        self._tasks = Tasks(caller)
        self._stop = StopFlag()
        # Taken by the first `close`. No lock: a destructor may call `close` at any line.
        self._open = [None]
        self._waiting: list[Awaiter] = []
        self._source: Steps[Any] | None = None
        self._source_closed: Future[None] | None = None
        self.stages: list[Stage] = []
        self._build(source, steps)

    # Building. `_items` yields the items of the last step so far. `_blocks`: `next` may block.

    def _build(self, source: Iterable[Any] | AsyncIterable[Any], steps: Sequence[Step]) -> None:
        self._items: Iterator[Any]
        self._blocks = False
        if isinstance(source, AsyncIterable):
            bounds = (step.buffer for step in steps if isinstance(step, MapStep))
            self._add(AsyncSource(source, self._tasks, bound=next(bounds, 2)))
        elif type(source) in CONTAINERS:
            self._items = iter(source)
        else:
            self._source = Steps(lambda: source, self._caller)
            self._items, self._blocks = stepped(self._source, "source"), True
        for step in steps:
            if isinstance(step, InlineStep):
                # Checked here, because the step may read many items before it yields one.
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
            if not self._tasks.loop_runs:
                self._check_loop()
            # Before `pull`: an outcome that comes after `pull` finds the waiter.
            waiter = awaiter_here()
            assert waiter is not None  # noqa: S101  # the stream has checked that a loop runs
            self._waiting[:] = [waiter]
            item = self.pull()
            if item is not PENDING:
                return item
            thread_hooks.about_to_block()
            await waiter
        return END

    def _check_loop(self) -> None:
        if len(self._ending) < len(self.stages):
            raise RuntimeError(
                "the event loop on which this stream began does not run any more, and its async "
                "functions or source ran there: read each stream on one loop"
            )

    def notify(self) -> None:
        """Wake the reader; from any thread."""
        try:
            waiter = self._waiting.pop()
        except IndexError:
            return
        waiter.wake()

    # Closing.

    def close(self) -> None:
        """Claim no more items, cancel tasks and end threads, without waiting.

        May be called from any thread, any number of times.
        """
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
        """Close, and wait until no task, thread or open generator is left.

        Tasks of an event loop that does not run any more are not waited for. Raises the error of a
        generator that fails when it is closed.
        """
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
        closed = self._source_closed
        return all(stage.gone.done() for stage in self._ending) and (
            closed is None or closed.done()
        )

    @property
    def _ending(self) -> list[Stage]:
        """The stages that end when the flow is closed: the tasks of a closed loop do not."""
        runs = self._tasks.loop_runs
        return [stage for stage in self.stages if runs or isinstance(stage, WorkerStage)]

    def _close_items(self) -> Future[None]:
        """Close the generators on a worker; this waits there for running steps."""
        try:
            return self._submit_close()
        except ExecutorShutdown:  # the given executor was shut down
            self._given = None
            return self._submit_close()

    def _submit_close(self) -> Future[None]:
        stages = [stage for stage in self.stages if isinstance(stage, WorkerStage)]
        call = FutureCall(_close, (stages, self._source), self._caller)
        self._executor()._dispatcher.put(call)
        return call.future


def _calls_each(executor: DeviceExecutor) -> bool:
    """Whether each item must be a call of its own."""
    # A worker in another process or machine can run only the user's function, not a pump. On an
    # accelerator, only the result of a call is complete, and ordered after the caller's launches.
    elsewhere = not executor._dispatcher.shares_memory
    return elsewhere or any(map(is_accelerator, executor.devices))


def _close(stages: Sequence[WorkerStage], source: Steps[Any] | None) -> None:
    for stage in reversed(stages):
        stage.close_items()
    if source is not None:
        source.close()
