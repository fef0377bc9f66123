"""`ContinuousScheduler`: which requests join a running batch, and when."""

from collections.abc import Iterable, Sequence
from itertools import count
from math import ceil, inf
from time import monotonic

from ..executor._observer import Observers
from ._observer import BatchObserver
from ._request import Request
from ._scheduler import Scheduler
from ._settings import BatcherSettings
from ._stats import ContinuousStats, StepTally
from ._step_batch import FREE_SHARE, Ticked
from ._step_run import RunningRequest, StepRun

_keys = count()


class ContinuousScheduler(Scheduler):
    """A scheduler whose batches change between steps: requests join and leave.

    A runner is busy while its batch has requests. A newcomer goes to an idle runner, else it joins
    a running batch at its next step.
    """

    _tally: StepTally

    def __init__(self, settings: BatcherSettings, observers: Observers[BatchObserver]) -> None:
        super().__init__(settings, observers, on_loop=False)
        self._may_stall = True
        self._tally = StepTally()

    def put(self, request: Request) -> None:
        super().put(request)
        if request in self._queue:
            for run in self.runs():
                run.kick()

    def runs(self) -> list[StepRun]:
        """The running batches."""
        return [run for run in self._running() if isinstance(run, StepRun)]

    def _estimated_wait(self, request: Request) -> float:
        """Estimate how many seconds `request` would wait until it joins. It is not queued yet."""
        before = self._queue.batches_before(request)
        return before * self._tally.batch_seconds / max(1, self._runners.in_service)

    def change(
        self, run: StepRun, gone: Iterable[RunningRequest]
    ) -> tuple[list[int], list[RunningRequest]]:
        """Remove the requests that have left `run`, and let others join.

        Returns the keys of the requests that have left, and the newcomers.
        """
        with self._lock:
            left = self._remove(run, gone)
            self._runners.started(run.runner)
            joined = self._join(run)
        for one in joined:
            one.request.join(one)
        # Another runner may start now, because this batch has taken its requests.
        self._start_due()
        return left, joined

    def _remove(self, run: StepRun, gone: Iterable[RunningRequest]) -> list[int]:
        now = monotonic()
        removed = [one for one in gone if run.running.pop(one.key, None) is not None]
        self._tally.parted([now - one.began for one in removed])
        return [one.key for one in removed]

    def _join(self, run: StepRun) -> list[RunningRequest]:
        """Let the next requests join, up to the room and the share of this batch."""
        if not self._queue or (run.full and run.running):
            return []
        joined: list[RunningRequest] = []
        now, held = monotonic(), run.held if run.running else 0.0
        group = next((one.request.group for one in run.running.values()), None)
        room = self._room(run) if run.runner.in_service else 0
        while len(joined) < room and (request := self._queue.leader) is not None:
            if request.done or request.deadline <= now:
                # A timer is about to give the caller of a late request its error.
                self._queue.discard(request)
                request.skipped = not request.done
                continue
            held += request.cost
            # A request whose workers were lost again and again has a group of its own.
            if run.running and (held > self._most or request.group is not group):
                run.full = True
                break
            group = request.group
            self._queue.pop(request)
            one = RunningRequest(run, next(_keys), request)
            run.running[one.key] = one
            joined.append(one)
        self._tally.joined([now - one.request.arrived for one in joined])
        return joined

    @property
    def _most(self) -> float:
        """The most that a batch may hold after newcomers have joined."""
        most = self._settings.max_batch_cost
        return inf if most is None else most * (1 - FREE_SHARE)

    def _room(self, run: StepRun) -> int:
        """How many requests may join `run`: no batch takes more than its share."""
        others = [one for one in self.runs() if one is not run and one.runner.in_service]
        open_runs = [run, *(one for one in others if not one.full)]
        sharing = max(1, self._runners.in_service - len(others) - 1 + len(open_runs))
        total = len(self._queue) + sum(len(one.running) for one in open_runs)
        most = min(run.runner.limit, ceil(total / sharing))
        return most - len(run.running)

    def stepped(
        self,
        run: StepRun,
        ended: Iterable[RunningRequest],
        refused: Sequence[tuple[RunningRequest, float]],
        ticked: Ticked,
        times: tuple[float, list[float], list[float]],
    ) -> None:
        """Note a step of `run`.

        Args:
            run: The batch.
            ended: The requests that have their result or an error.
            refused: Newcomers that did not fit, each with what it would hold; 0: unknown.
            ticked: The result of the step.
            times: Seconds: of the step, from calls to first parts, and between parts.
        """
        with self._lock:
            self._remove(run, ended)
            run.held = ticked.held
            run.full = bool(refused or ticked.parked)
            run.runner.limit = ticked.limit
            for one, need in refused:
                del run.running[one.key]
                one.request.cost = need or one.request.cost
            self._queue.push_front([one.request for one, _ in refused if not one.request.done])
            self._tally.preempted += ticked.preempted
            if ticked.size:
                self._tally.stepped(ticked.size, *times)

    def stats(self) -> ContinuousStats:
        """A snapshot."""
        with self._lock:
            return self._tally.stats(self._queued)
