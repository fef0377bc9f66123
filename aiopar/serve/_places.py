"""Where the parts of batches run: on workers, and on the event loops of callers."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Self

from .._base.arguments import NOT_BEGUN, not_begun
from .._base.collate import check_batched
from .._base.inputs import call_function, note_batch
from .._base.thread_state import CallerState
from .._base.tracebacks import logger, own_traceback, stand_in
from .._base.tree import tensors
from ..errors import ExecutorShutdown, OutputMismatch
from ..executor._call import NO_KWARGS, AwaitedCall, Call
from ..executor._executor import await_call
from ..executor._generators import END, Steps
from ..executor._loop_tasks import Tasks, is_cancellation
from ..executor._worker import Worker, current_worker
from ..futures._future import running_future
from ._replica import ModuleCall, OutsideModule, ReplicaFailed
from ._request import Audience, PartOutcome, streams_of
from ._runner import BatchPart, BatchRun, Fault, fault_of

# The functions that `Worker.run` runs for a batch. They are top-level functions with arguments that
# can be pickled, because the host of a worker may be another process.


def compute_batch(
    fn: Callable[[Any], Any],
    collate_fn: Callable[[list[Any]], Any],
    unbatch_fn: Callable[[Any], Sequence[Any]] | None,
    items: list[Any],
) -> tuple[Any, bool]:
    """Collate `items`, call `fn`, and return the result of `checked`."""
    count = len(items)
    try:
        return checked(call_function(fn, collate_fn(items)), count, unbatch_fn)
    finally:
        del items  # an error's traceback holds this frame


def compute_on_replica(
    call: ModuleCall,
    collate_fn: Callable[[list[Any]], Any],
    unbatch_fn: Callable[[Any], Sequence[Any]] | None,
    items: list[Any],
) -> tuple[Any, bool]:
    """As `compute_batch`; an error that the module did not raise becomes `OutsideModule`."""
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
        return call_function(fn, collate_fn(items))
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
    except asyncio.CancelledError as error:  # of a loop of its own: nobody cancels a worker
        raise stand_in("the function raised a cancellation", error) from error
    finally:
        del fn, args  # an error's traceback holds this frame


def checked(
    outputs: Any, count: int, unbatch_fn: Callable[[Any], Sequence[Any]] | None
) -> tuple[Any, bool]:
    """The outputs for `count` items, and whether they are a sequence of one output per item.

    Raises OutputMismatch for a wrong number, TypeError for a coroutine or a generator.
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
    """One step of a part, as a call on a worker, which calls `step` with this call.

    `ended` is called with the result or the error when the result is complete on the device.
    """

    helpable = False
    internal = True

    def __init__(
        self,
        part: BatchPart,
        step: "Callable[[BatchCall], Any]",
        ended: Callable[[Any, BaseException | None], object],
    ) -> None:
        super().__init__(step, (self,), part.runner.caller)
        self._ended = ended

    def finish(self) -> None:
        result, self.result = self.result, None
        error, self.error = self.error, None
        self._ended(result, error)

    def cancel(self) -> None:
        if self.claim():
            self.drop()
            self._ended(None, ExecutorShutdown("the executor was shut down"))


