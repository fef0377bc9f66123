"""What is counted of a `Batcher` as it happens, for `PrometheusMetrics`."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import get_args

from ._observer import BatchInfo, BatchObserver, ItemInfo, Outcome, outcome_of

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
