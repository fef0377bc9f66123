"""Where batches of a generator function run: step by step on a worker, as they are read."""

import threading
from collections.abc import Callable

import torch

from .._caller import CallerState
from .._errors import ExecutorShutdown
from .._executor import DeviceExecutor
from .._steps import END, Steps
from .._worker import current_worker
from ._compute import Compute, ComputeGenerator, close
from ._part import Part, deliver_soon
from ._readers import Readers
from ._request import Request, streams_of
from ._runner import Run, WorkerRunner
from ._schedule import Schedule
from ._splitting import Splitting, let_go_of_tensors


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
        self._begun: list[_Stream] = []
        self._running = 0
        """How many of them have not ended."""
        self._outcomes: list[Part] = []
        """Of those that have, and of the parts that have no generator."""
        self._error: BaseException | None = None
        """What ended the batch as a whole."""

    def _run_part(self, part: list[Request], splitting: Splitting, compute: Compute) -> None:
        super()._run_part(part, splitting, compute)
        steps, self._generators.begun = self._generators.begun, None
        if steps is not None:
            self._begun.append(_Stream(self, splitting.parts[-1], steps))

    def ended(self, parts: list[Part] | None, error: BaseException | None) -> None:
        """The first steps are complete on the device; from any thread."""
        begun, self._begun = self._begun, []
        if not begun:
            super().ended(parts, error)
            return
        if error is not None:
            parts = [Part(self.batch, error=error)]
        first = [stream.first for stream in begun]
        self._outcomes = [part for part in parts or [] if part not in first]
        self._running, self._error = len(begun), error
        for stream in begun:
            stream.join()
        deliver_soon(parts or [])
        for stream in begun:
            stream.go_on()

    def stream_ended(self, outcome: Part) -> None:
        """A generator has ended, and is closed; from any thread."""
        with self._lock:
            self._outcomes.append(outcome)
            self._running -= 1
            last = not self._running
        if not last:
            deliver_soon([outcome])
            return
        # Those before get theirs once more, which is passed over.
        outcomes, self._outcomes = self._outcomes, []
        error, self._error = self._error, None
        super().ended(outcomes, error)

    def call(
        self,
        fn: Callable[[Run], list[Part]],
        ended: Callable[[list[Part] | None, BaseException | None], object],
        refused: Callable[[], object],
        worker: 
    )
