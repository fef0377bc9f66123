"""Where batches of an async generator function run: tasks on an event loop."""

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, Self, TypeAlias, cast

import torch

from .._base.arguments import short_repr
from .._base.thread_state import CallerState
from .._base.tracebacks import own_traceback
from ..errors import Abandoned
from ..executor._executor import DeviceExecutor
from ..executor._generators import END, Steps
from ..executor._loop_tasks import Cancel, TaskRef, Tasks, current_task, has_ended, is_cancellation
from ..executor._worker import current_worker
from ..futures._future import Future, running_future, thread_hooks
from ..futures._wakeup import Awaiter, awaiter_here
from ._observer import BatchObservers, watched_run
from ._outcomes import Part, Splitting, deliver_soon, failed_midway
from ._request import Audience, Request, streams_of
from ._runner import (
    AsyncBatching,
    AsyncRunner,
    ComputeGenerator,
    LoopSchedule,
    Run,
    Schedule,
    WorkerRunner,
    cancellation,
    close,
)

_Change: TypeAlias = Callable[[], Callable[[], object] | None]
"""What is done with the lock held; returns what is due by it, to be called without."""


class StreamRequest(Request):
    """One item whose output comes in parts; its results are these parts, and then `END`."""

    buffer = 1
    """The most parts that may wait to be read."""
    _readers: "Readers | None" = None

    def __init__(self, item: Any, awaiter: Awaiter) -> None:
        super().__init__(item, awaiter)
        self.parts: deque[Any] = deque()
        """Those that have come and were not read; touched on its caller's loop only."""

    def resolve(self, result: Any) -> None:
        """It has another part, or has all of them."""
        if self.done:
            return
        if result is END:
            self._settle()
            return
        self.item = None  # the generator has it
        self.parts.append(result)
        self.awaiter.deliver()

    def read(self) -> Any:
        """Take the next of `parts`."""
        part = self.parts.popleft()
        if self._readers is not None:
            self._readers.read(self)
        return part

    def expire(self, *, in_queue: bool) -> None:
        """Its deadline has passed: that is raised now, not behind the parts that wait."""
        if not self.done:
            self.parts.clear()
            super().expire(in_queue=in_queue)

    def abandon(self) -> None:
        """Its caller has gone."""
        super().abandon()
        # Its batch, which goes on, knows it still; and an error may know the batch.
        self.parts.clear()
        self.error = self._traceback = None
        self._leave()

    def _settle(self) -> None:
        self._leave()
        super()._settle()

    # It joins on a worker and leaves on its loop, perhaps at once: the first to write the name
    # decides, which is atomic.

    def join(self, readers: "Readers") -> bool:
        """It reads what comes now; False: its caller has gone."""
        return self.__dict__.setdefault("_readers", readers) is readers

    def _leave(self) -> None:
        readers = self.__dict__.setdefault("_readers", None)
        if readers is not None:
            readers.leave(self)


class Readers:
    """Those who still read, of the requests that joined; any thread may call each method.

    The next step is due when each of them has room for another part, or when there is none of
    them: a slow one slows the others of its batch, and parts never pile up.
    """

    def __init__(self, requests: Iterable[StreamRequest]) -> None:
        # May be taken again: a reader that is lost is closed by the garbage collector, which may
        # come at any point of any thread, of that one too that has the lock.
        self._lock = threading.RLock()
        self._changing = False
        """Whether who has the lock is within a change."""
        self._due: Callable[[], object] | None = None
        self._full = 0
        """How many have no room."""
        self._room: dict[StreamRequest, int] = {}
        self._left: deque[StreamRequest] = deque()
        """Those who have gone and may still be in `_room`."""
        self._change(partial(self._join, requests))

    @property
    def gone(self) -> bool:
        """Whether nobody reads any more."""
        return not self._room

    def when_due(self, fn: Callable[[], object]) -> None:
        """Call `fn` when the next step is due: now, or once in the thread where that happens."""
        self._change(partial(self._wait, fn))

    def send(self) -> None:
        """Each of them is about to get a part."""
        self._change(self._take_room)

    def read(self, request: StreamRequest) -> None:
        """One of them has read a part."""
        self._change(partial(self._give_room, request))

    def leave(self, request: StreamRequest) -> None:
        """One of them reads no more."""
        self._left.append(request)
        self._let_go()

    def _change(self, change: _Change) -> None:
        self._alone(change)
        self._let_go()  # of those who left meanwhile

    def _let_go(self) -> None:
        while self._left and self._alone(self._one_out):
            pass

    def _alone(self, change: _Change) -> bool:
        """Make `change`, and call what is due by it; False: this thread is within another one.

        Only who leaves may come there: once that change is made, it is let go.
        """
        with self._lock:
            if self._changing:
                return False
            try:
                self._changing = True
                due = change()
            finally:
                self._changing = False
        if due is not None:
            due()
        return True

    # Changes.

    def _join(self, requests: Iterable[StreamRequest]) -> None:
        self._room = {request: request.buffer for request in requests if request.join(self)}

    def _wait(self, fn: Callable[[], object]) -> Callable[[], object] | None:
        if not self._full:
            return fn
        self._due = fn
        return None

    def _take_room(self) -> None:
        for request in self._room:
            self._room[request] -= 1
            self._full += not self._room[request]

    def _give_room(self, request: StreamRequest) -> Callable[[], object] | None:
        if request not in self._room:
            return None
        self._room[request] += 1
        return self._one_less_full() if self._room[request] == 1 else None

    def _one_out(self) -> Callable[[], object] | None:
        if not self._left:  # another was quicker
            return None
        had_no_room = self._room.pop(self._left.popleft(), 1) == 0
        return self._one_less_full() if had_no_room else None

    def _one_less_full(self) -> Callable[[], object] | None:
        self._full -= 1
        due = None
        if not self._full:
            due, self._due = self._due, None
        return due


