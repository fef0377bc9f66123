"""Where batches of a coroutine function run: a task on an event loop."""

import contextvars
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic, perf_counter
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Protocol, Self, TypeAlias

from .._base.arguments import not_begun, unwrapped
from .._base.collate import check_batched, collate, pad_collate
from .._base.devices import is_device_error
from .._base.thread_state import CallerState
from .._base.tracebacks import logger, own_traceback, stand_in
from .._base.tree import tensors
from ..errors import ExecutorShutdown, OutputMismatch, ReplicaFailed
from ..executor._call import TokenCall
from ..executor._executor import DeviceExecutor
from ..executor._generators import END, Steps
from ..executor._loop_tasks import Tasks, is_cancellation
from ..executor._worker import Worker, current_worker
from ..executor._worker_thread import launches_here
from ._observer import BatchInfo, BatchObservers, BatchWatch, watched_run
from ._outcomes import Part, Splitting, deliver_soon
from ._replica import PoolReplica
from ._request import Audience, Request, streams_of
from ._settings import BatcherSettings


class Runner(Protocol):
    """Where batches run, one at a time."""

    began: float
    """When its last batch began, by `time.monotonic`."""
    batch: Sequence[Request]
    """What it has taken and not ended."""
    executor: DeviceExecutor
    """On whose workers it makes batches, and mostly runs them."""

    @property
    def in_service(self) -> bool:
        """Whether it can run a batch."""

    def start(self) -> None:
        """Take the next batch, soon, and run it; from any thread that runners or callers are in."""

    def fail(self, error: BaseException) -> None:
        """Its replica has failed: take it out of service."""

    def cancel(self) -> None:
        """Nobody waits for what it runs: end that where it can be ended; from any thread."""


class Schedule(Protocol):
    """Who gives them batches; each method may be called from any thread."""

    observers: BatchObservers | None
    """Who watches the batches that are taken from now on."""

    def take(self, runner: Runner) -> list[Request]:
        """The next batch, which is the runner's `batch` from now on; empty if there is none."""

    def out_of_memory(self, requests: Sequence[Request]) -> None:
        """A batch of these did not fit."""

    def ended(self, runner: Runner, batch: Sequence[Request], parts: Sequence[Part]) -> bool:
        """The runner has run a batch; whether there is another for it now.

        If not, it calls `told` when what the batch has come to is on its way to the callers.
        """

    def told(self) -> None:
        """So it is: who closes the batcher is not told before them that all has ended."""

    def lost(self, runner: Runner, batch: Sequence[Request], error: BaseException) -> None:
        """The runner's replica has failed under a batch, which is given back."""

    def refused(self, runner: Runner, error: BaseException) -> None:
        """The executor takes no more calls, or has no thread for them."""


class LoopSchedule(Schedule, Protocol):
    """Who gives batches to runners that do not go on by themselves, on event loops."""

    def released(self, runner: Runner, batch: Sequence[Request], parts: Sequence[Part]) -> None:
        """As `ended`; the runner then calls `told`."""

    def interrupted(self, runner: Runner, batch: Sequence[Request], error: BaseException) -> None:
        """The runner was cancelled, by others, under a batch, which is given back."""

    def withdrawn(self, runner: Runner) -> None:
        """The runner was cancelled before it took a batch."""


class Compute(Protocol):
    """Runs the items of a batch; both steps raise what the user's functions raise."""

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """From items, those of a batch or of a part of one, to what the function is called with."""

    @property
    def builtin_collate(self) -> bool:
        """Whether that is aiopar's own work, and no function of the user's."""

    def __call__(self, batch: Any, count: int, *, again: bool) -> tuple[Any, bool]:
        """The outputs, and whether those are a sequence of one for each item already.

        Args:
            batch: Made by `collate`.
            count: Of how many items.
            again: Whether another part of the batch that was taken has failed before.
        """


