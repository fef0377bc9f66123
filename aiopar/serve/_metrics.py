"""What Prometheus is told of batchers, pools and their workers."""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from .._base.arguments import check_instance, described
from ..executor._executor import DeviceExecutor
from ..executor._pool import WorkerPool
from ._batcher import Batcher
from ._replica_pool import ReplicaPool
from ._stats import BatcherCounts

if TYPE_CHECKING:
    from ._prometheus import CollectorRegistry


Metered: TypeAlias = Batcher | ReplicaPool | DeviceExecutor
Named = TypeVar("Named", Batcher, ReplicaPool)


class PrometheusMetrics:
    """Metrics of batchers, replica pools and executors, in a registry of prometheus-client.

    They count from its creation until `close`. What `stats()` counts as well (rejections, calls and
    rebuilds of replicas, busy seconds) covers the whole life of the object. All names begin with
    the namespace and `_`.

    | metric | labels | what it is |
    |---|---|---|
    | `batcher_requests_total` | batcher, outcome | requests that are over, see below |
    | `batcher_rejections_total` | batcher, cause | refused ones, see `BatcherStats.rejected` |
    | `batcher_queue_length` | batcher | items that wait |
    | `batcher_in_flight` | batcher | items in batches that run |
    | `batcher_queue_wait_seconds` | batcher | histogram: from call to batch, of each item in one |
    | `batcher_batch_size` | batcher | histogram |
    | `batcher_compute_seconds` | batcher | histogram: of each batch, until outputs are complete |
    | `replica_state` | pool, replica, device, state | 1: it is in this state; else 0 |
    | `replica_in_flight` | pool, replica, device | calls that wait for it or run on it |
    | `replica_calls_total` | pool, replica, device, outcome | calls that `completed` or `failed` |
    | `replica_rebuilds_total` | pool, replica, device | how often it has come back |
    | `worker_busy_ratio` | executor, worker, device | share of the time it ran calls, see below |
    | `worker_busy_seconds_total` | executor, worker, device | how long it has run calls |

    A request is a call that is awaited, or a stream that is begun; one with bad arguments is none.
    Each has one outcome, so that their sum is all that are over: `completed`, `failed` (by the
    function, or before it is queued: `batch_key` or `cost` raises, the pool does not open),
    `rejected` (by one of the causes), `expired` (its deadline passed, maybe while the pool opened),
    or `cancelled` (its caller has gone, or has left a stream before its end).

    The busy ratio is of the time between the last two readings of the registry that were a second
    or more apart; calls count when they end, and on an accelerator for as long as it took to launch
    them.

    Batchers and pools are labelled by their `name`, executors by their `thread_name_prefix`. All of
    it is in the memory of this process, and read when the registry is: prometheus-client's
    multiprocess mode does not see it, so each process has a port of its own to be scraped at.

    Args:
        resources: Each a `Batcher`, a `ReplicaPool`, or a `DeviceExecutor`; the executors that
            batchers and pools run on are included.
        registry: Where to register; None: `prometheus_client.REGISTRY`.
        namespace: What the names of the metrics begin with: letters, digits, `_` and `:`. Empty:
            nothing.

    Raises:
        ImportError: prometheus-client is not installed: it is in the extra `metrics`.
        TypeError: A resource is of another kind, `registry` is none, or `namespace` no str.
        ValueError: `namespace` has other characters, or begins with a digit; two batchers, or two
            pools, have one name; or the registry has metrics of these names already.

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
        aiopar_batcher_requests_total{batcher="tiny",outcome="completed"} 1.0
        ...
    """

    def __init__(
        self,
        *resources: Batcher | ReplicaPool | DeviceExecutor,
        registry: "CollectorRegistry | None" = None,
        namespace: str = "aiopar",
    ) -> None:
        try:
            from ._prometheus import REGISTRY, Collector, CollectorRegistry
        except ModuleNotFoundError as error:
            raise ImportError(
                "PrometheusMetrics needs prometheus-client: pip install 'aiopar[metrics]'"
            ) from error
        _check_resources(resources)
        _check_namespace(namespace)
        if registry is not None:
            check_instance("registry", registry, CollectorRegistry)
        self._batchers = _by_name(one for one in resources if isinstance(one, Batcher))
        self._counts = {name: BatcherCounts() for name in self._batchers}
        self._collector = Collector(
            namespace,
            {name: (batcher, self._counts[name]) for name, batcher in self._batchers.items()},
            _by_name(one for one in resources if isinstance(one, ReplicaPool)),
            partial(_worker_pools, resources),
        )
        self._registry = REGISTRY if registry is None else registry
        self._registry.register(self._collector)
        for name, batcher in self._batchers.items():
            batcher.add_observer(self._counts[name])
        self._closed = False

    def close(self) -> None:
        """Count no more, and take the metrics out of the registry; once more does no harm."""
        if not self._closed:
            self._closed = True
            self._registry.unregister(self._collector)
            for name, batcher in self._batchers.items():
                batcher.remove_observer(self._counts[name])


def _check_resources(resources: Iterable[object]) -> None:
    for resource in resources:
        if not isinstance(resource, Metered):
            raise TypeError(
                f"expected a Batcher, a ReplicaPool or a DeviceExecutor, got {described(resource)}"
            )


def _check_namespace(namespace: str) -> None:
    if not isinstance(namespace, str):
        raise TypeError(f"namespace must be a str, not {described(namespace)}")
    # prometheus-client takes anything, and writes `_` in the place of other characters.
    if namespace and not re.fullmatch("[A-Za-z_:][A-Za-z0-9_:]*", namespace):
        raise ValueError(
            "namespace must be of letters, digits, '_' and ':', with no digit first, got "
            f"{namespace!r}"
        )


def _by_name(resources: Iterable[Named]) -> dict[str, Named]:
    named: dict[str, Named] = {}
    for resource in resources:
        if named.setdefault(resource.name, resource) is not resource:
            kind = type(resource).__name__
            raise ValueError(
                f"two of the {kind} objects are called {resource.name!r}: give one another name=..."
            )
    return named


def _worker_pools(resources: Iterable[Metered]) -> Iterator[WorkerPool]:
    """Those that the resources run on, as far as they are open; some more than once."""
    for resource in resources:
        if isinstance(resource, DeviceExecutor):
            yield resource._dispatcher.pool
        else:
            yield from (executor._dispatcher.pool for executor in resource._executors)
