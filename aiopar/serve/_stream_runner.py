"""Where batches of a generator function run: step by step on a worker, as they are read."""

import threading
from collections.abc import Sequence
from typing import Any, cast

import torch

from .._caller import CallerState
from .._executor import DeviceExecutor
from .._steps import END, Steps
from .._worker import current_worker
from ._compute import ComputeGenerator, close
from ._part import Part, deliver_soon
from ._readers import Readers, StreamRequest
from ._request import Request, streams_of
from ._runner import Run, WorkerRunner
from ._schedule import Schedule
from ._splitting import Splitting, failed_midway


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
        if self._steps.suspended:
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
