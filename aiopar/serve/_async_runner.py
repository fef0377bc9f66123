"""Where batches of a coroutine function run: a task on an event loop."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Self

from .._caller import CallerState
from .._devices import is_device_error
from .._error_handling import own_traceback, stand_in
from .._errors import ExecutorShutdown
from .._executor import DeviceExecutor
from .._server import launches_here
from .._tasks import Tasks, is_cancellation
from .._tree import tensors
from ._audience import Audience
from ._compute import Batching
from ._observer import BatchInfo, BatchWatch, watched_run
from ._part import Part, deliver_soon
from ._request import Request, streams_of
from ._schedule import LoopSchedule
from ._settings import BatcherSettings
from ._splitting import Splitting


class AsyncBatching(Batching):
    """A function's input, made on a worker, and its outputs, looked at; for tasks.

    Args:
        settings: How batches are made.
        executor: On whose workers.
    """

    def __init__(self, settings: BatcherSettings, executor: DeviceExecutor) -> None:
        super().__init__(settings)
        self.executor = executor

    async def collated(self, requests: Sequence[Request]) -> Any:
        """The function's input."""
        return await self.executor.run_sync(self._collated, requests)

    def _collated(self, requests: Sequence[Request]) -> Any:
        items = [request.item for request in requests]
        launches = launches_here()
        if launches is not None:  # after what the callers had launched
            launches.order(streams_of(requests), tensors(items))
        return self.collate(items)

    async def unbatched(self, outputs: Any, count: int) -> tuple[Any, bool]:
        """What the function came to for `count` items, as `Compute` returns it."""
        if self.unbatch is None:
            return self.checked(outputs, count)
        return await self.executor.run_sync(self.checked, outputs, count)


class AsyncRunner:
    """One place where batches of a coroutine function run.

    A batch is a task on the event loop of a caller: of one who comes, or who waits. So that loop is
    there; should it end under the batch, that is given back to be run on another. When none of its
    callers waits any more it is cancelled.

    Args:
        schedule: Gives it batches.
        fn: The function.
        batching: Makes its batches.
        caller: The state it runs under.
    """

    in_service = True
    repeats = True
    """Whether a batch that others have cancelled can be run again."""
    lost = False
    """Whether its loop was closed under its batch, and somebody has seen it: it gets no other."""
    _error: BaseException | None
    _tasks: Tasks | None = None
    """Those of its batch, if it has one."""

    def __init__(
        self,
        schedule: LoopSchedule,
        fn: Callable[[Any], Any],
        batching: AsyncBatching,
        caller: CallerState,
    ) -> None:
        self.began = 0.0
        self.batch: Sequence[Request] = ()
        self.executor = batching.executor
        self._schedule = schedule
        self._fn = fn
        self._batching = batching
        self._caller = caller
        self._running = 0
        """How many of them there are."""

    def fail(self, error: BaseException) -> None:
        """Nothing: it has no replica."""

    def cancel(self) -> None:
        """Cancel what runs."""
        if self._running:
            self._cancelled = True
            self._cancel_tasks()

    def _cancel_tasks(self) -> None:
        """All of the batch; from any thread."""
        tasks = self._tasks  # they may end just now
        if tasks is not None:
            tasks.cancel()

    def lose(self) -> bool:
        """Whether it is `lost`, which nobody had seen before."""
        tasks = self._tasks
        if self.lost or tasks is None or not tasks.finished:
            return False
        self.lost = True
        return True

    def end_lost(self) -> None:
        """End its batch, as if that had been cancelled: none of its tasks runs on."""
        self._error, self._interrupted = cancellation(None), self.repeats
        self._running = 1
        self._ended()

    def successor(self) -> Self:
        """One like it, that has run nothing."""
        return type(self)(self._schedule, self._fn, self._batching, self._caller)

    def start(self) -> None:
        """Run the next batch; called on an event loop's thread."""
        self._splitting: Splitting | None = None
        self._error = None
        self._watch: BatchWatch | None = None
        self._cancelled = self._interrupted = False
        self._audience: Audience | None = None
        self._tasks = Tasks(self._caller)
        self._running = 1
        self._tasks.spawn(self._run, self._ended)

    async def _run(self) -> None:
        assert self._tasks is not None  # noqa: S101  # this is one of them
        batch = self._schedule.take(self)
        self.began = monotonic()
        observers = self._schedule.observers
        if observers is not None and batch:
            self._watch = BatchWatch(observers, BatchInfo(batch, None, None, self.began))
        self._splitting = Splitting(batch)
        self._audience = Audience(batch, self._tasks)
        # The frames of whoever fails lead here, since CPython 3.12: as in `resume`.
        del batch, observers
        try:
            await self._run_parts(self._splitting)
        except BaseException as error:  # whatever it is, the callers get it
            cancelled = is_cancellation(error)
            self._error = cancellation(error) if cancelled else own_traceback(error)
            self._interrupted = cancelled and self.repeats and not self._cancelled
            self._cancel_tasks()  # the others
            if cancelled:
                raise

    async def _run_parts(self, splitting: Splitting) -> None:
        part: Sequence[Request] = ()
        try:
            for part in splitting:
                await self._run_part(part, splitting)
            for part in splitting.too_large:
                self._schedule.out_of_memory(part)
        finally:
            del splitting, part  # as in `_run`

    async def _run_part(self, part: list[Request], splitting: Splitting) -> None:
        try:
            outputs, unbatched = await self._compute(part)
        except Exception as error:
            if isinstance(error, ExecutorShutdown) or is_device_error(error):
                raise  # no item's fault, and nothing more can be computed
            splitting.failed(part, own_traceback(error))
        else:
            splitting.succeeded(part, outputs, unbatched=unbatched)
        finally:
            del part, splitting  # as in `_run`

    async def _compute(self, part: Sequence[Request]) -> tuple[Any, bool]:
        try:
            with watched_run(self._watch, len(part)):
                batch = await self._batching.collated(part)
                outputs = await self._fn(batch)
                return await self._batching.unbatched(outputs, len(part))
        finally:
            # Whoever keeps an error keeps this frame, which must not keep the others of the batch.
            del self, part

    def _ended(self) -> None:
        """A task of its batch has ended; on their loop's thread."""
        self._running -= 1
        if self._running:
            return
        self._tasks = None
        batch, self.batch = self.batch, ()
        splitting, self._splitting = self._splitting, None
        # The error's traceback holds frames that hold this.
        error, self._error = self._error, None
        watch, self._watch = self._watch, None
        audience, self._audience = self._audience, None
        if splitting is None or audience is None:
            self._schedule.withdrawn(self)
            return
        parts = self._outcomes(splitting)
        if audience.gone:
            # Cancelled for that: no fault of the function, and nobody to run it for once more.
            error, parts = None, [part for part in parts if part.error is None]
        audience.end()
        if error is not None:
            parts = [Part(batch, error=error)]
        if watch is not None:
            # Before anybody gets an outcome, so that who has one finds it in the metrics.
            watch.ended(parts, error)
        if error is not None and self._interrupted:
            self._schedule.interrupted(self, batch, error)
        else:
            self._schedule.released(self, batch, parts)
            deliver_soon(parts)
            self._schedule.told()

    def _outcomes(self, splitting: Splitting) -> list[Part]:
        return splitting.parts


def cancellation(error: BaseException | None) -> RuntimeError:
    """What the callers get whose batch was cancelled, by others than the batcher."""
    # As it is it would look as if they had been cancelled themselves.
    return stand_in("a task that ran the batch was cancelled from outside", error)