class StreamEntry:
    """A request that was put in the queue; used on its caller's loop only.

    Args:
        request: The request.
        discard: Takes it from the queue, if it is there.
        expiry: Takes its deadline back, if it has one.
        observers: Who was told of it.
    """

    def __init__(
        self,
        request: StreamRequest,
        discard: Callable[[Request], object],
        expiry: Cancel | None,
        observers: BatchObservers | None,
    ) -> None:
        self.request = request
        self._discard = discard
        self._expiry = expiry
        self._observers = observers

    def leave(self, error: BaseException | None) -> None:
        """Its caller reads no more, for it has come to the end, or because of `error`; once."""
        self.request.abandon()
        self._discard(self.request)
        if self._expiry is not None:
            self._expiry()
        if self._observers is not None:
            self._observers.completed(self.request, error)

    def deliver(self) -> None:
        """Its caller has forgotten it."""
        self.leave(GeneratorExit())


class StreamOwner(Protocol):
    """On whose behalf streams are read: a request over HTTP."""

    def began(self, stream: "OutputStream") -> None:
        """One was begun in the context of this owner."""


stream_owner: ContextVar[StreamOwner | None] = ContextVar("aiopar_stream_owner", default=None)


class OutputStream:
    """An async iterator over the parts of one item's output; made by `Batcher.stream`.

    The item is queued by the first read, or by entering `async with`, which leaves the batch when
    it is left; a plain `async for` that is broken off leaves when the iterator is collected. So
    does a read that fails, or is cancelled: after that, the next one raises RuntimeError. One task
    reads at a time, in the event loop in which the first read was.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, StreamEntry]]) -> None:
        self._begin: Callable[[], Coroutine[Any, Any, StreamEntry]] | None = begin
        self._entry: StreamEntry | None = None
        self._reading = False
        self._owned = self._forsaken = self._cut_off = False
        self._reader: TaskRef | None = None
        """The task that has read last, where the stream has an owner."""

    @short_repr
    def __repr__(self) -> str:
        entry = self._entry
        if entry is not None:
            return f"with {len(entry.request.parts)} ready"
        return "closed" if self._begin is None else "not begun"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The next part.

        Raises what the generator raises, and what `Batcher.__call__` does.
        """
        if self._reading:
            raise RuntimeError("this stream is read by another task already")
        self._reading = True
        try:
            await self._enter()
            if self._owned:
                self._reader = current_task()
            part = await self._next()
        except GeneratorExit:
            self._forget()
            raise
        except StopAsyncIteration as error:
            self._leave(error)
            # It would end the loop of who reads, and nobody would know that something failed.
            raise RuntimeError("the function raised StopAsyncIteration") from error
        except BaseException as error:
            # Read on, it must not look as if it had come to its end.
            if not isinstance(error, Exception):
                self._cut_off = True
            self._leave(error)
            raise
        finally:
            self._reading = False
        if part is END:
            self._leave(None)
            raise StopAsyncIteration
        return part

    async def _enter(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            self._entry = await begin()
            owner = stream_owner.get()
            if owner is not None:
                self._owned = True
                owner.began(self)

    async def _next(self) -> Any:
        if self._entry is None:
            if self._forsaken:
                raise RuntimeError("this stream has ended with the request that it was begun for")
            if self._cut_off:
                raise RuntimeError("a read of this stream was cut off, which has left it")
            return END
        request = self._entry.request
        while not request.parts:
            if request.done:
                if request.error is not None:
                    request.outcome()
                return END
            awaiter = awaiter_here()
            if awaiter is None or awaiter.waker is not request.waker:
                self._forget()  # it belongs to a loop that this is not
                raise RuntimeError("a stream is read in one event loop")
            request.awaiter = awaiter
            # The loop may be one that a call runs, which holds the worker that the next step needs.
            thread_hooks.about_to_block()
            await awaiter
        return request.read()

    def _leave(self, error: BaseException | None) -> None:
        self._begin = None
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.leave(error)

    async def aclose(self) -> None:
        """Read no more; may be called twice.

        The generator is closed when nobody is left who reads of its batch.
        """
        entry = self._entry
        self._leave(GeneratorExit())
        if entry is not None and self._reading:
            entry.request.awaiter.wake()  # who reads in another task has come to the end

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def forsake(self) -> None:
        """Its owner has gone, whose task this is: leave, unless another task that goes on reads it.

        Whoever read it may be suspended for good, in a cycle that awaits the garbage collector.
        """
        reader = self._reader
        if reader is not None and reader != current_task() and not has_ended(reader):
            return
        if self._entry is not None:
            self._forsaken = True
            self._forget()

    def __del__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Leave soon, on the loop: the garbage collector may have come in the midst of anything.

        In its thread any lock may be held, so that nothing may be done here that takes one.
        """
        entry, self._entry = self._entry, None
        if entry is not None:
            waker = entry.request.waker
            waker.post(entry)
            if waker.finished:  # its loop was closed under it: its batch is not to wait for it
                entry.request.abandon()


class StreamRunner(WorkerRunner):
    """A runner of a generator function.

    The worker that takes a batch makes the first step, and splits the batch where that fails: so it
    may come to several generators. Each goes on by itself, every step a call of its own on that
    worker, which is free between them. The batch has ended when all of them have.

    Args:
        schedule: Gives it batches.
        executor: On whose workers it runs.
        compute: Makes the steps.
        caller: The state it makes them under.
    """

    def __init__(
        self,
        schedule: Schedule,
        executor: DeviceExecutor,
        compute: ComputeGenerator,
        caller: CallerState,
    ) -> None:
        super().__init__(schedule, executor, compute, caller)
        self._generators = compute
        self._lock = threading.Lock()
        self._begun: list[tuple[Part, _Generation]] = []
        self._running = 0
        """How many of them have not ended."""
        self._outcomes: list[Part] = []
        """Of those that have, and of the parts of the batch that have none."""
        self._error: BaseException | None = None
        """What ended the batch as a whole."""

    def _run_part(self, part: list[Request], splitting: Splitting) -> None:
        super()._run_part(part, splitting)
        steps, self._generators.begun = self._generators.begun, None
        if steps is not None:
            self._begun.append((splitting.parts[-1], _Generation(self, part, steps)))

    def ended(self, parts: list[Part] | None, error: BaseException | None) -> None:
        """The first steps are complete on the device; from any thread."""
        begun, self._begun = self._begun, []
        if not begun:
            super().ended(parts, error)
            return
        first, generations = zip(*begun, strict=True)
        self._running, self._error = len(generations), error
        if error is not None:
            for generation in generations:
                generation.fail(error)
            return
        self._outcomes = [part for part in parts or () if part not in first]
        for generation in generations:
            generation.join()
        deliver_soon(parts or [])
        for generation in generations:
            generation.go_on()

    def step(self, run: Run, steps: Steps[Any], requests: Sequence[Request]) -> list[Part]:
        """On the worker: one more step."""
        try:
            run.streams = tuple(streams_of(requests))
            outputs, unbatched = self._generators.step(steps, len(requests))
            return [Part(requests, outputs, unbatched)]
        finally:
            # Whoever keeps an error keeps this frame, which must not keep the others of the batch.
            del self, requests, run

    def out_of_memory(self, requests: Sequence[Request]) -> None:
        """A later step for these did not fit."""
        self._schedule.out_of_memory(requests)

    def generation_ended(self, outcome: Part) -> None:
        """One of them has ended, and is closed; from any thread."""
        with self._lock:
            self._outcomes.append(outcome)
            self._running -= 1
            last = not self._running
        if not last:
            deliver_soon([outcome])
            return
        outcomes, self._outcomes = self._outcomes, []
        error, self._error = self._error, None
        # The others get theirs once more, which they pass over.
        super().ended(outcomes, error)


class _Generation:
    """A generator that is suspended after its first step, and who reads what it yields.

    Args:
        runner: Runs the batch.
        requests: The part of it that the generator is for.
        steps: The generator.
    """

    def __init__(
        self, runner: StreamRunner, requests: Sequence[Request], steps: Steps[Any]
    ) -> None:
        self._runner = runner
        self._requests = requests
        self._steps = steps
        self._worker = current_worker()
        self._error: BaseException | None = None

    def join(self) -> None:
        """Its first outputs are about to be delivered."""
        self._readers = Readers(cast("Sequence[StreamRequest]", self._requests))
        self._readers.send()

    def go_on(self) -> None:
        """Make the next step when it is due."""
        self._readers.when_due(self._next)

    def _next(self) -> None:
        if self._readers.gone:
            self._close()
        else:
            self._runner.put(self._step, self._stepped, self._refused, self._worker)

    def _step(self, run: Run) -> list[Part]:
        try:
            return self._runner.step(run, self._steps, self._requests)
        finally:
            del self, run

    def _stepped(self, parts: list[Part] | None, error: BaseException | None) -> None:
        """What was yielded is complete on the device; from any thread."""
        if error is not None:
            self._step_failed(error)
        elif self._steps.ended:
            self._closed()
        else:
            self._readers.send()
            deliver_soon(parts or [])
            self._readers.when_due(self._next)

    def _step_failed(self, error: BaseException) -> None:
        failed_midway(error, len(self._requests))
        if isinstance(error, torch.OutOfMemoryError):
            self._runner.out_of_memory(self._requests)
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Nothing more can come of it."""
        self._error = error
        self._close()

    def _close(self) -> None:
        if self._steps.closable:
            self._runner.put(self._close_steps, self._closed, self._refused, self._worker)
        else:
            self._closed()

    def _close_steps(self, _: Run) -> list[Part]:
        close(self._steps)
        return []

    def _closed(self, *_: object) -> None:
        # The error's traceback holds frames that hold this.
        error, self._error = self._error, None
        if error is not None:
            outcome = Part(self._requests, error=error)
        else:
            outcome = Part(self._requests, [END] * len(self._requests), unbatched=True)
        self._runner.generation_ended(outcome)

    def _refused(self, error: BaseException) -> None:
        """No worker takes it: the executor was shut down, or can have no more threads."""
        # Closed here rather than by its own end, which would leave its grad mode and the like to
        # this thread.
        close(self._steps)
        self._error = error if self._error is None else self._error
        self._closed()


class AsyncStreamRunner(AsyncRunner):
    """A runner of an async generator function.

    A batch that fails before its first part is split, so that it may come to several generators.
    Each has a task of its own, and goes on by itself, until none of its readers is left. The batch
    has ended when all of them have.

    Args:
        schedule: Gives it batches.
        fn: The function.
        batching: Makes its batches.
        caller: The state it runs under.
    """

    repeats = False  # there are callers who have had parts of it

    def __init__(
        self,
        schedule: LoopSchedule,
        fn: Callable[[Any], Any],
        batching: AsyncBatching,
        caller: CallerState,
    ) -> None:
        super().__init__(schedule, fn, batching, caller)
        self._finished: list[Part] = []
        """What the generators that have ended came to."""
        self._generations: list[_AsyncGeneration] = []
        """The others."""

    def _cancel_tasks(self) -> None:
        # First the one that begins generators: what it begins after this is not in the copy, but it
        # comes here itself when it is cancelled.
        super()._cancel_tasks()
        for generation in tuple(self._generations):
            generation.cancel()

    async def _run_parts(self, splitting: Splitting) -> None:
        try:
            await super()._run_parts(splitting)
            # Who failed alone need not wait for the generators of the others to end.
            deliver_soon([part for part in splitting.parts if part.error is not None])
        finally:
            del splitting  # as in `_run`

    async def _run_part(self, part: list[Request], splitting: Splitting) -> None:
        try:
            await super()._run_part(part, splitting)
        except Abandoned:
            pass  # there is nobody to run it for once more, in halves
        finally:
            del part, splitting  # as in `_run`

    async def _compute(self, part: Sequence[Request]) -> tuple[Any, bool]:
        generation = _AsyncGeneration(part, self._fn, self._batching)
        ended = partial(self._generation_ended, generation)
        error: BaseException | None = None
        try:
            with watched_run(self._watch, len(part)):
                self._running += 1
                # What observers have set here is to be seen in each of its steps.
                generation.start(self._caller if self._watch is None else CallerState(), ended)
                self._generations.append(generation)  # it has tasks by now, which may be cancelled
                error = await generation.begun
                if error is not None:
                    raise error
            return None, True  # it delivers what it yields itself
        finally:
            # Whoever keeps the error keeps this frame.
            del self, part, generation, ended, error

    def _generation_ended(self, generation: "_AsyncGeneration") -> None:
        self._generations.remove(generation)
        outcome = generation.outcome()
        if outcome is not None:
            self._finished.append(outcome)
            if isinstance(outcome.error, torch.OutOfMemoryError):
                self._schedule.out_of_memory(outcome.requests)
            # The last is delivered by `_ended`, and so is what has ended all of them.
            if self._running > 1 and self._error is None:
                deliver_soon([outcome])
        self._ended()

    def _outcomes(self, splitting: Splitting) -> list[Part]:
        finished, self._finished = self._finished, []
        # Most of them have had theirs by now, and pass over it.
        return [*finished, *(part for part in splitting.parts if part.error is not None)]


class _AsyncGeneration:
    """An async generator, and who reads what it yields.

    In one task from its first step to its end: what it holds open between its steps (a task group,
    a timeout) belongs to the task that has entered it.

    Args:
        requests: The batch, or part of one, that it is for.
        fn: Makes it.
        batching: Makes its input.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        fn: Callable[[Any], Any],
        batching: AsyncBatching,
    ) -> None:
        self.requests = requests
        self.begun: Future[BaseException | None] = running_future()
        """None when the first step is made; the error if there is none."""
        self._error: BaseException | None = None
        self._fn = fn
        self._batching = batching

    def start(self, caller: CallerState, ended: Callable[[], object]) -> None:
        """Run it in a task, and call `ended` at its end; on a loop's thread."""
        self._tasks = Tasks(caller)
        self._audience = Audience(self.requests, self._tasks)
        self._tasks.spawn(self.run, ended)

    def cancel(self) -> None:
        """End it; from any thread."""
        self._tasks.cancel()

    async def run(self) -> None:
        """The body of its task."""
        iterator: Any = None
        try:
            batch = await self._batching.collated(self.requests)
            iterator = self._fn(batch)
            del batch
            await self._pump(iterator)
        except BaseException as error:  # whatever it is, the callers get it
            cancelled = is_cancellation(error)
            self._error = cancellation(error) if cancelled else own_traceback(error)
            if cancelled:
                raise
        finally:
            await self._tasks.close(iterator, "an async generator")
            del self, iterator  # as in `AsyncRunner._run`

    async def _pump(self, iterator: AsyncIterator[Any]) -> None:
        try:
            part = await self._step(iterator)
            readers = Readers(cast("Sequence[StreamRequest]", self.requests))
            self.begun.set_result(None)
            while part is not None:
                readers.send()
                deliver_soon([part])
                del part
                due = running_future()
                readers.when_due(partial(due.set_result, None))
                await due
                if readers.gone:
                    return
                part = await self._step(iterator)
        finally:
            # Whoever keeps an error keeps this frame, which must not keep the others of the batch.
            del self

    async def _step(self, iterator: AsyncIterator[Any]) -> Part | None:
        try:
            outputs = await anext(iterator, END)
            if outputs is END:
                return None
            outputs, unbatched = await self._batching.unbatched(outputs, len(self.requests))
            return Part(self.requests, outputs, unbatched)
        finally:
            del self

    def outcome(self) -> Part | None:
        """What it has come to, when its task has ended; None if it never began."""
        # The error's traceback holds frames that hold this.
        error, self._error = self._error, None
        gone = self._audience.gone
        self._audience.end()
        if not self.begun.done():
            self.begun.set_result(Abandoned() if gone else error or cancellation(None))
            return None
        if error is None or gone:
            return Part(self.requests, [END] * len(self.requests), unbatched=True)
        failed_midway(error, len(self.requests))
        return Part(self.requests, error=error)
