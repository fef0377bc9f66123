"""How a batch runs: on a worker or on an event loop, part by part."""

import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from time import monotonic
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .._base.arguments import not_begun
from .._base.collate import check_batched
from .._base.devices import is_device_error
from .._base.thread_state import CallerState
from .._base.tracebacks import logger, own_traceback, stand_in
from .._base.tree import tensors
from ..errors import ExecutorShutdown, OutputMismatch
from ..executor._call import NO_KWARGS, AwaitedCall, Call
from ..executor._executor import DeviceExecutor, await_call
from ..executor._generators import END, Steps
from ..executor._loop_tasks import Tasks, is_cancellation
from ..executor._worker import Worker, current_worker, launches_here
from ..futures._future import running_future
from ._observer import BatchInfo, BatchObservers, BatchWatch
from ._outcomes import Part, Splitting, deliver_soon, failed_midway
from ._replica import PoolReplica, ReplicaFailed
from ._request import Audience, Request, streams_of
from ._settings import BatcherSettings, FunctionKind

_NOT_BEGUN = (CoroutineType, GeneratorType, AsyncGeneratorType)


# What `Worker.run` gets for a batch: top-level functions, arguments that can be pickled.


def compute_batch(
    fn: Callable[[Any], Any],
    collate_fn: Callable[[list[Any]], Any],
    unbatch_fn: Callable[[Any], Sequence[Any]] | None,
    items: list[Any],
) -> tuple[Any, bool]:
    """Collate `items` and call `fn`; returns what `checked` does."""
    count = len(items)
    try:
        return checked(fn(collate_fn(items)), count, unbatch_fn)
    finally:
        del items  # an error's traceback holds this frame


def iterate_batch(
    fn: Callable[[Any], Iterable[Any]], collate_fn: Callable[[list[Any]], Any], items: list[Any]
) -> Iterable[Any]:
    """Collate `items` and call a generator function."""
    try:
        return fn(collate_fn(items))
    finally:
        del items


def step_batch(
    steps: Steps[Any], count: int, unbatch_fn: Callable[[Any], Sequence[Any]] | None
) -> Any:
    """The next outputs of a generator, checked; END after the last."""
    outputs = next(steps, END)
    return END if outputs is END else checked(outputs, count, unbatch_fn)


