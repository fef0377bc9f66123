"""The places where batches run: workers, and the event loops of callers."""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from .._base.arguments import NOT_BEGUN, not_begun
from .._base.collate import check_batched
from .._base.devices import is_device_error
from .._base.thread_state import CallerState
from .._base.tracebacks import logger, own_traceback, stand_in
from .._base.tree import tensors
from ..errors import ExecutorShutdown, OutputMismatch, WorkerLost
from ..executor._call import NO_KWARGS, AwaitedCall, Call
from ..executor._executor import await_call
from ..executor._generators import END, Steps
from ..executor._loop_tasks import Tasks, cancel_requested, is_cancellation
from ..executor._worker import check_capability, current_worker, launches_here
from ..futures._future import running_future
from ._outcomes import Part
from ._replica import ModuleCall, OutsideModule, ReplicaFailed
from ._request import Audience, Request, streams_of
from ._runner import PartRun, Place, cancellation

# The functions that `Worker.run` runs for a batch: a worker's host may be another process, so they
# are top-level functions, and their arguments can be pickled.


def compute_batch(
    fn: Callable[[Any], Any],
    collate_fn: Callable[[list[Any]], Any],
    unbatch_fn: Callable[[Any], Sequence[Any]] | None,
    items: list[Any],
) -> tuple[Any, bool]:
    """Collate `items`, call `fn`, and return the result of `checked`."""
    count = len(items)
    try:
        return checked(fn(collate_fn(items)), count, unbatch_fn)
    finally:
        del items  # an error's traceback holds this frame


def compute_on_replica(
    call: ModuleCall,
    collate_fn: Callable[[list[Any]], Any],
    unbatch_fn: Callable[[Any], Sequence[Any]] | None,
    items: list[Any],
) -> tuple[Any, bool]:
    """As `compute_batch`; an error that is not the module's is raised as `OutsideModule`."""
    batch = outputs = None
    try:
        try:
            batch = collate_fn(items)
        except (Exception, SystemExit) as error:
            raise OutsideModule from error
        outputs = call(batch)
        try:
            return checked(outputs, len(items), unbatch_fn)
        except (Exception, SystemExit) as error:
            raise OutsideModule from error
    finally:
        del items, batch, outputs  # an error's traceback holds this frame


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
    """Run user code on the host of this thread's worker."""
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
    if type(outputs) in NOT_BEGUN:
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
        """Order the step after the work that the callers have launched, and their work after it."""
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


