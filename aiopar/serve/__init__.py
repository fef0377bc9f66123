"""Serving: requests that arrive together become batches, and batches go to replicas."""

from .._collate import collate as collate, pad_collate as pad_collate, unbatch as unbatch
from ._batcher import Batcher as Batcher
from ._metrics import PrometheusMetrics as PrometheusMetrics
from ._observer import (
    BatchInfo as BatchInfo,
    BatchObserver as BatchObserver,
    ItemInfo as ItemInfo,
)
from ._pool_stats import PoolStats as PoolStats, ReplicaStats as ReplicaStats
from ._replica_pool import ReplicaPool as ReplicaPool
from ._stream import OutputStream as OutputStream
from ._tally import BatcherStats as BatcherStats, Percentiles as Percentiles
