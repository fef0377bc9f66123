"""What is counted of a `Batcher` as it happens, for `PrometheusMetrics`."""

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from statistics import quantiles
from typing import Literal, TypeAlias, get_args

from ._observer import BatchInfo, BatchObserver, ItemInfo, Outcome, outcome_of
from ._request import Request

ReplicaState: TypeAlias = Literal["ready", "rebuilding", "retired", "closed"]


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What one replica has done, and how it is.

    Attributes:
        index: Its place in the pool's `devices`.
        device: As `str(torch.device)`, so that all of this can be written as JSON.
        state: `"ready"`: in service. `"rebuilding"`: it failed, and comes back. `"retired"`: its
            device is lost to this process. `"closed"`: the pool is.
        in_flight: Calls that wait for it or run on it.
        completed: Calls that it has answered.
        failed: Calls that have raised.
        rebuilds: How often it has come back.
        busy_seconds: How long its worker ran calls; on an accelerator, how long it took to launch
            them.
    """

    index: int
    device: str
    state: ReplicaState
    in_flight: int
    completed: int
    failed: int
    rebuilds: int
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot of a `ReplicaPool`.

    Attributes:
        replicas: One for each replica; empty until the pool is open.
    """

    replicas: tuple[ReplicaStats, ...]


_LATEST = 1024

Rejection: TypeAlias = Literal["queue_full", "max_wait", "max_batch_cost", "unavailable", "closed"]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the latest 1,024 durations, in seconds; zeros before the first."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """What a `Batcher` has before it, and what it has done.

    Attributes:
        queued: Items that wait for a batch.
        in_flight: Items in batches that run.
        completed: Items whose batch has run; with their own result or their own error.
        rejected: Items that were refused, by cause: `queue_full`, `max_wait`, `max_batch_cost`,
            `unavailable` (no replica is in service), `closed`.
        batch_sizes: How many batches there were of each size.
        queue_wait: From call to the start of the batch, of an item.
        compute: Of a batch, with collating, and with what was run again after an error.
    """

    queued: int
    in_flight: int
    completed: int
    rejected: dict[str, int]
    batch_sizes: dict[int, int]
    queue_wait: Percentiles
    compute: Percentiles


class Tally:
    """The counts behind `BatcherStats`; its owner holds a lock around each call."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.batch_seconds = 0.0
        """How long a batch takes: a moving average, the latest counting for an eighth."""
        self._completed = 0
        self._rejected: Counter[str] = Counter()
        self._batch_sizes: Counter[int] = Counter()
        self._waits: deque[float] = deque(maxlen=_LATEST)
        self._computes: deque[float] = deque(maxlen=_LATEST)

    def rejected(self, cause: Rejection) -> None:
        """A request was refused."""
        self._rejected[cause] += 1

    def began(self, batch: Sequence[Request], now: float) -> None:
        """A batch was taken."""
        self.in_flight += len(batch)
        self._batch_sizes[len(batch)] += 1
        self._waits.extend([now - request.arrived for request in batch])

    def ended(self, count: int, seconds: float) -> None:
        """A batch has run `count` items in `seconds`."""
        if not count:
            return
        self.in_flight -= count
        self._completed += count
        self._computes.append(seconds)
        if self.batch_seconds:
            self.batch_seconds += (seconds - self.batch_seconds) / 8
        else:
            self.batch_seconds = seconds

    def lost(self, items: int, *, again: int) -> None:
        """A batch of so many has come to nothing, not by their fault; some of them wait again."""
        self.in_flight -= items
        self._completed += items - again

    @property
    def quickest(self) -> float:
        """How long the shortest of the latest eight batches took; 0 until there were so many."""
        latest = [*islice(reversed(self._computes), 8)]
        return min(latest) if len(latest) == 8 else 0.0

    def copy(self) -> "Tally":
        """What it has counted so far, to be looked at without that lock."""
        other = Tally()
        other.in_flight, other._completed = self.in_flight, self._completed
        other._rejected, other._batch_sizes = self._rejected.copy(), self._batch_sizes.copy()
        other._waits, other._computes = self._waits.copy(), self._computes.copy()
        return other

    def stats(self, queued: int) -> BatcherStats:
        """A snapshot."""
        return BatcherStats(
            queued=queued,
            in_flight=self.in_flight,
            completed=self._completed,
            rejected=dict(self._rejected),
            batch_sizes=dict(sorted(self._batch_sizes.items())),
            queue_wait=_percentiles(self._waits),
            compute=_percentiles(self._computes),
        )


def _percentiles(durations: Iterable[float]) -> Percentiles:
    found = sorted(durations)
    if len(found) < 2:
        return Percentiles(*found * 3)
    cuts = quantiles(found, n=100, method="inclusive")
    return Percentiles(cuts[49], cuts[89], cuts[98])


# From what a lone request for a small model waits to what clients wait at most.
_SECONDS = (
    *(0.0001, 0.00025, 0.0005),
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0),
)
_SIZES = tuple(2.0**power for power in range(11))


class Histogram:
    """How many values are at or below each of some bounds; its owner holds a lock."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, values: Iterable[float]) -> None:
        """Count values: an eighth of what as many calls of prometheus-client's own take."""
        for value in values:
            self._counts[bisect_left(self.bounds, value)] += 1
            self.sum += value

    def cumulated(self) -> list[int]:
        """For each bound, and for infinity, how many values are at or below it."""
        return list(accumulate(self._counts))


class BatcherCounts(BatchObserver):
    """The counts of one batcher. Whoever reads them holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.outcomes: Counter[Outcome] = Counter(dict.fromkeys(get_args(Outcome), 0))
        self.queue_wait = Histogram(_SECONDS)
        self.batch_size = Histogram(_SIZES)
        self.compute_seconds = Histogram(_SECONDS)

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        outcome = outcome_of(item, error)
        with self.lock:
            self.outcomes[outcome] += 1

    def start(self, batch: BatchInfo) -> None:
        waits = [batch.began - item.arrived for item in batch.items]
        with self.lock:
            self.queue_wait.observe(waits)
            self.batch_size.observe([len(waits)])

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        with self.lock:
            self.compute_seconds.observe([batch.seconds])
