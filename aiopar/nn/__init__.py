"""`torch.nn.parallel`, awaited."""

from ._data_parallel import DataParallel as DataParallel, data_parallel as data_parallel
from ._parallel_apply import fork_apply as fork_apply, parallel_apply as parallel_apply
from ._replicate import replicate as replicate
from ._scatter import Replicated as Replicated
from ._scatter_gather import gather as gather, scatter as scatter, scatter_kwargs as scatter_kwargs
