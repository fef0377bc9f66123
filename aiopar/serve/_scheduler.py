"""Which requests run when: the queue of a `Batcher`, and the runners that take from it."""

import threading
from collections.abc import Iterable, Sequence
from functools import partial
from time import monotonic

from .._error_handling import in_words
from .._errors import InvalidInput, Overloaded, ReplicaUnavailable, ServiceClosed
from .._future import running_future
from .._registry import Registry
from .._wakeup import Waker
from ._late import pass_over
from ._learned_sizes import LearnedSizes
from ._observer import BatchObserver, BatchObservers, ItemInfo, with_observer, without_observer
from ._part import Part, deliver_soon
from ._queue import RequestQueue
from ._queue_delay import QueueDelay
from ._request import Request
from ._runner_set import RunnerSet
from ._schedule import Runner
from ._settings import BatcherSettings
from ._tally import BatcherStats, Rejection, Tally
from ._timer import call_later


class Scheduler:
    """Requests in, batches out; used by event loops and by workers at the same time.

    Greedy: while there is an idle runner nothing waits, unless for `max_queue_delay`. One lock
    guards all of it, for a few microseconds each time; nothing of a user's is called under it.
    """

    def __init__(self, settings: BatcherSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._sizes = LearnedSizes(settings.max_batch_size)
        self._queue: RequestQueue[Request] = RequestQueue(
            max_batch_size=settings.max_batch_size,
            max_batch_cost=settings.max_batch_cost,
            by_cost=settings.cost is not None,
            padded=settings.padded,
            limit=self._sizes.limit,
        )
        self.tally = Tally()
        self._delay = QueueDelay(settings.max_queue_delay, self._queue, self.tally)
        self.observers: BatchObservers | None = None
        self._runners = RunnerSet()
        self._last_failure = ""
        self._untold = 0  # batches that have ended, and whose callers are yet to be told
        self.closing = False
        self.drained = running_future()
        """Done when it is closing, and nothing waits or runs."""
        _schedulers.add(self)

    def add_runners(self, runners: Iterable[Runner]) -> None:
        """Run batches on these too."""
        with self._lock:
            self._runners.add(runners)
        self.runners_changed()

    def runners_changed(self) -> None:
        """Replicas have come or gone: start who can run, fail who can run nowhere."""
        stranded: list[Request] = []
        with self._lock:
            self._runners.update()
            if not self._runners.in_service:
                stranded = self._queue.clear()
            self._check_drained()
            started = self._start_due()
        for runner in started:
            runner.start()
        deliver_soon([Part(stranded, error=self._unavailable())])

    @property
    def in_service(self) -> bool:
        """Whether there is a runner that can run a batch."""
        return self._runners.in_service > 0

    def _unavailable(self) -> ReplicaUnavailable:
        return ReplicaUnavailable(f"no replica is in service{self._last_failure}")

    # Requests.

    def put(self, request: Request) -> None:
        """Queue a request; on the thread of its caller's loop.

        Raises:
            InvalidInput, ServiceClosed, ReplicaUnavailable, Overloaded: It is refused.
        """
        flush_at: float | None = None
        with self._lock:
            self._check(request)
            self._queue.push(request)
            if self._settings.max_queue_delay:
                flush_at = self._delay.put(request)
            started = self._start_due() if self._runners.idle else ()
        for runner in started:
            runner.start()
        if flush_at is not None:
            self._flush_at(request.waker, flush_at)

    def _check(self, request: Request) -> None:
        settings = self._settings
        if settings.max_batch_cost is not None and request.cost > settings.max_batch_cost:
            self._reject(request, "max_batch_cost")
            raise InvalidInput(
                f"the item costs {request.cost:g}, and a batch may cost at most "
                f"{settings.max_batch_cost:g}"
            )
        if self.closing:
            self._reject(request, "closed")
            raise ServiceClosed("the batcher is closed, or about to be")
        if not self._runners.in_service:
            self._reject(request, "unavailable")
            raise self._unavailable()
        waiting = len(self._queue)
        if waiting >= settings.max_pending:
            self._reject(request, "queue_full")
            raise Overloaded(
                f"the queue is full: {waiting} items wait, max_pending={settings.max_pending}",
                estimated_wait=self._estimated_wait(request),
            )
        if settings.max_wait is not None and not self._runners.idle:
            wait = self._estimated_wait(request)
            if wait > settings.max_wait:
                self._reject(request, "max_wait")
                raise Overloaded(
                    f"the wait would be about {wait:.3g} s, max_wait={settings.max_wait:g} s",
                    estimated_wait=wait,
                )

    def reject(self, request: ItemInfo, cause: Rejection) -> None:
        """Count a request that was refused before it came here."""
        with self._lock:
            self._reject(request, cause)

    def _reject(self, request: ItemInfo, cause: Rejection) -> None:
        request.rejected = cause
        self.tally.rejected(cause)

    def _estimated_wait(self, request: Request) -> float:
        """Seconds that a request which comes now is likely to wait for its batch to begin."""
        self._queue.push(request)
        before = self._queue.batches_before(request)
        self._queue.discard(request)
        seconds = self.tally.batch_seconds
        now = monotonic()
        current = min((one.began + seconds - now for one in self._runners.busy), default=0.0)
        return max(current, 0.0) + before * seconds / max(1, self._runners.in_service)

    def discard(self, request: Request) -> bool:
        """Its caller waits no more; whether it was in the queue: then it is never computed."""
        # Asked without the lock. The garbage collector may come while this thread holds it, close a
        # coroutine that was left behind, and so come here: for a request that no queue keeps, or
        # for one whose task was cancelled when its loop was closed.
        if request not in self._queue:
            return False
        if not self._lock.acquire(blocking=not request.waker.finished):
            return False  # it is `done`, and passed over when its turn comes
        try:
            found = self._queue.discard(request)
            self._check_drained()
        finally:
            self._lock.release()
        return found

    # `max_queue_delay`: as long as requests wait, a timer goes off when the next of them is due.

    def _is_due(self) -> bool:
        """Whether there is a batch for an idle runner."""
        return len(self._queue) > 0 and (not self._may_fill() or self._queue.full())

    def _may_fill(self) -> bool:
        """Whether batches that are not full are to wait for more."""
        delay, waiting = self._settings.max_queue_delay, len(self._queue)
        if not delay or self.closing or waiting >= self._settings.max_pending:  # no more can come
            return False
        return not self._delay.is_due()

    def _flush_at(self, waker: Waker, at: float) -> None:
        call_later(max(0.0, at - monotonic()), partial(self._flush, waker, at))

    def _flush(self, waker: Waker, at: float) -> None:
        with self._lock:
            started = self._start_due_on(waker)
            flush_at = self._delay.fired(waker, at)
        for runner in started:
            runner.start()
        if flush_at is not None:
            self._flush_at(waker, flush_at)

    # Runners; from their workers.

    def _start_due(self) -> list[Runner]:
        """Take idle runners for what is to run now; whoever calls starts them, without the lock."""
        if not (self._runners.idle and self._is_due()):
            return []
        return self._runners.start(self._queue.batches() - self._runners.started)

    def _start_due_on(self, waker: Waker) -> list[Runner]:
        """The same, on the thread of a loop of which perhaps nobody waits any more."""
        return self._start_due()

    def take(self, runner: Runner) -> list[Request]:
        live: list[Request] = []
        with self._lock:
            self._runners.started -= 1
            while runner.in_service:
                pass_over(self._queue, self._settings.max_batch_size, self.tally)
                batch = self._queue.pop_batch(full=self._may_fill())
                now = monotonic()
                live = [one for one in batch if one.deadline > now and not one.done]
                if len(live) < len(batch):
                    for request in batch:
                        # Their timers are about to say so.
                        request.overdue = request.deadline <= now
                if live:
                    runner.batch = live  # here, so that `close` finds it in queue or batch
                    self.tally.began(live, now)
                if live or not batch:
                    break
            # It may have taken less than was thought: keys, costs and learned sizes.
            started = self._start_due() if self._runners.idle else ()
        for other in started:
            other.start()
        return live

    def out_of_memory(self, requests: Sequence[Request]) -> None:
        with self._lock:
            self._sizes.out_of_memory(requests[0].key, len(requests))

    def ended(self, runner: Runner, batch: Sequence[Request], parts: Sequence[Part]) -> bool:
        with self._lock:
            self._batch_ended(runner, batch, parts)
            if runner.in_service and self._is_due():
                self._runners.started += 1
                return True
            self._untold += 1
            self._release(runner)
        return False

    def told(self) -> None:
        with self._lock:
            self._untold -= 1
            self._check_drained()

    def _batch_ended(self, runner: Runner, batch: Sequence[Request], parts: Sequence[Part]) -> None:
        self.tally.ended(batch, monotonic() - runner.began)
        for part in parts:
            if part.error is None:
                self._sizes.succeeded(part.requests[0].key, len(part.requests))

    def _release(self, runner: Runner) -> None:
        self._runners.release(runner)
        self._check_drained()

    def _give_back(self, batch: Sequence[Request]) -> list[Request]:
        """Those of a batch that has come to nothing wait again; returns who did so before."""
        again = [one for one in batch if not (one.retried or one.done or one.waker.finished)]
        given_up = [request for request in batch if request.retried]
        self.tally.lost(len(batch), again=len(again))
        for request in again:
            request.retried = True
        self._queue.push_front(again)
        self._delay.put_back()
        return given_up

    def lost(self, runner: Runner, batch: Sequence[Request], error: BaseException) -> None:
        cause = error if error.__cause__ is None else error.__cause__
        failure = f"; the last one failed with {in_words(cause)}"
        with self._lock:
            given_up = self._give_back(batch)
            self._runners.busy.discard(runner)  # not to be started before it is out of service
            self._last_failure = failure
        deliver_soon([Part(given_up, error=cause)])
        runner.fail(error)
        # Which need not have come of it: it may have been out of service before.
        self.runners_changed()

    def refused(self, runner: Runner, error: BaseException) -> None:
        with self._lock:
            self._runners.started -= 1
            self._runners.release(runner)
            stranded = self._queue.clear()
            self._check_drained()
        deliver_soon([Part(stranded, error=error)])

    # The end.

    def close(self, *, error: BaseException | None = None, running: bool = False) -> None:
        """Take no more requests.

        Args:
            error: What those that wait get; None: they run.
            running: Give it to those in running batches as well, and cancel these.
        """
        with self._lock:
            self.closing = True
            failed = [] if error is None else self._queue.clear()
            cancelled = list(self._runners.busy) if running else []
            failed += [request for runner in cancelled for request in runner.batch]
            started = self._start_due()
            self._check_drained()
        for runner in started:
            runner.start()
        # They have this error before their batch has that of its cancellation.
        deliver_soon([Part(failed, error=error)])
        for runner in cancelled:
            runner.cancel()

    def _check_drained(self) -> None:
        over = not (self._runners.busy or self._untold or len(self._queue))
        if self.closing and over and self.drained.running():
            self.drained.set_result(None)

    def forget_after_fork(self) -> None:
        """What ran and who waited stayed in the parent; so did who may have held the lock."""
        self._lock = threading.Lock()
        self.drained = running_future()
        self._queue.clear()
        self._delay.clear()
        self.tally.in_flight = self._untold = 0
        self._runners.release_all()  # and refused by their executor, which has no threads here
        self._check_drained()

    # Who looks on.

    def add_observer(self, observer: BatchObserver) -> None:
        with self._lock:
            self.observers = with_observer(self.observers, observer)

    def remove_observer(self, observer: BatchObserver) -> None:
        with self._lock:
            self.observers = without_observer(self.observers, observer)

    def stats(self) -> BatcherStats:
        with self._lock:
            queued, tally = len(self._queue), self.tally.copy()
        return tally.stats(queued)


_schedulers: Registry[Scheduler] = Registry(Scheduler.forget_after_fork)
