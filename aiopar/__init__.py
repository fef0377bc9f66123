"""`torch.nn.parallel`, awaited."""

from ._default import (
    get_executor as get_executor,
    run_sync as run_sync,
    use_executor as use_executor,
)
from ._errors import (
    BlockingWaitError as BlockingWaitError,
    ExecutorShutdown as ExecutorShutdown,
    QueueFull as QueueFull,
    ReplicaAborted as ReplicaAborted,
)
from ._executor import DeviceExecutor as DeviceExecutor, ExecutorStats as ExecutorStats
from ._fork import fork as fork, wait as wait
from ._future import Future as Future
from ._gang import Replica as Replica, current_replica as current_replica
from ._iterate import Iteration as Iteration
from ._observer import CallInfo as CallInfo, ExecutorObserver as ExecutorObserver
from ._waiting import (
    as_completed as as_completed,
    collect_all as collect_all,
    wait_all as wait_all,
    wrap_future as wrap_future,
)
from ._worker import WorkerStats as WorkerStats
from .nn import (
    DataParallel as DataParallel,
    Replicated as Replicated,
    data_parallel as data_parallel,
    fork_apply as fork_apply,
    gather as gather,
    parallel_apply as parallel_apply,
    replicate as replicate,
    scatter as scatter,
    scatter_kwargs as scatter_kwargs,
)

__version__ = "0.1.0"
