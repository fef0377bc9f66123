"""`Scheduler`: which requests of a batcher run when, and on which runner."""

from collections import deque
from collections.abc import Hashable, Sequence
from functools import lru_cache, partial
from math import inf
from operator import attrgetter
from time import monotonic
from weakref import ref

from .._base.forking import ReentrantLock, Registry
from .._base.tracebacks import in_one_line, in_words
from ..errors import InvalidInput, Overloaded, ReplicaUnavailable, ServiceClosed, WorkerLost
from ..executor._loop_tasks import Repeating, call_later
from ..executor._observer import Observers
from ..executor._worker import MOST_LOSSES
from ..futures._future import running_future
from ..futures._wakeup import Waker
from ._observer import BatchObserver, is_failure
from ._queue import RequestGroup, RequestQueue
from ._replica import ReplicaFailed
from ._request import PartOutcome, Request, deliver_soon
from ._runner import BatchRun, Runner, RunningBatch
from ._settings import BatcherSettings
from ._stats import BatcherStats, Tally

_MOST_KEYS = 1024
"""A scheduler remembers at least this many keys."""

_LONGEST_TEXT = 200


class _Runners:
    """The runners of a scheduler, which serializes the calls.

    A runner without a replica never leaves service. Only a runner beside other idle ones counts as
    starting::

        out of service --update--> idle --pop--> busy; starting, if its replica is free
                                    ^             |      |
                                    |             |     take
                                    +--release--- busy <-+
                      replica failed or out of service: out of service
    """

    def __init__(self) -> None:
        self.all: list[Runner] = []
        self.idle: list[Runner] = []  # the latest last
        self.busy: set[Runner] = set()
        self.starting: Runner | None = None
        """The busy runner that is about to take a batch, before another idle runner starts."""
        self.none = True
        """Whether no runner can run a batch, now or soon."""

    @property
    def in_service(self) -> int:
        """How many runners can run a batch."""
        return sum(runner.in_service for runner in self.all)

    def update(self) -> None:
        """Find out which runners are in service: replicas have come or gone."""
        serving = [runner for runner in self.all if runner.in_service]
        self.none = not serving and not any(runner.returning for runner in self.all)
        self.idle = [runner for runner in serving if runner not in self.busy]

    def pop(self) -> Runner:
        """Make the idle runner with the least load busy; the caller starts it."""
        runner = self.idle[-1]  # the latest is warm
        if len(self.idle) > 1:
            if runner.load:
                runner = min(reversed(self.idle), key=attrgetter("load"))
            if not runner.load:
                self.starting = runner
        self.idle.remove(runner)
        self.busy.add(runner)
        return runner

    def started(self, runner: Runner) -> None:
        """Record that `runner` has looked for a batch."""
        if self.starting is runner:
            self.starting = None

    def release(self, runner: Runner, *, failed: bool) -> None:
        """Make `runner` idle, unless its replica has `failed` or is out of service."""
        runner.batch = None
        self.started(runner)
        self.busy.discard(runner)
        if runner.in_service and not failed and runner in self.all:
            self.idle.append(runner)


