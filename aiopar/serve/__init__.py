"""Serving: batches of concurrent requests, and replicas of a module that run them."""

from .._base.collate import collate, pad_collate, unbatch
from ._batcher import Batcher
from ._continuous import ContinuousBatcher
from ._model_store import ModelStore
from ._observer import BatchInfo, BatchObserver, ItemInfo
from ._prometheus import PrometheusMetrics
from ._replica_pool import ReplicaPool
from ._stats import (
    BatcherStats,
    ContinuousStats,
    ErrorStats,
    ModelStats,
    Percentiles,
    PoolStats,
    ReplicaStats,
    StoreStats,
)
from ._stepper import Done, Stepper
from ._streaming import OutputStream
from ._timeline import trace
from ._tracing import OpenTelemetryTracing

__all__ = [
    "BatchInfo",
    "BatchObserver",
    "Batcher",
    "BatcherStats",
    "ContinuousBatcher",
    "ContinuousStats",
    "Done",
    "ErrorStats",
    "ItemInfo",
    "ModelStats",
    "ModelStore",
    "OpenTelemetryTracing",
    "OutputStream",
    "Percentiles",
    "PoolStats",
    "PrometheusMetrics",
    "ReplicaPool",
    "ReplicaStats",
    "Stepper",
    "StoreStats",
    "collate",
    "pad_collate",
    "trace",
    "unbatch",
]


def __dir__() -> list[str]:
    return __all__
