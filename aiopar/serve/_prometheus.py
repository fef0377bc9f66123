"""`PrometheusMetrics`: metrics of batchers, pools, stores and executors for Prometheus.

prometheus_client is an extra, imported only when it is needed.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias, get_args
from weakref import WeakKeyDictionary

from .._base.arguments import check_instance, described
from .._base.forking import ReentrantLock, Registry
from ..executor._executor import DeviceExecutor
from ..executor._pool import WorkerPool
from ..executor._worker import Worker
from ._base_batcher import BaseBatcher
from ._model_store import ModelStore, StoredModel
from ._multiprocess_metrics import SharedValues, registry_of_all_processes, shared_folder
from ._observer import BatchInfo, BatchObserver, ItemInfo, Outcome, Refusal
from ._replica_pool import ReplicaPool
from ._stats import ContinuousStats, ReplicaState

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

Measurable: TypeAlias = BaseBatcher[Any, Any] | ReplicaPool[Any] | ModelStore[Any] | DeviceExecutor
_NAMED = {BaseBatcher: "batchers", ReplicaPool: "pools", ModelStore: "stores"}


class PrometheusMetrics:
    """Metrics of batchers, pools, stores and executors, in a registry of prometheus-client.

    Outcomes of requests and the histograms of seconds count from the creation of this object, or
    from `add`, until `close`. The other values are those of `stats()`: since the batcher, pool or
    executor was opened. All names begin with the namespace and `_`. Labels are in parentheses.

    - `batcher_requests_total` (batcher, outcome): requests that ended, see below
    - `batcher_refusals_total` (batcher, cause): refused requests, see `BatcherStats.refused`
    - `batcher_queue_length` (batcher): items in the queue
    - `batcher_in_flight` (batcher): items out of the queue, without an outcome yet
    - `batcher_request_seconds` (batcher): histogram: an answered request's time, see below
    - `batcher_queue_wait_seconds` (batcher): histogram: an item's time from call to batch
    - `batcher_batch_size` (batcher): histogram: items of a batch
    - `batcher_compute_seconds` (batcher): histogram: a batch's time until outputs are complete
    - `batcher_parts_total` (batcher): parts that the steps have made, see below
    - `batcher_preemptions_total` (batcher): items that left their batch for a while
    - `batcher_first_part_seconds` (batcher): histogram: an item's time from call to first part
    - `batcher_between_parts_seconds` (batcher): histogram: time between two parts of an item
    - `replica_state` (pool, replica, device, state): 1 for the replica's state, else 0
    - `replica_in_flight` (pool, replica, device): calls that wait for the replica or run on it
    - `replica_calls_total` (pool, replica, device, outcome): calls that `completed` or `failed`
    - `replica_rebuilds_total` (pool, replica, device): completed rebuilds
    - `store_models` (store): models in memory
    - `store_bytes` (store): their bytes, as for `ModelStore(max_bytes=...)`
    - `store_loads_total` (store, outcome): loads that `completed` or `failed`
    - `store_evictions_total` (store): evicted models
    - `worker_busy_ratio` (executor, worker, device): share of time running calls, see below
    - `worker_busy_seconds_total` (executor, worker, device): time running calls
    - `worker_call_seconds` (executor, worker, device): how long its present call has run, or 0

    A request is an awaited call or a stream that has begun; a call with wrong arguments is not
    counted. Each request has one outcome, as in `BatcherStats`: `answered`; `failed` (the function,
    `batch_key` or `cost` raised, or the pool did not open); `refused` (for one of the causes);
    `expired` (its deadline passed); or `cancelled` (its caller was cancelled, or left a stream
    before its end).

    The time of an answered request runs from the call until its caller has the output, or has read
    all parts. Other requests have no time there.

    The last four metrics of batchers have values only for a `ContinuousBatcher`. There a batch in
    the names and texts above is a step: `batcher_batch_size` has the items of a step, and
    `batcher_queue_wait_seconds` the time from the call of an item until it joins.

    The busy ratio covers the time between the last two readings of the registry that were at least
    a second apart. The time of a call counts when the call ends; on an accelerator it is the time
    of the launch.

    Batchers, pools and stores are labelled by their `name`, executors by their
    `thread_name_prefix`. The batchers and pools of a store are shown while their model is loaded.

    In prometheus-client's multiprocess mode (the environment variable `PROMETHEUS_MULTIPROC_DIR`
    names a folder) a thread also writes the values to that folder, every second and when the
    process ends. `prometheus_client.multiprocess.MultiProcessCollector`, and the route of
    `aiopar.asgi.install`, show the sums over all processes. `worker_busy_ratio` has a value for
    each process, with the label `pid`; `worker_call_seconds` is the longest of all processes.

    Args:
        resources: `Batcher`, `ContinuousBatcher`, `ReplicaPool`, `ModelStore` and `DeviceExecutor`
            objects. The executors of batchers and pools are included.
        registry: Where to register; None: `prometheus_client.REGISTRY`.
        namespace: What all names begin with: letters, digits, `_` and `:`. Empty: no namespace.

    Raises:
        ImportError: prometheus-client is not installed. It is in the extra `metrics`.
        TypeError: A resource, `registry` or `namespace` has a wrong type.
        ValueError: `namespace` has other characters or begins with a digit, two batchers or two
            pools have the same name, the registry has metrics of these names already, or
            `PROMETHEUS_MULTIPROC_DIR` names no folder.

    Example:
        >>> import asyncio, aiopar, prometheus_client, torch
        >>> async def main():
        ...     registry = prometheus_client.CollectorRegistry()
        ...     async with aiopar.Batcher(torch.nn.Linear(4, 2), name="tiny") as batcher:
        ...         aiopar.serve.PrometheusMetrics(batcher, registry=registry)
        ...         await batcher(torch.ones(4))
        ...     return prometheus_client.generate_latest(registry).decode()
        >>> print(asyncio.run(main()))
        # HELP ...
        aiopar_batcher_requests_total{batcher="tiny",outcome="answered"} 1.0
        ...
    """

    def __init__(
        self,
        *resources: Measurable,
        registry: "CollectorRegistry | None" = None,
        namespace: str = "aiopar",
    ) -> None:
        self._registry = check_registry(registry)
        _check_resources(resources)
        check_instance("namespace", namespace, str)
        # prometheus-client accepts every character, and replaces the wrong ones by `_`.
        if namespace and not re.fullmatch("[A-Za-z_:][A-Za-z0-9_:]*", namespace):
            raise ValueError(
                "namespace must be of letters, digits, '_' and ':', with no digit first, got "
                f"{namespace!r}"
            )
        shares = shared_folder() is not None
        self._collector = _Collector(f"{namespace}_" if namespace else "")
        try:
            self._registry.register(self._collector)
        except ValueError:
            raise ValueError(
                f"the registry has metrics of the namespace {namespace!r} already: close the other "
                "PrometheusMetrics, or add() to it"
            ) from None  # prometheus-client lists all names
        self._closed = False
        self.add(*resources)
        if shares:
            self._collector.shared = SharedValues(self._collector)

    def add(self, *resources: Measurable) -> None:
        """Show more resources. Resources that are shown already are skipped.

        Raises:
            TypeError: A resource has a wrong type.
            ValueError: Two batchers or two pools have the same name.
            RuntimeError: The metrics are closed.
        """
        if self._closed:
            raise RuntimeError("these metrics are closed")
        shown = self._collector.resources
        _check_resources([*shown, *resources])
        new = {one: _Observer(self._collector) for one in resources if one not in shown}
        for one, observer in new.items():
            if isinstance(one, BaseBatcher):
                one.add_observer(observer)
        self._collector.resources = shown | new
        for store in [one for one in new if isinstance(one, ModelStore)]:
            store._listeners.append(self._follow)
            for stored in store._ready_models:
                self._follow(stored)

    def _follow(self, stored: StoredModel) -> None:
        """Show the batcher and the pool of a model that was loaded, or stop showing them."""
        parts = [one for one in stored.parts if isinstance(one, BaseBatcher | ReplicaPool)]
        (self.add if stored.state == "ready" else self.remove)(*parts)

    def remove(self, *resources: Measurable) -> None:
        """Stop showing these resources, and free their names.

        Resources that are not shown are skipped. In the multiprocess mode their counts stay, and
        their other values become 0.
        """
        collector = self._collector
        if collector.shared is not None:
            collector.shared.write()
        shown = collector.resources
        collector.resources = {one: shown[one] for one in shown if one not in resources}
        for one in resources:
            if isinstance(one, BaseBatcher) and one in shown:
                one.remove_observer(shown[one])
            elif isinstance(one, ModelStore) and one in shown:
                one._listeners.remove(self._follow)
                self.remove(*[part for stored in one._ready_models for part in stored.parts])

    def close(self) -> None:
        """Stop counting and unregister the metrics. It may be called again."""
        if not self._closed:
            self._closed = True
            self._registry.unregister(self._collector)
            if self._collector.shared is not None:
                self._collector.shared.close()
            for one, observer in self._collector.resources.items():
                if isinstance(one, BaseBatcher):
                    one.remove_observer(observer)
                elif isinstance(one, ModelStore):
                    one._listeners.remove(self._follow)


def check_registry(registry: "CollectorRegistry | None") -> "CollectorRegistry":
    """`registry`, or the default registry for None.

    Raises:
        ImportError: prometheus-client is not installed.
        TypeError: `registry` has a wrong type.
    """
    try:
        from prometheus_client import REGISTRY, CollectorRegistry
    except ModuleNotFoundError as error:
        raise ImportError(
            "PrometheusMetrics needs prometheus-client: pip install 'aiopar[metrics]'"
        ) from error
    if registry is None:
        return REGISTRY
    check_instance("registry", registry, CollectorRegistry)
    return registry


def exposition(registry: "CollectorRegistry", accept: str, names: list[str]) -> tuple[bytes, str]:
    """The metrics of a registry as a scrape reads them, and their content type.

    Args:
        registry: The registry. In the multiprocess mode all metrics of all processes are shown.
        accept: The header `Accept` of the scrape: text or OpenMetrics.
        names: Only these metrics; empty: all.
    """
    from prometheus_client.exposition import choose_encoder

    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # the version in `accept` is malformed
        encode, content_type = choose_encoder("")
    if (folder := shared_folder()) is not None:
        registry = registry_of_all_processes(folder)
    return encode(registry.restricted_registry(names) if names else registry), content_type


def worker_pools(resources: Iterable[object]) -> list[WorkerPool]:
    """The workers of executors, and those that batchers and replica pools use."""
    executors: list[DeviceExecutor] = []
    for resource in resources:
        if isinstance(resource, DeviceExecutor):
            executors.append(resource)
        elif isinstance(resource, BaseBatcher | ReplicaPool):
            executors += resource._executors
    return list(dict.fromkeys(executor._dispatcher.pool for executor in executors))


def _check_resources(resources: Iterable[object]) -> None:
    """Check the types of the resources, and that no two of a kind have the same name."""
    named: dict[tuple[str, str], object] = {}
    for resource in resources:
        if isinstance(resource, DeviceExecutor):
            continue
        if not isinstance(resource, BaseBatcher | ReplicaPool | ModelStore):
            raise TypeError(
                "expected a Batcher, a ContinuousBatcher, a ReplicaPool, a ModelStore or a "
                f"DeviceExecutor, got {described(resource)}"
            )
        kind = next(shown for kind, shown in _NAMED.items() if isinstance(resource, kind))
        if named.setdefault((kind, resource.name), resource) is not resource:
            raise ValueError(
                f"two of the {kind} are called {resource.name!r}: give one another name=..."
            )


# From the wait of a lone request for a small model to the longest wait of most clients.
_SECONDS = (*(digit / 10**power for power in (4, 3, 2, 1, 0) for digit in (1, 2.5, 5)), 10.0)
_SIZES = tuple(2.0**power for power in range(11))


class _Histogram:
    """How many values are at or below each bound. The owner serializes the calls."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """The cumulative count at each bound, as prometheus-client takes it."""
        from prometheus_client.utils import floatToGoString

        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


class _Observer(BatchObserver):
    """The counts of a batcher that `stats()` does not have. Their reader holds `lock`."""

    def __init__(self, collector: "_Collector") -> None:
        self._collector = collector
        self.lock = ReentrantLock()  # a coroutine may be closed at any line
        self.reset()
        _observers.add(self)

    def reset(self) -> None:
        """Begin at zero; also called in a forked child, whose parent keeps its counts."""
        # Every outcome from 0: Prometheus does not see the rise of a count that begins at 1.
        self.outcomes: Counter[Outcome] = Counter(dict.fromkeys(get_args(Outcome), 0))
        self.request = _Histogram(_SECONDS)
        self.queue_wait = _Histogram(_SECONDS)
        self.compute_seconds = _Histogram(_SECONDS)
        self.first_part = _Histogram(_SECONDS)
        self.between_parts = _Histogram(_SECONDS)

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        with self.lock:
            self.outcomes[item.outcome] += 1
            if item.outcome == "answered":
                self.request.add(monotonic() - item.arrived)
        if self._collector.shared is not None:
            self._collector.shared.start()

    def start(self, batch: BatchInfo) -> None:
        with self.lock:
            for item in batch.joined:
                self.queue_wait.add(batch.began - item.arrived)

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        end = batch.began + batch.seconds
        with self.lock:
            self.compute_seconds.add(batch.seconds)
            for item in batch.first_parts:
                self.first_part.add(end - item.arrived)
            for seconds in batch.between_parts:
                self.between_parts.add(seconds)


_observers: Registry[_Observer] = Registry(_Observer.reset)
_NO_REFUSALS: dict[str, int] = dict.fromkeys(get_args(Refusal), 0)
_REPLICA = ("pool", "replica", "device")
_WORKER = ("executor", "worker", "device")
# The name, kind, documentation and labels of each metric.
_METRICS = (
    ("batcher_requests", "Counter", "Requests that ended.", ("batcher", "outcome")),
    ("batcher_refusals", "Counter", "Requests that were refused.", ("batcher", "cause")),
    ("batcher_queue_length", "Gauge", "Items in the queue.", ("batcher",)),
    ("batcher_in_flight", "Gauge", "Items out of the queue, without an outcome.", ("batcher",)),
    ("batcher_request_seconds", "Histogram", "Time of an answered request.", ("batcher",)),
    ("batcher_queue_wait_seconds", "Histogram", "Time from call to batch.", ("batcher",)),
    ("batcher_batch_size", "Histogram", "Items of a batch.", ("batcher",)),
    ("batcher_compute_seconds", "Histogram", "Time that a batch took.", ("batcher",)),
    ("batcher_parts", "Counter", "Parts that the steps have made.", ("batcher",)),
    ("batcher_preemptions", "Counter", "Items that left their batch for a while.", ("batcher",)),
    ("batcher_first_part_seconds", "Histogram", "Time from call to first part.", ("batcher",)),
    ("batcher_between_parts_seconds", "Histogram", "Time between two parts.", ("batcher",)),
    ("replica_state", "Gauge", "1 for the state of the replica.", (*_REPLICA, "state")),
    ("replica_in_flight", "Gauge", "Calls that wait for the replica or run.", _REPLICA),
    ("replica_calls", "Counter", "Calls that ended.", (*_REPLICA, "outcome")),
    ("replica_rebuilds", "Counter", "Completed rebuilds.", _REPLICA),
    ("store_models", "Gauge", "Models in memory.", ("store",)),
    ("store_bytes", "Gauge", "Bytes of the models in memory.", ("store",)),
    ("store_loads", "Counter", "Loads that ended.", ("store", "outcome")),
    ("store_evictions", "Counter", "Evicted models.", ("store",)),
    ("worker_busy_ratio", "Gauge", "Share of time running calls.", _WORKER),
    ("worker_busy_seconds", "Counter", "Time running calls.", _WORKER),
    ("worker_call_seconds", "Gauge", "How long the present call has run.", _WORKER),
)


class _Collector:
    """Makes the metrics, whose names begin with `prefix`, whenever its registry is read."""

    def __init__(self, prefix: str) -> None:
        self.resources: dict[Measurable, _Observer] = {}  # each with its observer
        self.shared: SharedValues | None = None  # what other processes see, in multiprocess mode
        self._prefix = prefix
        self._lock = ReentrantLock()  # a signal handler may read the metrics, too
        # When each worker was read, its busy seconds at that time, and its busy ratio.
        self._latest: WeakKeyDictionary[Worker, tuple[float, float, float]] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[WorkerPool, str] = WeakKeyDictionary()
        self._prefixes: Counter[str] = Counter()

    def collect(self) -> Iterable["Metric"]:
        """Return all metrics, also those without a value yet."""
        from prometheus_client import metrics_core

        families: dict[str, Any] = {}
        for name, kind, documentation, labels in _METRICS:
            family = getattr(metrics_core, f"{kind}MetricFamily")
            families[name] = family(self._prefix + name, documentation, labels=labels)
        for resource, observer in self.resources.items():
            if isinstance(resource, BaseBatcher):
                _add_batcher(families, resource, observer)
            elif isinstance(resource, ReplicaPool):
                _add_replicas(families, resource)
            elif isinstance(resource, ModelStore):
                _add_store(families, resource)
        for pool in worker_pools(self.resources):
            for worker in pool.workers:
                which = [self._name(pool), str(worker.index), worker.label]
                busy_seconds = worker.stats().busy_seconds
                ratio = self._busy_ratio(worker, busy_seconds)
                families["worker_busy_ratio"].add_metric(which, ratio)
                families["worker_busy_seconds"].add_metric(which, busy_seconds)
                families["worker_call_seconds"].add_metric(which, worker.seconds_in_call)
        return families.values()

    # With `describe`, a registry refuses metrics that it has already.
    describe = collect

    def _busy_ratio(self, worker: Worker, busy_seconds: float) -> float:
        """The busy share of the time since the last reading that is a second or more ago."""
        now = monotonic()
        with self._lock:
            read_at, before, ratio = self._latest.setdefault(worker, (now, busy_seconds, 0.0))
            if (elapsed := now - read_at) >= 1.0:
                # At most 1: a call counts when it ends, and may have begun before that reading.
                ratio = min(1.0, (busy_seconds - before) / elapsed)
                self._latest[worker] = now, busy_seconds, ratio
        return ratio

    def _name(self, pool: WorkerPool) -> str:
        """The prefix of the pool's threads; with a number if several executors have this prefix."""
        with self._lock:
            if pool not in self._names:
                prefix = pool.thread_name_prefix
                self._prefixes[prefix] += 1
                count = self._prefixes[prefix]
                self._names[pool] = prefix if count == 1 else f"{prefix}-{count}"
            return self._names[pool]


