"""Metrics in the form of prometheus-client; nothing else of the package imports it, but `asgi`."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import monotonic
from typing import NamedTuple, get_args
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from ..executor._pool import WorkerPool
from ..executor._worker import Worker
from ._batcher import Batcher
from ._replica_pool import ReplicaPool
from ._stats import BatcherCounts, Histogram, Rejection, ReplicaState

_SHORTEST = 1.0  # seconds; a call counts when it ends, so that shorter ones say little


class _Reading(NamedTuple):
    at: float
    busy_seconds: float
    ratio: float


class BusyRatios:
    """What is remembered of workers from one reading to the next; used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: WeakKeyDictionary[Worker, _Reading] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[WorkerPool, str] = WeakKeyDictionary()
        self._prefixes: Counter[str] = Counter()

    def read(self, worker: Worker, busy_seconds: float, now: float) -> float:
        """The share since the reading before; one within a second of it repeats it."""
        with self._lock:
            latest = self._latest.setdefault(worker, _Reading(now, busy_seconds, 0.0))
            elapsed = now - latest.at
            if elapsed >= _SHORTEST:
                # A call that began before that may be longer than the time since.
                ratio = min(1.0, (busy_seconds - latest.busy_seconds) / elapsed)
                latest = self._latest[worker] = _Reading(now, busy_seconds, ratio)
        return latest.ratio

    def name(self, pool: WorkerPool) -> str:
        """The prefix of its threads' names, numbered where several executors have the same."""
        with self._lock:
            if pool not in self._names:
                prefix = pool.thread_name_prefix
                self._prefixes[prefix] += 1
                count = self._prefixes[prefix]
                self._names[pool] = prefix if count == 1 else f"{prefix}-{count}"
            return self._names[pool]


# Told from the first scrape on: Prometheus does not see the rise of what it has not seen before.
_NO_REJECTIONS: dict[str, int] = dict.fromkeys(get_args(Rejection), 0)

__all__ = ["REGISTRY", "Collector", "CollectorRegistry"]


class Collector:
    """Reads what it was given, each time that its registry is read.

    Args:
        namespace: What the names of the metrics begin with.
        batchers: By their names.
        pools: By their names.
        executors: The workers of each; asked for each time, as pools and batchers have none before
            they are open.
    """

    def __init__(
        self,
        namespace: str,
        batchers: Mapping[str, tuple[Batcher, BatcherCounts]],
        pools: Mapping[str, ReplicaPool],
        executors: Callable[[], Iterable[WorkerPool]],
    ) -> None:
        self._prefix = f"{namespace}_" if namespace else ""
        self._batchers = batchers
        self._pools = pools
        self._executors = executors
        self._busy = BusyRatios()

    def collect(self) -> Iterator[Metric]:
        """All metrics, also those that have no value yet."""
        yield from self._of_batchers()
        yield from self._of_batches()
        yield from self._of_replicas()
        yield from self._of_workers()

    # For a registry that looks whether it has these names already.
    describe = collect

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(self._prefix + name, text, labels=labels)

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(self._prefix + name, text, labels=labels)

    def _of_batchers(self) -> Iterator[Metric]:
        requests = self._counter(
            "batcher_requests", "Requests that are over.", "batcher", "outcome"
        )
        rejections = self._counter(
            "batcher_rejections", "Requests that were refused.", "batcher", "cause"
        )
        queue_length = self._gauge("batcher_queue_length", "Items that wait.", "batcher")
        in_flight = self._gauge("batcher_in_flight", "Items in batches that run.", "batcher")
        for name, (batcher, counts) in self._batchers.items():
            stats = batcher.stats()
            queue_length.add_metric([name], stats.queued)
            in_flight.add_metric([name], stats.in_flight)
            for cause, count in (_NO_REJECTIONS | stats.rejected).items():
                rejections.add_metric([name, cause], count)
            with counts.lock:
                for outcome, count in counts.outcomes.items():
                    requests.add_metric([name, outcome], count)
        yield from (requests, rejections, queue_length, in_flight)

    def _of_batches(self) -> Iterator[Metric]:
        waits = self._histogram("batcher_queue_wait_seconds", "Wait of an item for its batch.")
        sizes = self._histogram("batcher_batch_size", "Items of a batch.")
        computes = self._histogram("batcher_compute_seconds", "How long a batch took.")
        for name, (_, counts) in self._batchers.items():
            with counts.lock:
                _add(waits, name, counts.queue_wait)
                _add(sizes, name, counts.batch_size)
                _add(computes, name, counts.compute_seconds)
        yield from (waits, sizes, computes)

    def _histogram(self, name: str, text: str) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._prefix + name, text, labels=["batcher"])

    def _of_replicas(self) -> Iterator[Metric]:
        labels = ("pool", "replica", "device")
        state = self._gauge("replica_state", "1: it is in this state.", *labels, "state")
        in_flight = self._gauge("replica_in_flight", "Calls that wait for it or run.", *labels)
        calls = self._counter("replica_calls", "Calls that it has run.", *labels, "outcome")
        rebuilds = self._counter("replica_rebuilds", "How often it has come back.", *labels)
        for name, pool in self._pools.items():
            for stats in pool.stats().replicas:
                values = [name, str(stats.index), stats.device]
                for each in get_args(ReplicaState):
                    state.add_metric([*values, each], float(each == stats.state))
                in_flight.add_metric(values, stats.in_flight)
                calls.add_metric([*values, "completed"], stats.completed)
                calls.add_metric([*values, "failed"], stats.failed)
                rebuilds.add_metric(values, stats.rebuilds)
        yield from (state, in_flight, calls, rebuilds)

    def _of_workers(self) -> Iterator[Metric]:
        labels = ("executor", "worker", "device")
        ratio = self._gauge("worker_busy_ratio", "Share of the time it runs calls.", *labels)
        seconds = self._counter("worker_busy_seconds", "How long it has run calls.", *labels)
        for pool in dict.fromkeys(self._executors()):
            name = self._busy.name(pool)
            for worker in pool.workers:
                values = [name, str(worker.index), str(worker.device)]
                busy_seconds = worker.stats().busy_seconds
                seconds.add_metric(values, busy_seconds)
                ratio.add_metric(values, self._busy.read(worker, busy_seconds, monotonic()))
        yield from (ratio, seconds)


def _add(family: HistogramMetricFamily, name: str, histogram: Histogram) -> None:
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    cumulated = zip(bounds, histogram.cumulated(), strict=True)
    family.add_metric([name], list(cumulated), histogram.sum)
