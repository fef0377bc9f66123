"""What a `Batcher` has done, counted as it goes."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import quantiles
from typing import Literal, TypeAlias

from ._request import Request

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

    def ended(self, batch: Sequence[Request], seconds: float) -> None:
        """A batch has run, for `seconds`."""
        if not batch:
            return
        self.in_flight -= len(batch)
        self._completed += len(batch)
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
