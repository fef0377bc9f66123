"""Serving: requests that arrive together become batches, and batches go to replicas."""

from .._collate import collate, pad_collate, unbatch
from ._batcher import Batcher
from ._metrics import PrometheusMetrics
from ._observer import BatchInfo, BatchObserver, ItemInfo
from ._pool_stats import PoolStats, ReplicaStats
from ._replica_pool import ReplicaPool
from ._stream import OutputStream
from ._tally import BatcherStats, Percentiles

__all__ = [
    "BatchInfo",
    "BatchObserver",
    "Batcher",
    "BatcherStats",
    "ItemInfo",
    "OutputStream",
    "Percentiles",
    "PoolStats",
    "PrometheusMetrics",
    "ReplicaPool",
    "ReplicaStats",
    "collate",
    "pad_collate",
    "unbatch",
]
