"""Which requests run when, where batches are tasks on the event loops of their callers."""

from collections.abc import Sequence

from .._wakeup import Waker
from ._async_runner import AsyncRunner
from ._part import Part, deliver_soon
from ._request import Request
from ._schedule import Runner
from ._scheduler import Scheduler


class LoopScheduler(Scheduler):
    """A scheduler of runners that start on the loop of a caller, and end with it.

    So they are started on a loop only while somebody of it waits: another one may be about to end.
    A loop that ends cancels its tasks, and these say so. One that is closed under them tells
    nobody: whoever comes or goes looks for it.
    """

    def put(self, request: Request) -> None:
        if self._runners.busy:
            self._end_lost()
        super().put(request)

    def discard(self, request: Request) -> bool:
        found = super().discard(request)
        if found:
            self._end_lost()
            with self._lock:
                # The others may have been about to start on its loop, which may end.
                self._post_start()
        return found

    def close(self, *, error: BaseException | None = None, running: bool = False) -> None:
        self._end_lost()
        super().close(error=error, running=running)

    # Runners; on the thread of their loop, or of whoever finds that it is closed.

    def released(self, runner: Runner, batch: Sequence[Request], parts: Sequence[Part]) -> None:
        with self._lock:
            self._batch_ended(runner, batch, parts)
            self._untold += 1
            self._release(runner)
            self._post_start()

    def interrupted(self, runner: Runner, batch: Sequence[Request], error: BaseException) -> None:
        with self._lock:
            given_up = self._give_back(batch)
            self._untold += 1
            self._release(runner)
            self._post_start()
        deliver_soon([Part(given_up, error=error)])
        self.told()

    def withdrawn(self, runner: Runner) -> None:
        with self._lock:
            self._runners.started -= 1
            self._release(runner)
            self._post_start()

    def _release(self, runner: Runner) -> None:
        if isinstance(runner, AsyncRunner) and runner.lost:
            # Its tasks are still there, and may be closed by the garbage collector at any time:
            # they must not come upon another batch.
            self._runners.replace(runner, runner.successor())
            self._check_drained()
        else:
            super()._release(runner)

    def _end_lost(self) -> None:
        """End the batches whose loop was closed under them."""
        with self._lock:
            busy = [one for one in self._runners.busy if isinstance(one, AsyncRunner)]
            lost = [one for one in busy if one.lose()]
        for runner in lost:
            runner.end_lost()

    def _post_start(self) -> None:
        """Have runners started on the loop of one who waits: it is there, and this one may end."""
        for request in self._queue if self._runners.idle else ():
            waker = request.waker
            waker.post(_Start(self, waker))
            if not waker.finished:  # else its loop was closed while it waited: nobody is told there
                return

    def start_on(self, waker: Waker) -> None:
        """Start who is to run now, on this loop, if somebody of it still waits."""
        with self._lock:
            started = self._start_due_on(waker)
        for runner in started:
            runner.start()

    def _start_due_on(self, waker: Waker) -> list[Runner]:
        if any(request.waker is waker for request in self._queue):
            return self._start_due()
        self._post_start()
        return []


class _Start:
    """A scheduler's order to look whether runners can start, on its way to a loop."""

    __slots__ = ("_scheduler", "_waker")

    def __init__(self, scheduler: LoopScheduler, waker: Waker) -> None:
        self._scheduler = scheduler
        self._waker = waker

    def deliver(self) -> None:
        self._scheduler.start_on(self._waker)