class Batching:
    """A function's input, made of items, and its outputs, looked at."""

    def __init__(self, settings: BatcherSettings) -> None:
        self.collate = settings.collate_fn
        collate_fn = unwrapped(settings.collate_fn)
        self.builtin_collate = any(collate_fn is own for own in _OWN)
        self.unbatch = settings.unbatch_fn

    def checked(self, outputs: Any, count: int) -> tuple[Any, bool]:
        """What a function returned for `count` items, as `Compute` returns it."""
        if isinstance(outputs, _NOT_BEGUN):
            raise not_begun(outputs)
        if self.unbatch is None:
            # Here it is only looked at: it is taken apart on the loop's thread.
            check_batched(outputs, count)
            return outputs, False
        unbatched = list(self.unbatch(outputs))
        if len(unbatched) != count:
            raise OutputMismatch(
                f"unbatch_fn returned {len(unbatched)} outputs for a batch of {count} items"
            )
        return unbatched, True


_OWN = (collate, pad_collate, list)
_NOT_BEGUN = (CoroutineType, GeneratorType, AsyncGeneratorType)


class ComputeFunction(Batching):
    """Batches through a plain function."""

    def __init__(self, fn: Callable[[Any], Any], settings: BatcherSettings) -> None:
        super().__init__(settings)
        self._fn = fn

    def __call__(self, batch: Any, count: int, *, again: bool) -> tuple[Any, bool]:
        return self.checked(self._call(batch, again=again), count)

    def _call(self, batch: Any, *, again: bool) -> Any:
        return self._fn(batch)


class ComputeReplica(ComputeFunction):
    """Batches through one replica of a `ReplicaPool`."""

    def __init__(self, replica: PoolReplica, settings: BatcherSettings) -> None:
        super().__init__(replica.forward, settings)
        self._replica = replica

    def _call(self, batch: Any, *, again: bool) -> Any:
        # When a batch fails the replica itself is tried; once is enough for all of its parts.
        return self._replica.run((batch,), {}, probe=not again)


class ComputeGenerator(Batching):
    """Batches through a generator function: the first step of each, and then the others.

    Args:
        fn: The function.
        settings: How its batches are made.
        caller: Whose torch state its generators begin with.
    """

    def __init__(
        self, fn: Callable[[Any], Iterable[Any]], settings: BatcherSettings, caller: CallerState
    ) -> None:
        super().__init__(settings)
        self._fn = fn
        self._caller = caller
        self.begun: Steps[Any] | None = None
        """The generator of the latest call, if that is suspended after its first step."""

    def __call__(self, batch: Any, count: int, *, again: bool) -> tuple[Any, bool]:
        self.begun = None
        # This run's context, which is the caller's and what observers have set in it: a copy, for
        # they undo it after the first step, and the others are to be made in it as well.
        context = contextvars.copy_context()
        steps = Steps(partial(self._fn, batch), self._caller, context)
        try:
            outputs = self.step(steps, count)
        except BaseException:
            close(steps)
            raise
        if not steps.ended:
            self.begun = steps
        return outputs

    def step(self, steps: Steps[Any], count: int) -> tuple[Any, bool]:
        """The next outputs for `count` items; after the last, `END` for each."""
        outputs = next(steps, END)
        return ([END] * count, True) if outputs is END else self.checked(outputs, count)


def close(steps: Steps[Any]) -> None:
    """Close a generator of which nobody reads."""
    try:
        steps.close()
    except BaseException as error:  # noqa: BLE001  # nobody waits for it
        logger.error("a generator failed when it was closed", exc_info=error)


_BRIEF = 0.001
"""Seconds that a batch may take to make, for the outcomes of the one before to wait for it."""


