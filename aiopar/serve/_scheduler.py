"""The scheduler of a batcher: which requests run when, and on which runner."""

from collections import deque
from collections.abc import Hashable, Sequence
from functools import lru_cache, partial
from math import inf
from operator import attrgetter
from time import monotonic
from weakref import ref

from .._base.forking import ReentrantLock, Registry
from .._base.tracebacks import in_words
from ..errors import InvalidInput, Overloaded, ReplicaUnavailable, ServiceClosed, WorkerLost
from ..executor._loop_tasks import Repeating, call_later
from ..executor._observer import Observers
from ..executor._worker import MOST_LOSSES
from ..futures._future import running_future
from ..futures._wakeup import Waker
from ._observer import BatchObserver, ItemInfo
from ._outcomes import Part, deliver_soon
from ._queue import RequestGroup, RequestQueue
from ._replica import ReplicaFailed
from ._request import Request
from ._runner import BatchResult, BatchRun, Runner
from ._settings import BatcherSettings
from ._stats import BatcherStats, Rejection, Tally

_MOST_KEYS = 1024
"""How many keys are remembered; or as many as requests may wait, if that is more."""


class _Runners:
    """The runners of a scheduler, which serializes the calls."""

    def __init__(self) -> None:
        self.all: list[Runner] = []
        self.idle: list[Runner] = []  # the latest last
        self.busy: set[Runner] = set()
        self.starting: set[Runner] = set()
        """Busy runners that take their batch at once: their replica was free when they started."""
        self.in_service = 0
        """How many runners can run a batch."""
        self.none = True
        """Whether no runner can run a batch, now or soon."""

    def update(self) -> None:
        """Find out which runners are in service: replicas have come or gone."""
        serving = [runner for runner in self.all if runner.in_service]
        self.in_service = len(serving)
        self.none = not serving and not any(runner.returning for runner in self.all)
        self.idle = [runner for runner in serving if runner not in self.busy]

    def pop(self) -> Runner:
        """Make the idle runner with the least load busy; the caller starts it."""
        runner = self.idle[-1]  # the latest is warm
        if runner.load:
            runner = min(reversed(self.idle), key=attrgetter("load"))
        self.idle.remove(runner)
        self.busy.add(runner)
        if not runner.load:
            self.starting.add(runner)
        return runner

    def release(self, runner: Runner, *, failed: bool) -> None:
        """Make `runner` idle, unless its replica has `failed` or is out of service."""
        runner.batch = None
        self.busy.discard(runner)
        if runner.in_service and not failed and runner in self.all:
            self.idle.append(runner)

    def release_all(self) -> None:
        """No batch runs any more."""
        for runner in self.busy:
            runner.batch = None
        self.busy.clear()
        self.starting.clear()
        self.update()


