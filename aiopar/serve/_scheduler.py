"""Which requests run when, where batches are tasks on the event loops of their callers."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic
from weakref import WeakKeyDictionary

from .._base.forking import Registry
from .._base.tracebacks import in_words
from ..errors import InvalidInput, Overloaded, ReplicaUnavailable, ServiceClosed
from ..executor._loop_tasks import call_later
from ..futures._future import running_future
from ..futures._wakeup import Waker
from ._observer import BatchObserver, BatchObservers, ItemInfo, with_observer, without_observer
from ._outcomes import Part, deliver_soon
from ._queue import RequestQueue
from ._request import Request
from ._runner import AsyncRunner, Runner
from ._settings import BatcherSettings
from ._stats import BatcherStats, Rejection, Tally
from ._streaming import StreamRequest


def pass_over(queue: RequestQueue[Request], batch_size: int, tally: Tally) -> None:
    """Let those at the head of the queue who are too late make room, where others fill a batch.

    Under overload the oldest are about to expire: begun with them, each batch would end past their
    deadline, and in the end nobody would be answered. Too late is who has less time left than the
    quickest of the latest batches took. Their timers tell them, as those who expire in the queue.

    Only where all are alike: what batches of one key took says nothing of those of another. And
    not of streams, whose first part comes long before the last.
    """
    while len(queue) > batch_size and queue.is_uniform:
        oldest = queue.oldest
        if oldest is None or oldest.deadline == inf or isinstance(oldest, StreamRequest):
            return
        if oldest.deadline > monotonic() + tally.quickest:
            return
        queue.discard(oldest)
        oldest.overdue = True


_MOST_KEYS = 1024
_FIRST_TRIAL = 32
_LAST_TRIAL = 4096


@dataclass(slots=True)
class _Size:
    limit: int
    """The most items that a batch may have."""
    good: int = 0
    """The most that have fitted since the last that did not."""
    successes: int = 0
    """Batches as large as the limit that fitted, since it was set."""
    trial: int = _FIRST_TRIAL
    """After how many of them a larger batch is tried."""


class LearnedSizes:
    """The most items of a batch, for each key that has run out of memory.

    Halved when a batch does not fit. It grows by an eighth after 32 batches that did; if that was
    too much, it falls back to what fitted, and the next trial comes after twice as many. When as
    many of `max_batch_size` have fitted again, the key is forgotten. Its owner holds a lock around
    each call.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        # As many as there are shapes, adapters, ...: the one that failed longest ago is forgotten.
        self._sizes: OrderedDict[Hashable, _Size] = OrderedDict()

    def limit(self, key: Hashable) -> int:
        """The most items that a batch of `key` may have."""
        size = self._sizes.get(key)
        return self._max_batch_size if size is None else size.limit

    def out_of_memory(self, key: Hashable, count: int) -> None:
        """A batch of `count` items did not fit."""
        size = self._sizes.setdefault(key, _Size(count))
        self._sizes.move_to_end(key)
        if len(self._sizes) > _MOST_KEYS:
            self._sizes.popitem(last=False)
        if count <= size.limit:
            grew = count // 2 <= size.good < count
            size.limit = size.good if grew and size.good else max(1, count // 2)
            size.trial = min(size.trial * 2, _LAST_TRIAL) if grew and size.good else _FIRST_TRIAL
            size.good = min(size.good, size.limit)
            size.successes = 0

    def succeeded(self, key: Hashable, count: int) -> None:
        """A batch of `count` items fitted."""
        size = self._sizes.get(key)
        if size is None:
            return
        size.good = max(size.good, count)
        if count < size.limit:  # says nothing of a larger one
            return
        size.successes += 1
        if size.successes >= size.trial:
            size.successes = 0
            if size.limit >= self._max_batch_size:
                del self._sizes[key]
            size.limit = min(size.limit + max(1, size.limit // 8), self._max_batch_size)


_SHORTEST = 0.001
"""Seconds from one timer to the next: loops are no more exact, and to wait is to cost nothing."""
_SHORTEST_EACH = 2e-5
"""The same for each of those that wait, where all of them are to be looked at."""


class QueueDelay:
    """Until when batches that are not full wait, and the timers that end the wait.

    A request waits `delay` seconds, but with a deadline no longer than half of its timeout, and not
    so long that less than two batch times are left: half of the batches take longer than usual.

    Each loop from which a request comes has a timer of its own: another may be closed, and its
    timer gone. It has no lock: its owner lets one thread in at a time.
    """

    def __init__(self, delay: float, queue: RequestQueue[Request], tally: Tally) -> None:
        self._delay = delay
        self._queue = queue
        self._tally = tally
        self._urgent = inf
        """When the first of those with a deadline is due, or earlier: some may have left."""
        self._put_back = False
        """Whether some of those that wait were taken before."""
        self._timers: WeakKeyDictionary[Waker, float] = WeakKeyDictionary()
        """When the next timer of each loop goes off, if one is about to."""

    def put(self, request: Request) -> float | None:
        """It is in the queue; when its loop has to set off a timer, unless it has one.

        Who is due at once needs none: an idle runner is started, or a busy one takes it.
        """
        urgent = inf if request.deadline == inf else self._urgent_at(request)
        if len(self._queue) == 1:
            self._urgent, self._put_back = urgent, False
        else:
            self._urgent = min(self._urgent, urgent)
        due = min(request.arrived + self._delay, urgent)
        return self._timer(request.waker, due) if due > monotonic() else None

    def put_back(self) -> None:
        """Others are in the queue, which had been taken from it: they have waited for company."""
        self._put_back = True

    def is_due(self) -> bool:
        """Whether somebody has waited long enough."""
        oldest, now = self._queue.oldest, monotonic()
        if oldest is None or now - oldest.arrived >= self._delay or self._put_back:
            return True
        if now < self._urgent:
            return False
        urgent = inf
        for at in self._times(now):
            if at <= now:
                return True
            urgent = min(urgent, at)
        self._urgent = urgent
        return False

    def fired(self, waker: Waker, at: float) -> float | None:
        """The timer for `at` has gone off; when the next one has to, if there is any."""
        if self._timers.get(waker) != at:  # another has taken its place, for an earlier time
            return None
        del self._timers[waker]
        oldest, now = self._queue.oldest, monotonic()
        if oldest is None:
            return None
        # Who is due by now waits for a runner, who takes it; the timer is for those behind it.
        due = oldest.arrived + self._delay
        due = due if due > now else now + self._delay
        urgent, soonest = self._urgent, now + _SHORTEST
        if urgent <= now:
            urgent = min((at for at in self._times(now) if at > now), default=inf)
            soonest = now + max(_SHORTEST, _SHORTEST_EACH * len(self._queue))
        return self._timer(waker, max(min(due, urgent), soonest))

    def clear(self) -> None:
        """There are no timers any more."""
        self._timers.clear()

    def _timer(self, waker: Waker, at: float) -> float | None:
        if at >= self._timers.get(waker, inf):
            return None
        self._timers[waker] = at
        return at

    def _times(self, now: float) -> Iterator[float]:
        """When those are due who have a deadline that has not passed."""
        return (self._urgent_at(one) for one in self._queue if now < one.deadline < inf)

    def _urgent_at(self, request: Request) -> float:
        left = max((request.deadline - request.arrived) / 2, 2 * self._tally.batch_seconds)
        return request.deadline - left


class RunnerSet:
    """Runners, each idle, busy or out of service.

    It has no lock: its owner lets one thread in at a time.
    """

    __slots__ = ("_all", "busy", "idle", "in_service", "started")

    def __init__(self) -> None:
        self._all: list[Runner] = []
        self.idle: list[Runner] = []  # the last to come is the first to go: it is warm
        self.busy: set[Runner] = set()
        self.started = 0
        """How many of the busy ones have been started, and have not taken their batch yet."""
        self.in_service = 0
        """How many there are, idle or busy."""

    def add(self, runners: Iterable[Runner]) -> None:
        """Have these too; `update` must follow."""
        self._all += runners

    def update(self) -> None:
        """Replicas have come or gone."""
        serving = [runner for runner in self._all if runner.in_service]
        self.in_service = len(serving)
        self.idle = [runner for runner in serving if runner not in self.busy]

    def start(self, count: int) -> list[Runner]:
        """Up to so many idle ones, which are busy now: the caller starts them."""
        chosen: list[Runner] = []
        while self.idle and len(chosen) < count:
            runner = self.idle.pop()
            self.busy.add(runner)
            chosen.append(runner)
        self.started += len(chosen)
        return chosen

    def release(self, runner: Runner) -> None:
        """`runner` has no batch any more."""
        self.busy.discard(runner)
        if runner.in_service:
            self.idle.append(runner)

    def replace(self, runner: Runner, successor: Runner) -> None:
        """Have this one instead of another, which was busy and is in service."""
        self._all[self._all.index(runner)] = successor
        self.busy.discard(runner)
        self.idle.append(successor)

    def release_all(self) -> None:
        """What they ran has gone."""
        self.busy.clear()
        self.started = 0
        self.update()


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