class WorkerRunner:
    """One place where batches run: a function on any worker, or one replica on its own.

    The worker itself takes a batch when it comes to it, as late as can be: what is urgent by then
    is in it, and who has gone is not. When it has run, the next is asked for at once; the event
    loop has no part in it.

    Args:
        schedule: Gives it batches.
        executor: On whose workers, or worker, it runs.
        compute: Runs the items of a batch.
        caller: The state it runs them under.
        replica: The one it is for, if any.
        replica_failed: Takes that one out of service.
    """

    def __init__(
        self,
        schedule: Schedule,
        executor: DeviceExecutor,
        compute: Compute,
        caller: CallerState,
        replica: PoolReplica | None = None,
        replica_failed: Callable[[PoolReplica, BaseException], object] | None = None,
    ) -> None:
        self.replica = replica
        self._replica_failed = replica_failed
        self.began = 0.0
        """When its last batch began, by `time.monotonic`."""
        self._schedule = schedule
        self.executor = executor
        self._dispatcher = executor._dispatcher
        self._compute = compute
        self._caller = caller
        self.batch: Sequence[Request] = ()
        """What it has taken and not ended."""
        self._watch: BatchWatch | None = None
        self._held: list[Part] = []
        """What the batch before has come to, and nobody has been told yet."""
        self._brief = False
        """Whether the next batch is made so soon that this can wait for it."""
        self._took = False
        """Whether its run came so far as to take a batch."""

    @property
    def in_service(self) -> bool:
        """Whether it can run a batch."""
        return self.replica is None or self.replica.in_service

    def fail(self, error: BaseException) -> None:
        """Its replica has failed: take it out of service."""
        if self._replica_failed is not None and self.replica is not None:
            self._replica_failed(self.replica, error)

    def cancel(self) -> None:
        """Nothing: what runs on a worker cannot be interrupted."""

    def start(self) -> None:
        """Run the next batch, on a worker that is free."""
        self._took = False
        self.put(self.run, self.ended, self.refused)

    def put(
        self, fn: "Work", ended: "Ended", refused: "Refused", worker: Worker | None = None
    ) -> None:
        """Have a `Run` made of these on a worker, on that one if it is given."""
        self._put(Run(fn, self._caller, ended, refused), worker)

    def _put(self, run: "Run", worker: Worker | None) -> None:
        try:
            self._dispatcher.put(run, worker)
        except RuntimeError as error:  # shut down, or there can be no more threads for now
            run.refused(error)

    def refused(self, error: RuntimeError) -> None:
        """The executor was shut down before the run began, or has no thread for it."""
        self._schedule.refused(self, error)

    def run(self, call: "Run") -> list[Part]:
        """On the worker: take a batch, and compute it."""
        self._took = True  # first: what fails from here on is no other batch's
        batch = self._schedule.take(self)
        self.began = monotonic()
        if not batch:
            return []
        splitting = Splitting(batch)
        part: Sequence[Request] = ()
        try:
            call.take_streams(batch)
            observers = self._schedule.observers
            if observers is not None:
                self._deliver_held()  # they may take long
                self._watch = self._observed(observers, batch)
            for part in splitting:
                self._run_part(part, splitting)
            for part in splitting.too_large:
                self._schedule.out_of_memory(part)
            return splitting.parts
        finally:
            # Whoever keeps an error keeps the frames in which it was raised, and those below them:
            # there must be nothing there of the others in the batch.
            del batch, splitting, part

    def _observed(self, observers: BatchObservers, batch: list[Request]) -> BatchWatch:
        worker = current_worker()
        device = None if worker is None else worker.device
        replica = None if self.replica is None else self.replica.index
        return BatchWatch(observers, BatchInfo(batch, device, replica, self.began))

    def _run_part(self, part: list[Request], splitting: Splitting) -> None:
        try:
            with watched_run(self._watch, len(part)):
                outputs, unbatched = self._compute(
                    self._collated([request.item for request in part]),
                    len(part),
                    again=splitting.again,
                )
        except Exception as error:
            if isinstance(error, ReplicaFailed) or is_device_error(error):
                raise  # no item's fault, and nothing more can be computed here
            splitting.failed(part, own_traceback(error))
        else:
            splitting.succeeded(part, outputs, unbatched=unbatched)
        finally:
            del part, splitting

    def _collated(self, items: list[Any]) -> Any:
        began = perf_counter()
        try:
            return self._compute.collate(items)
        finally:
            self._brief = self._compute.builtin_collate and perf_counter() - began < _BRIEF
            self._deliver_held()
            del items

    def ended(self, parts: list[Part] | None, error: BaseException | None) -> None:
        """What was computed is complete on the device; from any thread."""
        self._deliver_held()  # by no means is it kept for longer than one batch
        if error is not None and not self._took:
            # The device's, say, before it began. It is that of the batch which was to come: left in
            # the queue, that would have the next run fail likewise, and so on without an end.
            self._schedule.take(self)
        batch, self.batch = self.batch, ()
        watch, self._watch = self._watch, None
        lost: BaseException | None = None
        if error is not None:
            if isinstance(error, ReplicaFailed) or (self.replica and is_device_error(error)):
                lost = error
            else:
                # A kernel's, which came late, or one that only ends threads: everybody's.
                parts = [Part(batch, error=error)]
        if watch is not None:
            # Before anybody gets an outcome, so that who has one finds it in the metrics.
            watch.ended(parts or [], error)
        if lost is not None:
            self._schedule.lost(self, batch, lost)
            return
        # First of all, so that a worker goes on: to wake the loop takes longer.
        if self._schedule.ended(self, batch, parts or []):
            self._go_on(parts or [])
            return
        try:
            deliver_soon(parts or [])
        finally:
            self._schedule.told()

    def _go_on(self, parts: list[Part]) -> None:
        """Run the next batch, which is to deliver what this one has come to.

        A loop that is woken now takes the interpreter from this worker, and keeps it until all of
        the batch, and all that its callers ask next, is seen to: about as long as it takes to make
        the next batch, for which the interpreter is needed. So that comes first, and the loop has
        its turn while the function computes, which needs it less.

        Not where code of the user's makes the batch, which might take long, or wait for what is to
        be delivered; nor where it took long the last time: the items are large then.
        """
        run = Run(self.run, self._caller, self.ended, self.refused)
        self._took = False
        # Both before: if an observer blocks this thread, another may have run the batch by then.
        held = self._brief
        if held:
            self._held = parts
        follows = self._dispatcher.follow(run)
        if follows and held:
            return
        if not follows:
            self._held = []
        try:
            # Before another worker may run the next, which may be the last of all.
            deliver_soon(parts)
        finally:
            if not follows:
                self._put(run, None)

    def _deliver_held(self) -> None:
        held, self._held = self._held, []
        if held:
            deliver_soon(held)