class Scheduler:
    """Takes requests, and gives batches to runners; event loops and workers use it together.

    It is greedy: a request waits only while no runner is idle, or for `max_queue_delay`. One lock
    guards all state, and is held for microseconds; no user code runs under it.

    If batches run on event loops, runners start on the loop of a waiting request, because any other
    loop may be about to end. A loop that ends cancels its tasks, which report that. A loop that is
    closed while its tasks run reports nothing: the scheduler checks for that when a request comes
    or goes.

    Args:
        settings: The options of the batcher.
        observers: The observers of the batcher.
        on_loop: Whether runners run on event loops, not on workers.
    """

    def __init__(
        self, settings: BatcherSettings, observers: Observers[BatchObserver], *, on_loop: bool
    ) -> None:
        self._settings = settings
        self.observers = observers
        self._on_loop = on_loop
        # Re-entrant: a signal handler that interrupts this thread may ask for the statistics.
        self._lock = ReentrantLock()
        self.group = RequestGroup(settings.max_batch_size)
        """The requests without a key."""
        # A key that is forgotten while its requests wait costs nothing but a smaller batch.
        # Two arguments: for a single one, `lru_cache` tells True from 1.
        remembered = lru_cache(max(_MOST_KEYS, settings.max_pending))
        self._groups = remembered(lambda key, _: RequestGroup(settings.max_batch_size, key))
        self._queue: RequestQueue[Request] = RequestQueue(
            max_batch_cost=settings.max_batch_cost,
            by_cost=settings.cost is not None,
            padded=settings.padded,
        )
        self._tally = Tally()
        self._due: deque[ref[Request]] = deque()
        """Requests that have waited for `max_queue_delay`; some of them have left the queue."""
        self._runners = _Runners()
        self._last_failure = ""
        self._undelivered = 0
        """How many ended batches have not posted their outcomes yet."""
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
        deliver_soon([Part(stranded, error=self._unavailable())])

    @property
    def in_service(self) -> bool:
        """Whether a runner can run a batch."""
        return self._runners.in_service > 0

    def _unavailable(self) -> ReplicaUnavailable:
        return ReplicaUnavailable(f"no replica is in service{self._last_failure}")

    def _start_due(self, here: Waker | None = None) -> None:
        """Start idle runners for the batches that are due; called without the lock.

        Args:
            here: The loop of this thread, if runners may start there.
        """
        # One after the other: each is part of the load of its replica before the next is chosen.
        while (runner := self._next_due(here)) is not None:
            runner.start()

    def _next_due(self, here: Waker | None) -> Runner | None:
        """Choose an idle runner for a batch that is due.

        If all replicas are busy with other calls, every idle runner starts: the first replica that
        is free takes the batch.
        """
        with self._lock:
            if not (self._runners.idle and self._is_due()):
                return None
            if self._on_loop and not any(request.awaiter.waker is here for request in self._queue):
                self._ask_for_start()
                return None
            starting = len(self._runners.starting)
            # Each group makes a batch at least: more groups need not be counted.
            return self._runners.pop() if self._queue.batches(starting + 1) > starting else None

    def _ask_for_start(self) -> None:
        """Ask the loop of a waiting request to start runners."""
        for request in self._queue if self._runners.idle else ():
            waker = request.awaiter.waker
            waker.post(partial(self._start_due, waker))
            if not waker.finished:  # a closed loop does nothing: ask the next one
                return

    def _is_due(self) -> bool:
        """Whether there is a batch for an idle runner."""
        return len(self._queue) > 0 and (not self._may_fill() or self._queue.full())

    def _may_fill(self) -> bool:
        """Whether batches that are not full wait for more requests."""
        if not self._settings.max_queue_delay or self.closing:
            return False
        while self._due and self._due[0]() not in self._queue:
            self._due.popleft()
        return len(self._queue) < self._settings.max_pending and not self._due

    # Requests.

    def put(self, request: Request) -> None:
        """Queue a request; on the thread of its caller's loop.

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
        if (self._on_loop or request.streams_outputs) and request in self._queue:
            stall_check = Repeating(self._settings.read_timeout, self.end_stalled)
            request.cancel_at_end(stall_check.cancel)

    def group_of(self, key: Hashable) -> RequestGroup:
        """The requests with this key; calls its `__hash__` and `__eq__`."""
        return self.group if key is None else self._groups(key, None)

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
        if self._runners.none:
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
        self._tally.rejected(cause)

    def _estimated_wait(self, request: Request) -> float:
        """Seconds until the batch of a request that comes now is likely to begin."""
        seconds, now = self._tally.batch_seconds, monotonic()
        running = [one.batch.began for one in self._runners.busy if one.batch is not None]
        current = min((began + seconds - now for began in running), default=0.0)
        before = self._queue.batches_before(request)
        return max(current, 0.0) + before * seconds / max(1, self._runners.in_service)

    def discard(self, request: Request) -> bool:
        """Take a request out of the queue: its caller has left. False if it was not there."""
        if request not in self._queue:
            return False
        if self._lock.held_here:  # the collector closes a coroutine of a closed loop
            return False  # the request is `done`, and skipped when its turn comes
        with self._lock:
            found = self._queue.discard(request)
            self._check_drained()
        if found and self._on_loop:
            self._end_lost()
            with self._lock:
                # Runners may have been about to start on its loop, which may end.
                self._ask_for_start()
        return found

    def _limit_delay(self, request: Request) -> None:
        """Set the timer after which `request` no longer waits for a full batch.

        With a deadline it waits at most half of its timeout, and leaves at least two batch times
        before the deadline: half of all batches take longer than usual.
        """
        delay = self._settings.max_queue_delay
        if request.deadline < inf:
            timeout = request.deadline - request.arrived
            delay = min(delay, timeout / 2, timeout - 2 * self._tally.batch_seconds)
        # Weakly: asyncio keeps a cancelled timer until it is due.
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
        skipped: list[Request] = []  # freed without the lock: an item may have a destructor
        with self._lock:
            self._runners.starting.discard(batch.runner)
            while batch.runner.in_service:
                self._skip_late()
                taken = self._queue.pop_batch(full=self._may_fill())
                now = monotonic()
                live = [one for one in taken if one.deadline > now and not one.done]
                for request in taken if len(live) < len(taken) else ():
                    # The timer of a late request is about to tell its caller.
                    request.skipped = request.deadline <= now
                if live:
                    # Under the lock: `close` finds each request in the queue or in a batch.
                    batch.requests = live
                    self._tally.began(live, now)
                if live or not taken:
                    break
                skipped += taken
        # Keys, costs and learned sizes may have made the batch smaller than was estimated.
        if self._runners.idle:
            self._start_due()
        return live

    def _skip_late(self) -> None:
        """Skip requests at the head of the queue that are too late, if others fill a batch.

        Under overload the oldest requests are about to expire. If a batch began with them it would
        end after their deadline, and in the end no caller would be answered. A request is skipped
        when its deadline is closer than the fastest recent batch time. Its timer tells its caller,
        as if it had expired in the queue.

        Only if all requests are alike: batches of one key say nothing about those of another. And
        not for streams, whose first output comes long before the last.
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

    def ended(self, batch: BatchRun, result: BatchResult) -> None:
        error = result.error
        if isinstance(error, ReplicaFailed):
            error = error.__cause__  # None: the replica was out of service, and no request has run
        with self._lock:
            for requests in result.too_large:
                requests[0].group.out_of_memory(len(requests))
            for part in result.parts:
                if part.error is None and part.requests:
                    part.requests[0].group.succeeded(len(part.requests))
            ran = len(batch.requests) - len(result.lost)
            self._tally.ended(ran, monotonic() - batch.began)
            given_up = self._give_back(result.lost, error)
            self._undelivered += 1
            if result.replica_failed and error is not None:
                self._last_failure = f"; the last one failed with {in_words(error)}"
            self._runners.release(batch.runner, failed=result.replica_failed)
        self._start_due()
        deliver_soon([Part(given_up, error=error)])
        if result.replica_failed and result.error is not None:
            batch.runner.fail(result.error)
            # Here too: `fail` does nothing if the replica was out of service before.
            self.runners_changed()

    def _give_back(self, lost: Sequence[Request], error: BaseException | None) -> list[Request]:
        """Queue requests again; returns those that were tried often enough.

        Args:
            lost: The requests.
            error: Their error. None: they have not run.
        """
        given_up: list[Request] = []
        again: list[Request] = []
        for request in lost:
            if isinstance(error, WorkerLost):
                request.losses += 1
                if request.losses > MOST_LOSSES // 2:
                    # It runs alone: one of them may be what ends hosts.
                    request.group = RequestGroup(1, request.key)
                often = request.losses > MOST_LOSSES
            else:
                often = error is not None and request.retried
                request.retried = request.retried or error is not None
            if often:
                given_up.append(request)
            elif not (request.done or request.awaiter.waker.finished):
                again.append(request)
        self._tally.lost(len(lost), again=len(again))
        self._queue.push_front(again)
        if self._settings.max_queue_delay:
            self._due.extend(map(ref, again))  # they have waited before
        return given_up

    def delivered(self) -> None:
        with self._lock:
            self._undelivered -= 1
            self._check_drained()

    def not_begun(self, runner: Runner, error: BaseException | None) -> None:
        stranded: list[Request] = []
        failed = error is not None and runner.is_replica_failure(error)
        with self._lock:
            self._runners.starting.discard(runner)
            self._runners.release(runner, failed=failed)
            if error is not None and not failed:
                # The next run would fail in the same way, and so on without end.
                stranded = self._queue.clear()
            self._check_drained()
        self._start_due()
        deliver_soon([Part(stranded, error=error)])
        if failed and error is not None:
            runner.fail(error)
            self.runners_changed()

    def _running(self) -> list[BatchRun]:
        with self._lock:
            return [runner.batch for runner in self._runners.busy if runner.batch is not None]

    def _end_lost(self) -> None:
        """End the batches whose loop was closed while they ran."""
        for batch in self._running():
            if batch.loop_lost:
                batch.lose()

    def end_stalled(self) -> None:
        """End batches that would never end: their loop was closed, or no caller reads them.

        Unread batches are ended only if requests or the closing of the batcher wait for them.
        Waiting requests call this from time to time, because nothing else may happen.
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
        if self._lock.held_here:  # the collector closes a coroutine of a closed loop
            return
        if self._on_loop:
            self._end_lost()
        with self._lock:
            self.closing = True
            lost = [one for one in self._queue if one.awaiter.waker.finished]
            for request in lost:
                self._queue.discard(request)  # its loop is closed: no caller waits
            failed = [] if error is None else self._queue.clear()
            batches = [runner.batch for runner in self._runners.busy if runner.batch is not None]
            cancelled = batches if running else []
            failed += [request for batch in cancelled for request in batch.requests]
            self._check_drained()
        self._start_due()
        # Before the cancellation, whose error the callers would get otherwise.
        deliver_soon([Part(failed, error=error)])
        for batch in cancelled:
            batch.cancel()

    def _check_drained(self) -> None:
        if not self.closing or self._runners.busy or self._undelivered:
            return
        # A request that is `done` may have been left while this thread held the lock (`discard`).
        if all(request.done for request in self._queue) and self.drained.running():
            self.drained.set_result(None)

    def forget_after_fork(self) -> None:
        """In a child process: requests and batches stayed in the parent."""
        self.drained = running_future()
        self._queue.clear()
        self._due.clear()
        self._tally.in_flight = self._undelivered = 0
        self._runners.release_all()  # the executor, which has no threads here, refuses them
        self._check_drained()

    def stats(self) -> BatcherStats:
        """A snapshot."""
        with self._lock:
            return self._tally.stats(len(self._queue))


_schedulers: Registry[Scheduler] = Registry(Scheduler.forget_after_fork)
