"""Replication callbacks: a module is told that it was copied, and which copy it is."""

from typing import Any

from torch import nn

from ._callback_context import is_patched, patched
from ._data_parallel import DataParallel


class ReplicationCallbackDataParallel(DataParallel):
    """`DataParallel` under the name that it has in jactorch, for code that was written for that.

    Every `DataParallel` runs replication callbacks: this one does nothing else, and runs them once.

    Mirrors jactorch's class of this name (`DataParallelWithCallback` in
    Synchronized-BatchNorm-PyTorch). Differences from it are those of `DataParallel` from torch,
    and those of `exec_data_parallel_replication_callback`.

    Example:
        >>> import asyncio, torch
        >>> class Numbered(nn.Module):
        ...     def __data_parallel_replicate__(self, ctx, copy_id):
        ...         self.number = copy_id
        ...     def forward(self, x):
        ...         return x + self.number
        >>> dp = ReplicationCallbackDataParallel(Numbered(), device_ids=["cpu", "cpu"])
        >>> asyncio.run(dp(torch.zeros(4)))
        tensor([0., 0., 1., 1.])
    """


def patch_replication_callback(data_parallel: DataParallel | nn.DataParallel[Any]) -> None:
    """Run replication callbacks after the `replicate` of this wrapper, once, whoever wrote it.

    Mirrors jactorch's function of this name. It is for a `torch.nn.DataParallel`, and for a
    subclass of aiopar's whose own `replicate` does not call the inherited one; other wrappers of
    aiopar run them without it, and stay as they are. A patched wrapper runs them on what its
    `replicate` returned, and at no other time. It refers to itself: the garbage collector frees it.
    Patching again changes nothing.

    Differences from jactorch: a wrong argument is a `TypeError` (there an `AssertionError`);
    patching twice calls once; `replicate` may be a coroutine function; a patched wrapper can be
    pickled and deepcopied.

    Args:
        data_parallel: Its `replicate` is replaced, on the instance.

    Raises:
        TypeError: It is no `DataParallel`, neither of aiopar nor of torch.

    Example:
        >>> class Mine(DataParallel):
        ...     def replicate(self, module, device_ids):
        ...         return [module for _ in device_ids]
        >>> dp = Mine(nn.Linear(2, 1), device_ids=["cpu", "cpu"])
        >>> patch_replication_callback(dp)
    """
    if not isinstance(data_parallel, DataParallel | nn.DataParallel):
        raise TypeError(
            "expected an aiopar.DataParallel or a torch.nn.DataParallel, got "
            f"{type(data_parallel).__name__}"
        )
    if isinstance(data_parallel, DataParallel) and not data_parallel._overrides("replicate"):
        return  # the inherited one runs them
    if not is_patched(data_parallel):
        data_parallel.replicate = patched(data_parallel.replicate)  # type: ignore[method-assign]
