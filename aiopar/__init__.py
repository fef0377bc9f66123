"""`torch.nn.parallel`, awaited."""

from ._autograd import backward as backward
from ._default import (
    get_executor as get_executor,
    run_sync as run_sync,
    use_executor as use_executor,
)
from ._errors import (
    BlockingWaitError as BlockingWaitError,
    DeadlineExceeded as DeadlineExceeded,
    ExecutorShutdown as ExecutorShutdown,
    InvalidInput as InvalidInput,
    OutputMismatch as OutputMismatch,
    Overloaded as Overloaded,
    QueueFull as QueueFull,
    ReplicaAborted as ReplicaAborted,
    ReplicaUnavailable as ReplicaUnavailable,
    ServiceClosed as ServiceClosed,
)
from ._executor import DeviceExecutor as DeviceExecutor, ExecutorStats as ExecutorStats
from ._fork import fork as fork, wait as wait
from ._future import Future as Future
from ._gang import Replica as Replica, current_replica as current_replica
from ._iterate import Iteration as Iteration
from ._observer import CallInfo as CallInfo, ExecutorObserver as ExecutorObserver
from ._parallel import Parallel as Parallel, Parallelizable as Parallelizable
from ._torch_future import wrap_future as wrap_future
from ._waiting import (
    as_completed as as_completed,
    collect_all as collect_all,
    wait_all as wait_all,
)
from ._worker import WorkerStats as WorkerStats
from .data import map as map  # noqa: A004
from .nn import (
    CallbackContext as CallbackContext,
    DataParallel as DataParallel,
    Replicated as Replicated,
    ReplicationCallbackDataParallel as ReplicationCallbackDataParallel,
    SynchronizedBatchNorm1d as SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d as SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d as SynchronizedBatchNorm3d,
    convert_sync_batchnorm as convert_sync_batchnorm,
    data_parallel as data_parallel,
    exec_data_parallel_replication_callback as exec_data_parallel_replication_callback,
    fork_apply as fork_apply,
    gather as gather,
    parallel_apply as parallel_apply,
    patch_replication_callback as patch_replication_callback,
    replicate as replicate,
    revert_sync_batchnorm as revert_sync_batchnorm,
    scatter as scatter,
    scatter_kwargs as scatter_kwargs,
)
from .serve import Batcher as Batcher, ReplicaPool as ReplicaPool

__version__ = "0.1.0"
