"""`torch.nn.parallel`, awaited."""

from ._callback_context import CallbackContext, exec_data_parallel_replication_callback
from ._callbacks import ReplicationCallbackDataParallel, patch_replication_callback
from ._convert_sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm
from ._data_parallel import DataParallel, data_parallel
from ._parallel_apply import fork_apply, parallel_apply
from ._replicate import replicate
from ._scatter import Replicated
from ._scatter_gather import gather, scatter, scatter_kwargs
from ._sync_batchnorm import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
)

__all__ = [
    "CallbackContext",
    "DataParallel",
    "Replicated",
    "ReplicationCallbackDataParallel",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "convert_sync_batchnorm",
    "data_parallel",
    "exec_data_parallel_replication_callback",
    "fork_apply",
    "gather",
    "parallel_apply",
    "patch_replication_callback",
    "replicate",
    "revert_sync_batchnorm",
    "scatter",
    "scatter_kwargs",
]
