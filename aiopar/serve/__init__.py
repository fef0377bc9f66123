"""Serving: requests that arrive together become batches, and batches go to replicas."""

from .._base.collate import collate, pad_collate, unbatch
from ._batcher import Batcher
from ._metrics import PrometheusMetrics
from ._observer import BatchInfo, BatchObserver, ItemInfo
from ._replica_pool import ReplicaPool
from ._stats import BatcherStats, Percentiles, PoolStats, ReplicaStats
from ._streaming import OutputStream

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
