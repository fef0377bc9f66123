"""`torch.nn.parallel`, awaited."""

import importlib
import typing

from ._autograd import backward
from ._default import get_executor, run_sync, use_executor
from ._errors import (
    BlockingWaitError,
    DeadlineExceeded,
    ExecutorShutdown,
    InvalidInput,
    OutputMismatch,
    Overloaded,
    QueueFull,
    ReplicaAborted,
    ReplicaUnavailable,
    ServiceClosed,
)
from ._executor import DeviceExecutor, ExecutorStats
from ._fork import fork, wait
from ._future import Future
from ._gang import Replica, current_replica
from ._iterate import Iteration
from ._observer import CallInfo, ExecutorObserver
from ._parallel import Parallel, Parallelizable
from ._torch_future import wrap_future
from ._waiting import as_completed, collect_all, wait_all
from ._worker import WorkerStats
from .nn import (
    CallbackContext,
    DataParallel,
    Replicated,
    ReplicationCallbackDataParallel,
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

if typing.TYPE_CHECKING:
    from .data import map  # noqa: A004
    from .serve import Batcher, ReplicaPool
else:
    # Two thirds of what there is to load, and not everybody needs it: it comes when it is named.
    _LATER = {
        "Batcher": "serve",
        "ReplicaPool": "serve",
        "data": "data",
        "map": "data",
        "serve": "serve",
    }

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        package = importlib.import_module(f"{__name__}.{_LATER[name]}")
        found = globals()[name] = package if name == _LATER[name] else getattr(package, name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})


__all__ = [
    "Batcher",
    "BlockingWaitError",
    "CallInfo",
    "CallbackContext",
    "DataParallel",
    "DeadlineExceeded",
    "DeviceExecutor",
    "ExecutorObserver",
    "ExecutorShutdown",
    "ExecutorStats",
    "Future",
    "InvalidInput",
    "Iteration",
    "OutputMismatch",
    "Overloaded",
    "Parallel",
    "Parallelizable",
    "QueueFull",
    "Replica",
    "ReplicaAborted",
    "ReplicaPool",
    "ReplicaUnavailable",
    "Replicated",
    "ReplicationCallbackDataParallel",
    "ServiceClosed",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
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
    "use_executor",
    "wait",
    "wait_all",
    "wrap_future",
]

__version__ = "0.1.0"