class Scheduler:
    """Takes requests and gives batches to runners; called from event loops and workers.

    The scheduler is greedy: a request waits only while no runner is idle, or for `max_queue_delay`.
    One lock guards all state, for microseconds at a time. The scheduler calls no user code under
    the lock. But destructors and signal handlers may run at any line, so the lock is re-entrant.

    If batches run on event loops, runners start on the loop of a waiting request, because any other
    loop may be about to end. A loop that ends cancels its tasks, and these report the end. A loop
    that is closed while its tasks run reports nothing: the scheduler checks for that when a request
    comes or goes.

    `on_loop` says whether runners run on event loops, not on workers.
    """

    def __init__(
        self, settings: BatcherSettings, observers: Observers[BatchObserver], *, on_loop: bool
    ) -> None:
        self._settings = settings
        self.observers = observers
        self._on_loop = on_loop
        self._may_stall = on_loop
        """Whether requests may wait for a batch that nobody reads, or whose loop was closed."""
        self._lock = ReentrantLock()
        self.group = RequestGroup(settings.max_batch_size)
        """The group of the requests without a key."""
        # A key may be forgotten while its requests wait: that only makes its next batch smaller.
        # The second argument makes `lru_cache` use one entry for equal keys, such as True and 1.
        remembered = lru_cache(max(_MOST_KEYS, settings.max_pending))
        self._groups = remembered(lambda key, _: RequestGroup(settings.max_batch_size, key))
        self._queue: RequestQueue[Request] = RequestQueue(
            max_batch_cost=settings.max_batch_cost,
            by_cost=settings.cost is not None,
            padded=settings.padded,
        )
        self._tally = Tally()
        self._due: deque[ref[Request]] = deque()
        """Requests that have waited long enough for a full batch; some have left the queue."""
        self._runners = _Runners()
        self._last_failure = ""
        self._delivering: set[RunningBatch] = set()
        """The ended batches whose outcomes are not posted yet."""
        self.closing = False
        self.drained = running_future()
        """Done when the batcher is closing and no request waits or runs."""
        _schedulers.add(self)

    def __len__(self) -> int:
        return len(self._queue)

    # Runners.

    @property
    def runners(self) -> Sequence[Runner]:
        """The runners in use."""
        return self._runners.all

    def use_runners(self, runners: list[Runner]) -> None:
        """Use these runners for the batches that begin from now on."""
        with self._lock:
            self._runners.all = runners
        self.runners_changed()

    def runners_changed(self) -> None:
        """Start runners, or fail all requests if no runner serves: replicas have come or gone."""
        stranded: list[Request] = []
        with self._lock:
            self._runners.update()
            if self._runners.none:
                stranded = self._queue.clear()
            self._check_drained()
        self._start_due()
        deliver_soon([PartOutcome(stranded, error=self._unavailable())])

    @property
    def in_service(self) -> bool:
        """Whether a runner can run a batch."""
        return self._runners.in_service > 0

    def _unavailable(self) -> ReplicaUnavailable:
        return ReplicaUnavailable(f"no replica is in service{self._last_failure}")

    def _start_due(self, here: Waker | None = None) -> None:
        """Start idle runners for the batches that are due; called without the lock.

        If batches run on event loops, runners start on the loop `here`.
        """
        # A started runner counts for the load of its replica before the next runner is chosen.
        while self._runners.idle and (runner := self._next_due(here)) is not None:
            runner.start()

    def _next_due(self, here: Waker | None) -> Runner | None:
        """Choose an idle runner for a batch that is due.

        Runners start one after the other: while one has not taken its batch, the next one starts
        only for a full batch. But if all replicas are busy with other calls, every idle runner
        starts, and the first replica that becomes free takes the batch.
        """
        with self._lock:
            if not (self._runners.idle and len(self._queue)):
                return None
            may_wait = self._runners.starting is not None or self._may_fill()
            if may_wait and not self._queue.full():
                return None
            if self._on_loop and not any(request.awaiter.waker is here for request in self._queue):
                self._ask_for_start()
                return None
            return self._runners.pop()

    def _ask_for_start(self) -> None:
        """Ask the loop of a waiting request to start runners."""
        for request in self._queue:
            waker = request.awaiter.waker
            waker.post(partial(self._start_due, waker))
            if not waker.finished:  # a closed loop does nothing: ask the next one
                return

    def _may_fill(self) -> bool:
        """Whether a batch that is not full waits for more requests."""
        if not self._settings.max_queue_delay or self.closing:
            return False
        while self._due and self._due[0]() not in self._queue:
            self._due.popleft()
        return len(self._queue) < self._settings.max_pending and not self._due

    # Requests.

    def put(self, request: Request) -> None:
        """Queue a request; called on the loop of its caller.

        Raises:
            InvalidInput, ServiceClosed, ReplicaUnavailable, Overloaded: The request is refused.
        """
        if self._on_loop and self._runners.busy:
            self._end_lost()
        with self._lock:
            self._check(request)
            self._queue.push(request)
        if self._settings.max_queue_delay:
            self._limit_delay(request)
        if self._runners.idle:
            self._start_due(request.awaiter.waker)
        if (self._may_stall or request.streams_outputs) and request in self._queue:
            stall_check = Repeating(self._settings.read_timeout, self.end_stalled)
            request.cancel_at_end(stall_check.cancel)

    def group_of(self, key: Hashable) -> RequestGroup:
        """The requests with this key; calls its `__hash__` and `__eq__`."""
        return self.group if key is None else self._groups(key, None)

    def _check(self, request: Request) -> None:
        settings, waiting = self._settings, len(self._queue)
        if settings.max_batch_cost is not None and request.cost > settings.max_batch_cost:
            request.refused = "max_batch_cost"
            most = f"{settings.max_batch_cost:g}"
            raise InvalidInput(
                f"the item costs {request.cost:g}, and a batch may cost at most {most}"
            )
        if self.closing:
            request.refused = "closed"
            raise ServiceClosed("the batcher is closed, or about to be")
        if self._runners.none:
            request.refused = "unavailable"
            raise self._unavailable()
        if waiting >= settings.max_pending:
            request.refused = "queue_full"
            words = f"the queue is full: {waiting} items wait, max_pending={settings.max_pending}"
            raise Overloaded(words, estimated_wait=self._estimated_wait(request))
        if settings.max_wait is None or self._runners.idle:
            return
        wait = self._estimated_wait(request)
        if wait > settings.max_wait:
            request.refused = "max_wait"
            words = f"the wait would be about {wait:.3g} s, max_wait={settings.max_wait:g} s"
            raise Overloaded(words, estimated_wait=wait)

    def submit(self, request: Request) -> None:
        """Count a request that has come, and its outcome when its caller has it or leaves."""
        # With this tally, because the batcher may be opened again before the end of a slow reader.
        end = partial(self._count_outcome, self._tally, request)
        with self._lock:
            self._tally.submitted += 1
            request.at_end = (*request.at_end, end)

    def _count_outcome(self, tally: Tally, request: Request, error: BaseException | None) -> None:
        if request.refused is None and isinstance(error, InvalidInput):
            request.refused = "invalid_input"  # the client's fault, and no failure of the service
        if error is None:
            request.outcome = "answered"
        elif request.refused is not None:
            request.outcome = "refused"
        elif request.outcome == "cancelled" and is_failure(error):
            # Its key, its cost or its pool has failed.
            request.outcome = "failed"
        failure = None
        if error is not None and request.outcome == "failed":
            # Not under the lock, because the user's `__str__` is called.
            failure = in_one_line(error)[:_LONGEST_TEXT]
        with self._lock:
            tally.left(request, failure)

    def _estimated_wait(self, request: Request) -> float:
        """About how many seconds `request`, which is not queued, would wait for its batch."""
        seconds, now = self._tally.batch_seconds, monotonic()
        current = min((batch.began + seconds - now for batch in self._running()), default=0.0)
        before = self._queue.batches_before(request)
        return max(current, 0.0) + before * seconds / max(1, self._runners.in_service)

    def discard(self, request: Request) -> bool:
        """Take a request, whose caller has left, out of the queue; False if it was not there."""
        # The garbage collector may close the caller's coroutine in the middle of another method.
        # The request is `done` then, and `take` drops it.
        if request not in self._queue or self._lock.held_here:
            return False
        with self._lock:
            found = self._queue.discard(request)
            self._check_drained()
        if found and self._on_loop:
            self._end_lost()
            # The loop of `request` may end before it starts the runners that it was asked for.
            self._start_due()
        return found

    def _limit_delay(self, request: Request) -> None:
        """Limit how long `request` waits for a full batch.

        A request with a deadline waits at most half of its timeout. It leaves at least two batch
        times before its deadline, because half of all batches take longer than usual.
        """
        delay = self._settings.max_queue_delay
        if request.deadline < inf:
            timeout = request.deadline - request.arrived
            delay = min(delay, timeout / 2, timeout - 2 * self._tally.batch_seconds)
        # Asyncio keeps a cancelled timer until its time, so the timer refers to the request weakly.
        ended = partial(self._delay_ended, ref(request))
        if delay > 0.0:
            request.cancel_at_end(call_later(delay, ended))
        else:
            ended()

    def _delay_ended(self, reference: ref[Request]) -> None:
        request = reference()
        if request is None or request not in self._queue:
            return
        with self._lock:
            self._due.append(reference)
        self._start_due(request.awaiter.waker)

    # Batches; called by runners.

    def take(self, batch: BatchRun) -> list[Request]:
        live: list[Request] = []
        skipped: list[Request] = []  # freed after the lock, because items may have destructors
        with self._lock:
            self._runners.started(batch.runner)
            while batch.runner.in_service:
                self._skip_late()
                taken = self._queue.pop_batch(full=self._may_fill())
                now = monotonic()
                live = [one for one in taken if one.deadline > now and not one.done]
                for request in taken if len(live) < len(taken) else ():
                    # The caller of a late request is about to get its error from a timer.
                    request.skipped = request.deadline <= now
                if live:
                    # Under the lock, so that `close` finds each request in the queue or a batch.
                    batch.requests = live
                    self._tally.began(live, now)
                if live or not taken:
                    break
                skipped += taken
        # The next runner may start, because this one has its batch.
        self._start_due()
        return live

    def _skip_late(self) -> None:
        """Skip the oldest requests that are too late, if other requests fill a batch.

        Under overload the oldest requests are about to expire. A batch of them would end after
        their deadlines, and so would each later batch: nearly every caller would get an error. So
        a request is skipped when its deadline is closer than the fastest recent batch time. Its
        timer fails it, as if it had expired in the queue.

        No request is skipped if items have costs or several keys wait, because its own batch may be
        faster. Nor is a stream, whose caller gets outputs long before the end.
        """
        queue = self._queue
        while len(queue) > self._settings.max_batch_size and queue.is_uniform:
            oldest = queue.oldest
            if oldest is None or oldest.deadline == inf or oldest.streams_outputs:
                return
            if oldest.deadline > monotonic() + self._tally.quickest:
                return
            queue.discard(oldest)
            oldest.skipped = True

    def ended(
        self,
        batch: RunningBatch,
        outcomes: list[PartOutcome],
        lost: Sequence[Request],
        error: BaseException | None,
    ) -> None:
        failed = error is not None and batch.runner.is_replica_failure(error)
        # None if the replica was out of service, and no request has run.
        cause = error.__cause__ if isinstance(error, ReplicaFailed) else error
        failed_with = in_words(cause) if failed and cause is not None else ""
        with self._lock:
            for requests in batch.too_large:
                requests[0].group.out_of_memory(len(requests))
            for outcome in outcomes:
                if outcome.error is None and outcome.requests:
                    outcome.requests[0].group.succeeded(len(outcome.requests))
            ran = len(batch.requests) - len(lost)
            self._tally.ended(ran, monotonic() - batch.began)
            if lost:
                outcomes.append(PartOutcome(self._give_back(lost, cause), error=cause))
            if error is not None and not failed and not batch.requests:
                # If the requests stayed, each next run would fail in the same way.
                outcomes.append(PartOutcome(self._queue.clear(), error=error))
            self._delivering.add(batch)
            if failed_with:
                self._last_failure = f"; the last one failed with {failed_with}"
            self._runners.release(batch.runner, failed=failed)
        # Runners start before the delivery, because waking a loop takes longer than a start.
        self._start_due()
        try:
            if failed and error is not None:
                batch.runner.fail(error)
                # Also called here, because `fail` does nothing if the replica was out of service
                # before.
                self.runners_changed()
            deliver_soon(outcomes)
        finally:
            self._delivering.discard(batch)
            if self.closing:  # read last, so that `close` or this line sees the end
                with self._lock:
                    self._check_drained()

    def _give_back(self, lost: Sequence[Request], error: BaseException | None) -> list[Request]:
        """Queue the requests of a lost batch again; return those that were tried often enough.

        Without an `error` the requests have not run.
        """
        given_up: list[Request] = []
        again: list[Request] = []
        for request in lost:
            if isinstance(error, WorkerLost):
                request.losses += 1
                if request.losses > MOST_LOSSES // 2:
                    # The request runs alone from now on, because one of the lost requests may end
                    # hosts.
                    request.group = RequestGroup(1, request.key)
            elif error is not None:
                request.losses += MOST_LOSSES // 2 + 1  # the second failed replica is the last
            if request.losses > MOST_LOSSES:
                given_up.append(request)
            elif not (request.done or request.awaiter.waker.finished):
                again.append(request)
        self._queue.push_front(again)
        if self._settings.max_queue_delay:
            self._due.extend(map(ref, again))  # they have waited before
        return given_up

    def _running(self) -> list[RunningBatch]:
        with self._lock:
            return [runner.batch for runner in self._runners.busy if runner.batch is not None]

    def _end_lost(self) -> None:
        """End the batches whose loop was closed while they ran."""
        for batch in self._running():
            batch.end_lost()

    def end_stalled(self) -> None:
        """End the batches whose loop was closed, or whose outputs no caller reads.

        Unread batches are ended only if requests or the closing of the batcher wait for them. Each
        waiting request calls this method from time to time: perhaps no other event comes.
        """
        if self._on_loop:
            self._end_lost()
        if self.closing or (len(self._queue) and not self._runners.idle):
            for batch in self._running():
                batch.end_stalled(self._settings.read_timeout)

    # The end.

    def close(self, *, error: BaseException | None = None, running: bool = False) -> None:
        """Take no more requests.

        Args:
            error: Fails the requests that wait. None: they run.
            running: Fail the requests of running batches as well, and cancel these.
        """
        self.closing = True
        # The garbage collector may close a coroutine, and so leave `async with`, in the middle of
        # another method. The requests run to their end then.
        if self._lock.held_here:
            return
        if self._on_loop:
            self._end_lost()
        with self._lock:
            lost = [one for one in self._queue if one.awaiter.waker.finished]
            for request in lost:
                self._queue.discard(request)  # no caller waits, because the loop was closed
            failed = [] if error is None else self._queue.clear()
            cancelled = self._running() if running else []
            failed += [request for batch in cancelled for request in batch.requests]
            self._check_drained()
        self._start_due()
        # Before the cancellation: the callers get this error, not that of the cancellation.
        deliver_soon([PartOutcome(failed, error=error)])
        for batch in cancelled:
            batch.cancel()

    def _check_drained(self) -> None:
        if not self.closing or self._runners.busy or self._delivering:
            return
        # `discard` leaves a `done` request in the queue if this thread held the lock.
        if all(request.done for request in self._queue) and self.drained.running():
            self.drained.set_result(None)

    def forget_after_fork(self) -> None:
        """Start anew in a child process: the requests and batches stay in the parent."""
        self.drained = running_future()
        self._queue.clear()
        self._due.clear()
        self._tally = type(self._tally)()
        self._delivering.clear()
        for runner in (*self._runners.busy,):
            self._runners.release(runner, failed=False)
        self._check_drained()

    @property
    def _queued(self) -> int:
        # `discard` leaves a `done` request in the queue if this thread held the lock.
        return sum(not request.done for request in self._queue)

    def stats(self) -> BatcherStats:
        """A snapshot."""
        with self._lock:
            return self._tally.stats(self._queued)


_schedulers: Registry[Scheduler] = Registry(Scheduler.forget_after_fork)
