"""`torch.nn.parallel`, awaited."""

from ._callbacks import CallbackContext, exec_data_parallel_replication_callback
from ._data_parallel import (
    DataParallel,
    ReplicationCallbackDataParallel,
    data_parallel,
    patch_replication_callback,
)
from ._module_copy import replicate
from ._parallel_apply import fork_apply, parallel_apply
from ._scatter_gather import Replicated, Split, gather, scatter, scatter_kwargs
from ._sync_batchnorm import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)

__all__ = [
    "CallbackContext",
    "DataParallel",
    "Replicated",
    "ReplicationCallbackDataParallel",
    "Split",
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


def __dir__() -> list[str]:
    return __all__