class WorkerPlace(Place):
    """Runs batches on the workers of an executor, or on the worker of one replica.

    The worker takes the batch itself, as late as possible: urgent requests that came meanwhile are
    in the batch, and callers that have left are not. Each step of a generator is a call of its own
    on that worker, which is free between steps.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        dispatcher = self.executor._dispatcher
        if self.streams:
            check_capability(
                dispatcher.workers,
                "iterate",
                "a Batcher of a generator function",
                "use a DeviceExecutor",
            )
        if self.replica is None:
            self._fn = dispatcher.keep(self._fn)
        self._shares_memory = dispatcher.shares_memory

    def begin(self, part: PartRun) -> None:
        self._put(part, self._first_step, self._stepped)

    def cancel(self, part: PartRun) -> None:
        """Let the callers leave. No worker can be interrupted; a generator ends when they leave."""
        if part.audience is not None and not self.streams:
            for request in part.requests:
                part.audience.leave(request)

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
            gone = self.replica is not None and not self.replica.in_service
            ended(part, None, ReplicaFailed("its worker was removed", None) if gone else error)

    def _first_step(self, part: PartRun, call: BatchCall) -> Any:
        """On the worker: take a part, collate it and call the function."""
        try:
            # In a copy of the context: only the function sees the variables that observers set.
            return self._caller.context().run(self._take_and_run, part, call)
        finally:
            del self, part, call  # an error's traceback holds this frame

    def _take_and_run(self, part: PartRun, call: BatchCall) -> Any:
        batch = part.batch
        part.requests = batch.next_requests()
        if not part.requests:
            return None
        worker = part.worker = current_worker()
        outputs: Any = None
        if not self._shares_memory:
            part.audience = Audience(part.requests, call.leave)
        try:
            call.order_streams(part.requests)
            with batch.watched(len(part.requests)):
                run = self._begin_generator if self.streams else self._call_function
                outputs = run(part)
            batch.part_succeeded(part)
        except (Exception, SystemExit) as error:
            close(part.steps)
            failed_here = isinstance(error, ReplicaFailed | WorkerLost) or is_device_error(error)
            if failed_here or (worker is not None and not worker.ready):
                raise  # no item is at fault, and nothing more can run here
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
        arguments: tuple[Any, ...] = (self._collate_fn, self._unbatch_fn, items)
        caller = self._caller
        if part.batch.observed:
            caller = caller.with_context(copy_context())
        try:
            if self.replica is None:
                return run_user_code(caller, compute_batch, (self._fn, *arguments))
            return self.replica.run_batch(caller, compute_on_replica, arguments)
        finally:
            del self, part, items, arguments

    def _begin_generator(self, part: PartRun) -> Any:
        items = [request.item for request in part.requests]
        make = partial(iterate_batch, self._fn, self._collate_fn, items)
        # A copy of the context: all steps see the variables that observers have set for this one.
        part.steps = Steps(make, self._caller, copy_context())
        try:
            return self._step(part)
        finally:
            del self, part, items, make

    def _step(self, part: PartRun) -> Any:
        """The outputs of the next step, checked; END after the last."""
        try:
            arguments = (part.steps, len(part.requests), self._unbatch_fn)
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
        """Handle the end of a step, whose outputs are complete on the device; from any thread."""
        if error is not None:
            part.error = error
            self._close(part)
        elif outputs is None:  # no request, or split
            part.end()
        elif not self.streams:
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
        """Run the next step of a generator."""
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
    # If no worker took the call, the generator is closed here: if it were only collected, this
    # thread would keep its grad mode.
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


class LoopPlace(Place):
    """Runs batches as tasks on the event loop of a caller; workers collate them.

    A caller has just come to the loop or waits there, so the loop runs. If it ends under the batch,
    the batch runs again on another loop. The task of a part is cancelled when no caller waits for
    the part. An async generator has one task from its first step to its end, because a task group
    or timeout that it holds open between steps belongs to that task.
    """

    def begin(self, part: PartRun) -> None:
        part.tasks = Tasks(self._caller)
        part.tasks.spawn(partial(self._run, part), partial(self._ended, part))

    def _ended(self, part: PartRun) -> None:
        if not part.started and part.batch.taken:
            part.error, part.interrupted = cancellation(None), not self.streams
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
                await (self._iterate(part) if self.streams else self._call_function(part))
        except BaseException as error:  # the callers get every error
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
        if cancelled and not cancel_requested():
            # The function awaited a cancelled task, perhaps for one item only.
            error, cancelled = stand_in("the function raised a cancellation", error), False
        if cancelled:
            part.error = cancellation(error)
            part.interrupted = not self.streams  # callers of a stream may have had outputs
        elif (
            part.begun
            or not isinstance(error, Exception | SystemExit)
            or isinstance(error, ExecutorShutdown | WorkerLost)
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
        call = AwaitedCall(self._collate_fn, ([request.item for request in requests],))
        dispatcher = self.executor._dispatcher
        dispatcher.prepare(call)
        # After the work that the callers have launched.
        call.streams = (*call.state.streams, *streams_of(requests))
        return await_call(call, dispatcher.pool, dispatcher.default_workers, False)

    async def _checked(self, outputs: Any, count: int) -> tuple[Any, bool]:
        if self._unbatch_fn is None:
            return checked(outputs, count, None)
        return await self.executor.run_sync(checked, outputs, count, self._unbatch_fn)


async def _advance(iterator: Any) -> Any:
    return await anext(iterator, END)


class _GeneratorState(CallerState):
    """A state whose context variables one generator changes from step to step.

    It is captured while the variables of the observers are set: every step sees them.
    """

    __slots__ = ("_own",)

    def __init__(self) -> None:
        super().__init__()
        self._own = super().context()

    def context(self) -> Context:
        return self._own
