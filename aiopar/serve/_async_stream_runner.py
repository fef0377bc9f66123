"""Where batches of an async generator function run: tasks on an event loop."""

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from .._caller import CallerState
from .._error_handling import own_traceback
from .._errors import Abandoned
from .._future import Future, running_future
from .._steps import END
from .._tasks import Tasks, is_cancellation
from ._async_runner import AsyncBatching, AsyncRunner, cancellation
from ._audience import Audience
from ._observer import watched_run
from ._part import Part, deliver_soon
from ._readers import Readers, StreamRequest
from ._request import Request
from ._schedule import LoopSchedule
from ._splitting import Splitting, failed_midway


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
        self._generations: list[_Generation] = []
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
        generation = _Generation(part, self._fn, self._batching)
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

    def _generation_ended(self, generation: "_Generation") -> None:
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


class _Generation:
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
