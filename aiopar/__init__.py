"""`torch.nn.parallel`, awaited."""

import importlib
import typing

from .errors import (
    BlockingWaitError,
    DeadlineExceeded,
    ExecutorShutdown,
    InvalidInput,
    OutputMismatch,
    Overloaded,
    QueueFull,
    ReaderTooSlow,
    ReplicaAborted,
    ReplicaUnavailable,
    ServiceClosed,
    WorkerLost,
)
from .executor._backward import backward
from .executor._current import get_executor, run_sync, use_executor
from .executor._executor import DeviceExecutor, ExecutorStats
from .executor._fork import fork, wait
from .executor._gang import Replica, current_replica
from .executor._generators import Iteration
from .executor._observer import CallInfo, ExecutorObserver
from .executor._worker import HostInfo, WorkerStats
from .futures._future import Future, wrap_future
from .futures._waiting import as_completed, collect_all, wait_all
from .nn import (
    CallbackContext,
    DataParallel,
    Replicated,
    ReplicationCallbackDataParallel,
    Split,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_sync_batchnorm,
    data_parallel,
    exec_data_parallel_replication_callback,
    fork_apply,
    gather,
    parallel_apply,
    patch_replication_callback,
    replicate,
    revert_sync_batchnorm,
    scatter,
    scatter_kwargs,
)
from .train import Parallel, Parallelizable

if typing.TYPE_CHECKING:
    from . import ray as ray
    from .data import map  # noqa: A004
    from .remote import ProcessExecutor
    from .serve import Batcher, ContinuousBatcher, Done, ModelStore, ReplicaPool, Stepper, trace
else:
    # Loaded when first used: they are half of the import time, and not every program needs them.
    _LATER = {
        "Batcher": "serve",
        "ContinuousBatcher": "serve",
        "Done": "serve",
        "ModelStore": "serve",
        "ProcessExecutor": "remote",
        "ReplicaPool": "serve",
        "Stepper": "serve",
        "data": "data",
        "map": "data",
        "ray": "ray",
        "remote": "remote",
        "serve": "serve",
        "trace": "serve",
    }

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        package = importlib.import_module(f"{__name__}.{_LATER[name]}")
        found = globals()[name] = package if name == _LATER[name] else getattr(package, name)
        return found

    def __dir__() -> list[str]:
        submodules = {"asgi", "fastapi", "nn", "testing", "train", "transformers"} & {*globals()}
        return ["__version__", *{*__all__, *_LATER, *submodules}]


__all__ = [
    "Batcher",
    "BlockingWaitError",
    "CallInfo",
    "CallbackContext",
    "ContinuousBatcher",
    "DataParallel",
    "DeadlineExceeded",
    "DeviceExecutor",
    "Done",
    "ExecutorObserver",
    "ExecutorShutdown",
    "ExecutorStats",
    "Future",
    "HostInfo",
    "InvalidInput",
    "Iteration",
    "ModelStore",
    "OutputMismatch",
    "Overloaded",
    "Parallel",
    "Parallelizable",
    "ProcessExecutor",
    "QueueFull",
    "ReaderTooSlow",
    "Replica",
    "ReplicaAborted",
    "ReplicaPool",
    "ReplicaUnavailable",
    "Replicated",
    "ReplicationCallbackDataParallel",
    "ServiceClosed",
    "Split",
    "Stepper",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "WorkerLost",
    "WorkerStats",
    "as_completed",
    "backward",
    "collect_all",
    "convert_sync_batchnorm",
    "current_replica",
    "data_parallel",
    "exec_data_parallel_replication_callback",
    "fork",
    "fork_apply",
    "gather",
    "get_executor",
    "map",
    "parallel_apply",
    "patch_replication_callback",
    "replicate",
    "revert_sync_batchnorm",
    "run_sync",
    "scatter",
    "scatter_kwargs",
    "trace",
    "use_executor",
    "wait",
    "wait_all",
    "wrap_future",
]

__version__ = "0.1.0"