class WorkerPart(BatchPart):
    """A part that runs on a worker of an executor, or on the worker of a replica.

    The worker takes the requests itself, as late as possible. So the batch has urgent requests that
    came meanwhile, and no requests of callers that have left. Each step of a generator is a call of
    its own on that worker, which is free between steps.
    """

    def __init__(self, batch: BatchRun, after: Self | None) -> None:
        super().__init__(batch, after)
        self._worker: Worker | None = None if after is None else after._worker
        """The worker that runs the steps of the part."""
        self._steps: Steps[Any] | None = None
        """The generator of a stream."""

    def begin(self) -> None:
        self._put(self._first_step, self._stepped)

    def cancel(self) -> None:
        """Remove the callers from the audience, so that `kill_after` may end a call on a host.

        No thread can be interrupted. A generator ends when its callers leave.
        """
        if self.audience is not None and not self.runner.streams:
            for request in self.requests:
                self.audience.leave(request)

    def _put(
        self,
        step: Callable[[BatchCall], Any],
        ended: Callable[[Any, BaseException | None], object],
    ) -> None:
        try:
            call = BatchCall(self, step, ended)
            self.runner.executor._dispatcher.put(call, self._worker)
        except RuntimeError as error:  # shut down, or no thread can start
            gone = not self.runner.in_service
            ended(None, ReplicaFailed("its worker was removed", None) if gone else error)

    def _first_step(self, call: BatchCall) -> Any:
        """On the worker: take the requests, collate them and call the function."""
        try:
            # In a copy of the context, so that only the function sees what observers set there.
            return self.runner.caller.context().run(self._take_and_run, call)
        finally:
            del self, call  # an error's traceback holds this frame

    def _take_and_run(self, call: BatchCall) -> Any:
        requests = self.requests = self.batch.next_requests()
        if not requests:
            return None
        worker = self._worker = current_worker()
        assert worker is not None  # noqa: S101  # batches run on workers
        if not worker.shares_memory:
            self.audience = Audience(requests, call.leave)
        try:
            if worker.launches is not None:
                # The batch runs after the callers' work, and their later work after the batch.
                call.streams = tuple(streams_of(requests))
                worker.launches.order(call.streams, tensors([one.item for one in requests]))
            with self.batch.watched(len(requests)):
                return self._begin_generator() if self.runner.streams else self._call_function()
        except BaseException as error:
            close(self._steps)
            if fault_of(error) is not Fault.ITEM or not worker.ready:
                raise  # no item is at fault, or nothing more can run here
            self.error, self.fault = own_traceback(error), Fault.ITEM
            return None
        finally:
            # An error's traceback holds this frame, which must not hold other items of the batch.
            del self, call, requests

    def _call_function(self) -> Any:
        runner, caller = self.runner, self.runner.caller
        items = self.items
        arguments: tuple[Any, ...] = (runner.collate_fn, runner.unbatch_fn, items)
        if self.batch.observed:
            caller = caller.with_context(copy_context())
        try:
            if runner.replica is not None:
                return runner.replica.run_batch(caller, compute_on_replica, arguments)
            return run_user_code(caller, compute_batch, (runner.fn, *arguments))
        finally:
            del self, items, arguments

    def _begin_generator(self) -> Any:
        runner, items = self.runner, self.items
        make = partial(iterate_batch, runner.fn, runner.collate_fn, items)
        # A copy of the context, so that all steps see the variables that observers have set.
        self._steps = Steps(make, runner.caller, copy_context())
        try:
            return self._step()
        finally:
            del self, items, make

    def _step(self) -> Any:
        """The outputs of the next step, checked; END after the last."""
        try:
            arguments = (self._steps, self.size, self.runner.unbatch_fn)
            return run_user_code(self.runner.caller, step_batch, arguments)
        finally:
            del self

    def _next_step(self, call: BatchCall) -> Any:
        """On the worker: one more step of a generator."""
        try:
            call.streams = tuple(streams_of(self.requests))
            return self._step()
        finally:
            del self, call

    def _stepped(self, outputs: Any, error: BaseException | None) -> None:
        """Handle the end of a step, whose outputs are complete on the device; from any thread."""
        if error is not None:
            self.error, self.fault = error, Fault.BATCH
            self._close()
        elif outputs is None or outputs is END:  # None: a failure, or no requests
            self.end()
        elif not self.runner.streams:
            made, unbatched = outputs
            self.end(PartOutcome(self.requests, made, unbatched, size=self.size))
        else:
            if self.audience is None:
                self.audience = Audience(self.requests)
            self.send(*outputs)
            self.audience.when_due(self._go_on)

    def _go_on(self) -> None:
        """Run the next step of a generator."""
        self.error = self.batch.error
        if self.error is not None or (self.audience is not None and self.audience.gone):
            self._close()
        else:
            self._put(self._next_step, self._stepped)

    def _close(self) -> None:
        if self._steps is not None and self._steps.closable:
            self._put(self._close_steps, self._closed)
        else:
            self.end()

    def _close_steps(self, _: BatchCall) -> None:
        run_user_code(self.runner.caller, close, (self._steps,))

    def _closed(self, _: None, error: BaseException | None) -> None:
        # The steps are closed again, because perhaps no worker took the call. If the generator were
        # only collected, this thread would get its grad mode.
        close(self._steps)
        if self.error is None:
            self.error = error
        self.end()


def close(steps: Steps[Any] | None) -> None:
    """Close a generator that no caller reads, and log its error."""
    try:
        if steps is not None:
            steps.close()
    except BaseException as error:  # noqa: BLE001  # no caller waits for it
        logger.error("a generator failed when it was closed", exc_info=error)


