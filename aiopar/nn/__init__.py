"""`torch.nn.parallel`, awaited."""

from ._callback_context import (
    CallbackContext as CallbackContext,
    exec_data_parallel_replication_callback as exec_data_parallel_replication_callback,
)
from ._callbacks import (
    ReplicationCallbackDataParallel as ReplicationCallbackDataParallel,
    patch_replication_callback as patch_replication_callback,
)
from ._convert_sync_batchnorm import (
    convert_sync_batchnorm as convert_sync_batchnorm,
    revert_sync_batchnorm as revert_sync_batchnorm,
)
from ._data_parallel import DataParallel as DataParallel, data_parallel as data_parallel
from ._parallel_apply import fork_apply as fork_apply, parallel_apply as parallel_apply
from ._replicate import replicate as replicate
from ._scatter import Replicated as Replicated
from ._scatter_gather import gather as gather, scatter as scatter, scatter_kwargs as scatter_kwargs
from ._sync_batchnorm import (
    SynchronizedBatchNorm1d as SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d as SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d as SynchronizedBatchNorm3d,
)