def run_user_code(caller: CallerState, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run functions of the user's on the host of this thread's worker."""
    worker = current_worker()
    assert worker is not None  # noqa: S101  # batches run on workers
    try:
        return worker.run(fn, args, NO_KWARGS, caller)
    finally:
        del fn, args  # an error's traceback holds this frame


def checked(
    outputs: Any, count: int, unbatch_fn: Callable[[Any], Sequence[Any]] | None
) -> tuple[Any, bool]:
    """The outputs for `count` items, and whether they are a sequence of one output per item.

    Raises:
        OutputMismatch: The number of outputs is wrong.
        TypeError: The function returned a coroutine or a generator.
    """
    if isinstance(outputs, _NOT_BEGUN):
        raise not_begun(outputs)
    if unbatch_fn is None:
        check_batched(outputs, count)  # taken apart later, on the loop's thread
        return outputs, False
    unbatched = list(unbatch_fn(outputs))
    if len(unbatched) != count:
        raise OutputMismatch(
            f"unbatch_fn returned {len(unbatched)} outputs for a batch of {count} items"
        )
    return unbatched, True


class Place(Protocol):
    """Where the parts of batches run: on workers, or on event loops."""

    executor: DeviceExecutor
    """The executor on whose workers batches are collated."""
    replica: PoolReplica | None
    """The replica that runs the batches; None: a function does."""

    def begin(self, part: "PartRun") -> None:
        """Take the next part of its batch and run it, soon."""

    def cancel(self, part: "PartRun") -> None:
        """End a part if it can be ended; no caller waits for it. From any thread."""


class BatchSource(Protocol):
    """What gives batches to runners; every method may be called from any thread."""

    observers: BatchObservers | None

    def take(self, batch: "BatchRun") -> list[Request]:
        """The requests of the next batch, from now on `batch.requests`; empty if there is none."""

    def ended(self, batch: "BatchRun", result: "BatchResult") -> None:
        """A batch has ended: start the next one."""

    def delivered(self) -> None:
        """The outcomes of a batch that has ended are on their way to the callers."""

    def not_begun(self, runner: "Runner", error: BaseException | None) -> None:
        """The runner could not take a batch. None: its loop cancelled it."""


@dataclass(slots=True, eq=False)
class BatchResult:
    """How a batch has ended."""

    parts: list[Part]
    """Requests with their outputs or errors."""
    lost: Sequence[Request]
    """Requests that must run again: no item and no function was at fault."""
    error: BaseException | None
    """What ended the batch as a whole."""
    too_large: Sequence[Sequence[Request]]
    """Requests that did not fit into memory together."""
    replica_failed: bool


class Runner:
    """Runs batches in one place, one at a time.

    Args:
        source: Gives it batches.
        place: Where they run.
        streams: Whether the function yields outputs step by step.
        replica_failed: Takes the place's replica out of service.
    """

    def __init__(
        self,
        source: BatchSource,
        place: Place,
        *,
        streams: bool,
        replica_failed: Callable[[PoolReplica, BaseException], object] | None = None,
    ) -> None:
        self.place = place
        self.streams = streams
        self.batch: BatchRun | None = None
        """The batch that runs."""
        self._source = source
        self._replica_failed = replica_failed

    @property
    def in_service(self) -> bool:
        """Whether it can run a batch."""
        return self.place.replica is None or self.place.replica.in_service

    def start(self) -> None:
        """Take the next batch, soon, and run it."""
        self.batch = BatchRun(self, self._source)
        self.batch.begin_part(None)

    def is_replica_failure(self, error: BaseException) -> bool:
        """Whether `error` means that its replica cannot serve any more."""
        if isinstance(error, ReplicaFailed):
            return True
        return self.place.replica is not None and is_device_error(error)

    def fail(self, error: BaseException) -> None:
        """Take its replica, which has failed, out of service."""
        if self._replica_failed is not None and self.place.replica is not None:
            self._replica_failed(self.place.replica, error)


class BatchRun:
    """One batch while it runs.

    A batch runs as one part. If that fails it is split, and its halves run one after the other. A
    part of a stream goes on after its first output, while the next part begins. The batch has ended
    when all parts have.
    """

    def __init__(self, runner: Runner, source: BatchSource) -> None:
        self.runner = runner
        self.requests: Sequence[Request] = ()
        self.began = 0.0
        """When it was taken, by `time.monotonic`."""
        self._source = source
        self._splitting: Splitting | None = None
        self._watch: BatchWatch | None = None
        self._lock = threading.Lock()
        self._running: set[PartRun] = set()
        self._parts: list[Part] = []
        self._too_large: list[Sequence[Request]] = []
        self.failure: BaseException | None = None
        """An error of the device, say: no part goes on, and no further part begins."""
        self._failed: list[Request] = []
        """The requests of the parts that `failure` ended."""
        self._interrupted = False
        """Whether another party cancelled a task of the batch."""
        self._cancelled = False

    @property
    def taken(self) -> bool:
        """Whether it has its requests."""
        return self._splitting is not None

    @property
    def again(self) -> bool:
        """Whether a part of it has failed before."""
        return self._splitting is not None and self._splitting.again

    def begin_part(self, after: "PartRun | None") -> None:
        """Run the next part, on the worker of the part before."""
        part = PartRun(self, None if after is None else after.worker)
        with self._lock:
            self._running.add(part)
        self.runner.place.begin(part)

    def next_requests(self) -> list[Request]:
        """The requests of the next part, empty if there is none. The first call takes the batch."""
        if self._splitting is None:
            requests = self._source.take(self)
            self.began = monotonic()
            observers = self._source.observers
            if observers is not None and requests:
                worker, replica = current_worker(), self.runner.place.replica
                device = None if worker is None else worker.device
                index = None if replica is None else replica.index
                info = BatchInfo(requests, device, index, self.began)
                self._watch = BatchWatch(observers, info)
            self._splitting = Splitting(requests)
        return next(iter(self._splitting), [])

    @property
    def observed(self) -> bool:
        """Whether observers watch it."""
        return self._watch is not None

    def watched(self, count: int) -> AbstractContextManager[None]:
        """The function runs for `count` items: tell the observers."""
        return nullcontext() if self._watch is None else self._watch.run(count)

    def part_succeeded(self, part: "PartRun") -> None:
        """A part has its first output: begin the next one."""
        if self._splitting is not None:
            self._splitting.succeeded()
        part.begun = True
        self.go_on(part)

    def part_failed(self, part: "PartRun", error: Exception) -> None:
        """A part has failed before its first output: run its halves."""
        if self._splitting is not None:
            self._splitting.failed(part.requests, error)

    def go_on(self, part: "PartRun") -> None:
        """Begin the part after `part`, once."""
        splitting = self._splitting
        if splitting is None or part.went_on:
            return
        part.went_on = True
        if splitting.waiting and self.failure is None:
            self.begin_part(part)

    def stop(self, part: "PartRun", error: BaseException, *, interrupted: bool) -> None:
        """End the batch as a whole because of `error`."""
        if self.failure is None:
            self.failure, self._interrupted = error, interrupted
        self._failed += part.requests

    def part_ended(self, part: "PartRun", outcome: Part | None) -> None:
        """A part has ended; from any thread."""
        with self._lock:
            if part not in self._running:
                return  # its loop was lost
            self._running.remove(part)
            last = not self._running
            parts = [] if outcome is None else [outcome]
            if self._splitting is not None:
                parts += self._splitting.failed_parts()
            self._parts += parts
            if part.too_large:
                self._too_large.append(part.requests)
        if last:
            self._end()
        elif self.runner.streams:
            deliver_soon(parts)  # the callers need not wait for the other parts

    def cancel(self) -> None:
        """End what can be ended: no caller waits any more."""
        self._cancelled = True
        for part in tuple(self._running):
            self.runner.place.cancel(part)

    @property
    def loop_lost(self) -> bool:
        """Whether the loop was closed on which it runs."""
        return any(part.tasks is not None and part.tasks.finished for part in tuple(self._running))

    def lose(self) -> None:
        """End it: its loop was closed."""
        with self._lock:
            lost = [*self._running]
            self._running.clear()
        for part in lost:
            self.stop(part, cancellation(None), interrupted=not self.runner.streams)
        if lost:
            self._end()

    def _end(self) -> None:
        splitting, self._splitting = self._splitting, None
        # The error's traceback holds frames that hold this.
        error, self.failure = self.failure, None
        if splitting is None:
            self._source.not_begun(self.runner, error)
            return
        parts = [*self._parts, *splitting.failed_parts()]
        rest = [*self._failed, *splitting.waiting]
        replica_failed = error is not None and self.runner.is_replica_failure(error)
        lost: list[Request] = []
        if error is not None and (replica_failed or (self._interrupted and not self._cancelled)):
            lost = rest
        elif error is not None:
            parts.append(Part(rest, error=error))
        too_large = [*splitting.too_large, *self._too_large]
        if self._watch is not None:
            # Before the callers get their outcomes: by then the metrics count them.
            self._watch.ended(parts, error)
        result = BatchResult(parts, lost, error, too_large, replica_failed)
        # First, so that the worker goes on: waking a loop takes longer.
        self._source.ended(self, result)
        try:
            deliver_soon(parts)
        finally:
            self._source.delivered()


class PartRun:
    """A part of a batch while it runs: one call of the function."""

    def __init__(self, batch: BatchRun, worker: Worker | None) -> None:
        self.batch = batch
        self.requests: list[Request] = []
        self.begun = False
        """Whether it has its first output."""
        self.went_on = False
        """Whether the part after it was begun."""
        self.too_large = False
        """Whether it ran out of memory after its first output."""
        self.audience: Audience | None = None
        """Its callers, if the part is a stream or can be cancelled."""
        self.worker = worker
        """The worker of its steps."""
        self.steps: Steps[Any] | None = None
        """Its generator, on a worker."""
        self.tasks: Tasks | None = None
        """Its task, on an event loop."""
        self.started = False
        """Whether its task, which may be cancelled before, has begun."""
        self.error: BaseException | None = None
        self.interrupted = False
        """Whether another party cancelled its task."""
        self.result: Part | None = None
        """The outputs, if it is no stream."""

    def send(self, outputs: Any, *, unbatched: bool) -> None:
        """Deliver the outputs of one step."""
        if self.audience is not None:
            self.audience.send()
        deliver_soon([Part(self.requests, outputs, unbatched)])

    def end(self) -> None:
        """It has ended: with `error`, or with all outputs."""
        # The error's traceback holds frames that hold this.
        error, self.error = self.error, None
        result, self.result = self.result, None
        streams = self.batch.runner.streams
        outcome: Part | None = None
        if self.tasks is not None and self.audience is not None and self.audience.gone:
            error = None  # it was cancelled for that: the function is not at fault
        if error is None:
            outcome = result
            if streams and self.begun:
                outcome = Part(self.requests, [END] * len(self.requests), unbatched=True)
        elif streams and self.begun:
            failed_midway(error, len(self.requests))
            self.too_large = isinstance(error, torch.OutOfMemoryError)
            outcome = Part(self.requests, error=error)
        else:
            self.batch.stop(self, error, interrupted=self.interrupted)
        if self.audience is not None:
            self.audience.end()
        self.batch.go_on(self)
        self.batch.part_ended(self, outcome)


def cancellation(error: BaseException | None) -> RuntimeError:
    """What callers get if another party cancelled the task of their batch."""
    # The cancellation itself would look as if the callers had been cancelled.
    return stand_in("a task that ran the batch was cancelled from outside", error)


class BatchCall(Call[Any]):
    """One step of a part, as a call on a worker.

    Args:
        fn: The step, called with this call.
        caller: The state that it runs under.
        ended: Called with the result or the error when the result is complete on the device.
    """

    helpable = False
    internal = True

    def __init__(
        self,
        fn: "Callable[[BatchCall], Any]",
        caller: CallerState,
        ended: Callable[[Any, BaseException | None], object],
    ) -> None:
        super().__init__(fn, (self,), caller)
        self._ended = ended

    def order_streams(self, requests: Sequence[Request]) -> None:
        """Order what follows after what the callers have launched, and before what they launch."""
        launches = launches_here()
        try:
            if launches is not None:
                self.streams = tuple(streams_of(requests))
                launches.order(self.streams, tensors([request.item for request in requests]))
        finally:
            del requests  # an error's traceback holds this frame

    def finish(self) -> None:
        result, self.result = self.result, None
        error, self.error = self.error, None
        self._ended(result, error)

    def cancel(self) -> None:
        if self.claim():
            self.drop()
            self._ended(None, ExecutorShutdown("the executor was shut down"))


class WorkerPlace:
    """Runs batches on the workers of an executor, or on the worker of one replica.

    The worker takes the batch itself, as late as possible: what is urgent by then is in the batch,
    and callers that have left are not. Each step of a generator is a call of its own on that
    worker, which is free between steps.

    Args:
        fn: The function; not used with a replica.
        settings: How batches are made.
        kind: The kind of the function.
        executor: The executor.
        caller: The state that the function runs under.
        replica: The replica.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        settings: BatcherSettings,
        kind: FunctionKind,
        executor: DeviceExecutor,
        caller: CallerState,
        replica: PoolReplica | None = None,
    ) -> None:
        self.executor = executor
        self.replica = replica
        self._fn = fn
        self._settings = settings
        self._streams = kind.streams
        self._caller = caller

    def begin(self, part: PartRun) -> None:
        self._put(part, self._first_step, self._stepped)

    def cancel(self, part: PartRun) -> None:
        """Do nothing: a worker cannot be interrupted. A generator ends when its callers leave."""

    def _put(
        self,
        part: PartRun,
        fn: Callable[[PartRun, BatchCall], Any],
        ended: Callable[[PartRun, Any, BaseException | None], object],
    ) -> None:
        call = BatchCall(partial(fn, part), self._caller, partial(ended, part))
        try:
            self.executor._dispatcher.put(call, part.worker)
        except RuntimeError as error:  # shut down, or no thread can start
            ended(part, None, error)

    def _first_step(self, part: PartRun, call: BatchCall) -> Any:
        """On the worker: take a part, collate it and call the function."""
        try:
            # What observers set is there for the function, and nowhere else.
            return self._caller.context().run(self._take_and_run, part, call)
        finally:
            del self, part, call  # an error's traceback holds this frame

    def _take_and_run(self, part: PartRun, call: BatchCall) -> Any:
        batch = part.batch
        part.requests = batch.next_requests()
        if not part.requests:
            return None
        part.worker = current_worker()
        outputs: Any = None
        try:
            call.order_streams(part.requests)
            with batch.watched(len(part.requests)):
                if self._streams:
                    outputs = self._begin_generator(part)
                else:
                    outputs = self._call_function(part)
            batch.part_succeeded(part)
        except Exception as error:
            close(part.steps)
            if isinstance(error, ReplicaFailed) or is_device_error(error):
                raise  # no item is at fault, and nothing more can be computed here
            batch.part_failed(part, own_traceback(error))
            batch.go_on(part)
        except BaseException:
            close(part.steps)
            raise
        finally:
            # An error's traceback holds this frame, which must not hold other items of the batch.
            del self, part, batch, call
        return outputs

    def _call_function(self, part: PartRun) -> Any:
        items = [request.item for request in part.requests]
        settings, replica = self._settings, self.replica
        caller = self._caller
        if part.batch.observed:
            caller = caller.with_context(copy_context())
        try:
            if replica is None:
                return run_user_code(
                    caller,
                    compute_batch,
                    (self._fn, settings.collate_fn, settings.unbatch_fn, items),
                )
            inputs = run_user_code(caller, settings.collate_fn, (items,))
            # When a batch fails the replica itself is tried; once is enough for all of its parts.
            outputs = replica.run((inputs,), {}, probe=not part.batch.again)
            if settings.unbatch_fn is None:
                return checked(outputs, len(items), None)
            return run_user_code(caller, checked, (outputs, len(items), settings.unbatch_fn))
        finally:
            inputs = outputs = None
            del self, part, items

    def _begin_generator(self, part: PartRun) -> Any:
        items = [request.item for request in part.requests]
        make = partial(iterate_batch, self._fn, self._settings.collate_fn, items)
        # A copy of the context: what observers have set for this step is there in all steps.
        part.steps = Steps(make, self._caller, copy_context())
        try:
            return self._step(part)
        finally:
            del self, part, items, make

    def _step(self, part: PartRun) -> Any:
        """The outputs of the next step, checked; END after the last."""
        try:
            arguments = (part.steps, len(part.requests), self._settings.unbatch_fn)
            return run_user_code(self._caller, step_batch, arguments)
        finally:
            del self, part

    def _next_step(self, part: PartRun, call: BatchCall) -> Any:
        """On the worker: one more step of a generator."""
        try:
            call.streams = tuple(streams_of(part.requests))
            return self._step(part)
        finally:
            del self, part, call

    def _stepped(self, part: PartRun, outputs: Any, error: BaseException | None) -> None:
        """A step has ended, its outputs are complete on the device; from any thread."""
        if error is not None:
            part.error = error
            self._close(part)
        elif outputs is None:  # no request, or split
            part.end()
        elif not self._streams:
            values, unbatched = outputs
            part.result = Part(part.requests, values, unbatched)
            part.end()
        elif outputs is END:
            part.end()
        else:
            values, unbatched = outputs
            if part.audience is None:
                part.audience = Audience(part.requests)
            part.send(values, unbatched=unbatched)
            part.audience.when_due(partial(self._go_on, part))

    def _go_on(self, part: PartRun) -> None:
        """The next step of a generator is due."""
        part.error = part.batch.failure
        if part.error is not None or (part.audience is not None and part.audience.gone):
            self._close(part)
        else:
            self._put(part, self._next_step, self._stepped)

    def _close(self, part: PartRun) -> None:
        if part.steps is not None and part.steps.closable:
            self._put(part, self._close_steps, _closed)
        else:
            part.end()

    def _close_steps(self, part: PartRun, _: BatchCall) -> None:
        run_user_code(self._caller, close, (part.steps,))