class Run(TokenCall[list[Part]]):
    """Work of a runner, as a call on a worker.

    Args:
        fn: The work, called with this run.
        caller: The state it is done under.
        ended: Called with what came of it, or with None and its error, when that is complete on
            the device.
        refused: Called instead when the executor was shut down before it began.
    """

    helpable = False

    def __init__(self, fn: "Work", caller: CallerState, ended: "Ended", refused: "Refused") -> None:
        super().__init__(fn, (self,), caller)
        self._ended = ended
        self.refused = refused

    def take_streams(self, batch: Sequence[Request]) -> None:
        """Order what follows after what the callers had launched, and before what they launch."""
        launches = launches_here()
        try:
            if launches is not None:
                self.streams = tuple(streams_of(batch))
                launches.order(self.streams, tensors([request.item for request in batch]))
        finally:
            del batch  # as in `WorkerRunner.run`

    def finish(self) -> None:
        parts, self.result = self.result, None
        error, self.error = self.error, None
        self._ended(parts, error)

    def cancel(self) -> None:
        if self.claim():
            self.drop()
            self.refused(ExecutorShutdown("the executor was shut down"))


Work: TypeAlias = Callable[[Run], list[Part]]
Ended: TypeAlias = Callable[[list[Part] | None, BaseException | None], object]
Refused: TypeAlias = Callable[[RuntimeError], object]


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