class LoopPart(BatchPart):
    """A part that runs as a task on the event loop of a caller; workers collate its items.

    A caller has just come to the loop or waits there, so the loop runs. If the loop ends before the
    part, the requests run again on another loop. The task is cancelled when no caller waits for the
    part. An async generator has one task from its first step to its end, because a task group or
    timeout that the generator holds open between steps belongs to that task.
    """

    def __init__(self, batch: BatchRun, after: Self | None) -> None:
        super().__init__(batch, after)
        self._tasks = Tasks(self.runner.caller)
        self._outcome: PartOutcome | None = None
        """The outputs, unless the part is a stream."""

    def begin(self) -> None:
        self._tasks.spawn(self._run, self._ended)

    def cancel(self) -> None:
        self._tasks.cancel()

    def end_if_lost(self) -> None:
        if self._tasks.finished:
            self._interrupted(None)
            self._ended()

    def _interrupted(self, error: BaseException | None) -> None:
        if self.batch.requests:
            # The cancellation itself would look as if the callers were cancelled.
            message = "a task that ran the batch was cancelled from outside"
            self.error = stand_in(message, error)
            self.fault = Fault.BATCH if self.runner.streams else Fault.TASK

    def _ended(self) -> None:
        if not self.requests and self.batch.waiting:  # cancelled before its first step
            self._interrupted(None)
        if self.audience is not None and self.audience.gone:
            self.error = None  # drops the cancellation: all callers have left
        self.end(self._outcome)

    async def _run(self) -> None:
        """The body of the task."""
        try:
            self.requests = self.batch.next_requests()
            if self.requests:
                self.audience = Audience(self.requests, self.cancel)
                await (self._iterate() if self.runner.streams else self._call_function())
        except BaseException as error:  # the callers get every error
            self._failed(error)
            if is_cancellation(error):
                raise
        finally:
            # Since CPython 3.12 the frames in an error's traceback refer to this frame.
            del self

    def _failed(self, error: BaseException) -> None:
        if not is_cancellation(error):
            self.error, self.fault = own_traceback(error), fault_of(error)
        elif self._tasks.cancel_requested():
            self._interrupted(error)
        else:  # the function awaited a cancelled task, perhaps for one item only
            self.error = stand_in("the function raised a cancellation", error)
            self.fault = Fault.ITEM

    async def _call_function(self) -> None:
        try:
            with self.batch.watched(len(self.requests)):
                outputs = await self._output(await self._collated())
                outputs, unbatched = await self._checked(outputs)
                self._outcome = PartOutcome(self.requests, outputs, unbatched, size=self.size)
        finally:
            outputs = None
            del self

    async def _output(self, batch: Any) -> Any:
        try:
            return await self.runner.fn(batch)
        except Exception as error:
            note_batch(error, batch)
            raise
        finally:
            del self, batch

    async def _iterate(self) -> None:
        """Read an async generator to its end, as fast as the callers read."""
        batch, tasks, audience = self.batch, self._tasks, self.audience
        assert audience is not None  # noqa: S101  # `_run` made it
        iterator: Any = None
        caller: CallerState | None = None
        outputs: Any = None
        try:
            with batch.watched(len(self.requests)):
                iterator = self.runner.fn(await self._collated())
                caller = _GeneratorState() if batch.observed else None
                outputs = await self._step(iterator, caller)
            while outputs is not END:
                self.send(*outputs)
                outputs = None
                due = running_future()
                audience.when_due(partial(due.set_result, None))
                await due
                self.error = batch.error
                if self.error is not None or audience.gone:
                    return
                outputs = await self._step(iterator, caller)
        finally:
            if caller is None:
                await tasks.close(iterator, "an async generator")
            else:
                await caller.drive(tasks.close, iterator, "an async generator")
            del self, batch, iterator, outputs, audience

    async def _step(self, iterator: Any, caller: CallerState | None) -> Any:
        """The outputs of the next step, checked; END after the last."""
        try:
            if caller is None:
                outputs = await anext(iterator, END)
            else:
                outputs = await caller.drive(_advance, iterator)
            return END if outputs is END else await self._checked(outputs)
        finally:
            del self, iterator

    def _collated(self) -> Coroutine[Any, Any, Any]:
        """The function's input, made on a worker."""
        call = AwaitedCall(self.runner.collate_fn, (self.items,))
        dispatcher = self.runner.executor._dispatcher
        dispatcher.prepare(call)
        # The collation runs after the work that the callers have launched.
        call.streams = (*call.state.streams, *streams_of(self.requests))
        return await_call(call, dispatcher.pool, dispatcher.default_workers, False)

    async def _checked(self, outputs: Any) -> tuple[Any, bool]:
        runner, count = self.runner, self.size
        del self  # an error's traceback holds this frame
        if runner.unbatch_fn is None:
            return checked(outputs, count, None)
        return await runner.executor.run_sync(checked, outputs, count, runner.unbatch_fn)


async def _advance(iterator: Any) -> Any:
    return await anext(iterator, END)


class _GeneratorState(CallerState):
    """A state whose context variables one generator changes from step to step.

    Make this state while the variables of the observers are set: every step then sees these
    variables.
    """

    __slots__ = ("_own",)

    def __init__(self) -> None:
        super().__init__()
        self._own = super().context()

    def context(self) -> Context:
        return self._own