def _closed(part: PartRun, _: None, error: BaseException | None) -> None:
    # If no worker takes the call the generator is closed here: its own end would leave its grad
    # mode and the like to this thread.
    close(part.steps)
    if part.error is None:
        part.error = error
    part.end()


def close(steps: Steps[Any] | None) -> None:
    """Close a generator that no caller reads; its error is logged."""
    try:
        if steps is not None:
            steps.close()
    except BaseException as error:  # noqa: BLE001  # no caller waits for it
        logger.error("a generator failed when it was closed", exc_info=error)


class LoopPlace:
    """Runs batches as tasks on the event loop of a caller; workers collate them.

    The loop is that of a caller that comes or waits, so it is there. If it ends under the batch,
    the batch runs again on another one. A task is cancelled when no caller of its part waits. Each
    async generator has one task from its first step to its end: what it holds open between steps (a
    task group, a timeout) belongs to that task.

    Args:
        fn: The coroutine function or async generator function.
        settings: How batches are made.
        kind: The kind of the function.
        executor: The executor on whose workers batches are collated.
        caller: The state that the function runs under.
    """

    replica: PoolReplica | None = None

    def __init__(
        self,
        fn: Callable[[Any], Any],
        settings: BatcherSettings,
        kind: FunctionKind,
        executor: DeviceExecutor,
        caller: CallerState,
    ) -> None:
        self.executor = executor
        self._fn = fn
        self._settings = settings
        self._streams = kind.streams
        self._caller = caller

    def begin(self, part: PartRun) -> None:
        part.tasks = Tasks(self._caller)
        part.tasks.spawn(partial(self._run, part), partial(self._ended, part))

    def _ended(self, part: PartRun) -> None:
        if not part.started and part.batch.taken:
            part.error, part.interrupted = cancellation(None), not self._streams
        part.end()

    def cancel(self, part: PartRun) -> None:
        if part.tasks is not None:
            part.tasks.cancel()

    async def _run(self, part: PartRun) -> None:
        """The body of a part's task."""
        part.started = True
        try:
            part.requests = part.batch.next_requests()
            if part.requests:
                part.audience = Audience(part.requests, partial(self.cancel, part))
                await (self._iterate(part) if self._streams else self._call_function(part))
        except BaseException as error:  # whatever it is, the callers get it
            self._failed(part, error)
            if is_cancellation(error):
                raise
        finally:
            # The frames in which an error is raised lead here, since CPython 3.12.
            del self, part

    async def _call_function(self, part: PartRun) -> None:
        try:
            with part.batch.watched(len(part.requests)):
                outputs = await self._fn(await self._collated(part.requests))
                part.result = Part(part.requests, *await self._checked(outputs, len(part.requests)))
            part.batch.part_succeeded(part)
        finally:
            outputs = None
            del self, part

    async def _iterate(self, part: PartRun) -> None:
        """Read an async generator to its end, as fast as the callers read."""
        batch, tasks, audience = part.batch, part.tasks, part.audience
        assert tasks is not None and audience is not None  # noqa: S101, PT018  # `_run` made them
        iterator: Any = None
        caller: CallerState | None = None
        outputs: Any = None
        try:
            with batch.watched(len(part.requests)):
                iterator = self._fn(await self._collated(part.requests))
                caller = _GeneratorState() if batch.observed else None
                outputs = await self._step(iterator, len(part.requests), caller)
            batch.part_succeeded(part)
            while outputs is not END:
                part.send(outputs[0], unbatched=outputs[1])
                outputs = None
                due = running_future()
                audience.when_due(partial(due.set_result, None))
                await due
                part.error = batch.failure
                if part.error is not None or audience.gone:
                    return
                outputs = await self._step(iterator, len(part.requests), caller)
        finally:
            if caller is None:
                await tasks.close(iterator, "an async generator")
            else:
                await caller.drive(tasks.close, iterator, "an async generator")
            del self, part, batch, iterator, outputs, audience

    def _failed(self, part: PartRun, error: BaseException) -> None:
        cancelled = is_cancellation(error)
        if cancelled:
            part.error = cancellation(error)
            part.interrupted = not self._streams  # callers of a stream may have had outputs
        elif (
            part.begun
            or not isinstance(error, Exception)
            or isinstance(error, ExecutorShutdown)
            or is_device_error(error)
        ):
            part.error = own_traceback(error)
        else:
            part.batch.part_failed(part, own_traceback(error))

    async def _step(self, iterator: Any, count: int, caller: CallerState | None) -> Any:
        """The outputs of the next step, checked; END after the last."""
        if caller is None:
            outputs = await anext(iterator, END)
        else:
            outputs = await caller.drive(_advance, iterator)
        return END if outputs is END else await self._checked(outputs, count)

    def _collated(self, requests: Sequence[Request]) -> Coroutine[Any, Any, Any]:
        """The function's input, made on a worker."""
        call = AwaitedCall(self._settings.collate_fn, ([request.item for request in requests],))
        dispatcher = self.executor._dispatcher
        dispatcher.prepare(call)
        # After what the callers have launched.
        call.streams = (*call.state.streams, *streams_of(requests))
        return await_call(call, dispatcher.pool, dispatcher.default_workers, False)

    async def _checked(self, outputs: Any, count: int) -> tuple[Any, bool]:
        unbatch_fn = self._settings.unbatch_fn
        if unbatch_fn is None:
            return checked(outputs, count, None)
        return await self.executor.run_sync(checked, outputs, count, unbatch_fn)


async def _advance(iterator: Any) -> Any:
    return await anext(iterator, END)


class _GeneratorState(CallerState):
    """A state whose context variables one generator changes from step to step.

    It is captured while observers have set theirs for the first step: the later steps see them.
    """

    __slots__ = ("_own",)

    def __init__(self) -> None:
        super().__init__()
        self._own = super().context()

    def context(self) -> Context:
        return self._own


if TYPE_CHECKING:
    _places: tuple[type[Place], type[Place]] = (WorkerPlace, LoopPlace)