def _add_batcher(
    families: Mapping[str, Any], batcher: BaseBatcher[Any, Any], observer: _Observer
) -> None:
    name, stats = batcher.name, batcher.stats()
    families["batcher_queue_length"].add_metric([name], stats.queued)
    families["batcher_in_flight"].add_metric([name], stats.in_flight)
    for cause, count in (_NO_REFUSALS | stats.refused).items():
        families["batcher_refusals"].add_metric([name, cause], count)
    sizes = _Histogram(_SIZES)
    for size, count in stats.batch_sizes.items():
        sizes.add(size, count)
    families["batcher_batch_size"].add_metric([name], sizes.buckets(), sizes.sum)
    with observer.lock:
        for outcome, count in observer.outcomes.items():
            families["batcher_requests"].add_metric([name, outcome], count)
        times = {
            "request": observer.request,
            "queue_wait": observer.queue_wait,
            "compute": observer.compute_seconds,
        }
        if isinstance(stats, ContinuousStats):
            families["batcher_parts"].add_metric([name], stats.parts)
            families["batcher_preemptions"].add_metric([name], stats.preempted)
            times |= {"first_part": observer.first_part, "between_parts": observer.between_parts}
        for what, seconds in times.items():
            family = families[f"batcher_{what}_seconds"]
            family.add_metric([name], seconds.buckets(), seconds.sum)


def _add_replicas(families: Mapping[str, Any], pool: ReplicaPool[Any]) -> None:
    for stats in pool.stats().replicas:
        labels = [pool.name, str(stats.index), stats.device]
        for state in get_args(ReplicaState):
            families["replica_state"].add_metric([*labels, state], state == stats.state)
        families["replica_in_flight"].add_metric(labels, stats.in_flight)
        families["replica_calls"].add_metric([*labels, "completed"], stats.completed)
        families["replica_calls"].add_metric([*labels, "failed"], stats.failed)
        families["replica_rebuilds"].add_metric(labels, stats.rebuilds)


def _add_store(families: Mapping[str, Any], store: ModelStore[Any]) -> None:
    stats = store.stats()
    sizes = [one.bytes for one in stats.models if one.state in ("ready", "closing")]
    families["store_models"].add_metric([store.name], len(sizes))
    families["store_bytes"].add_metric([store.name], sum(sizes))
    families["store_loads"].add_metric([store.name, "completed"], stats.loads)
    families["store_loads"].add_metric([store.name, "failed"], stats.failed_loads)
    families["store_evictions"].add_metric([store.name], stats.evictions)
