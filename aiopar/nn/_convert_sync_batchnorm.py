"""Converting the BatchNorm layers of a module to synchronized ones, and back."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from ._replicable import check_module
from ._sync_batchnorm import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
)

M = TypeVar("M", bound=nn.Module)

_Classes = Mapping[type[nn.Module], type[nn.Module]]
_SYNCHRONIZED: _Classes = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
}
_PLAIN: _Classes = {synchronized: plain for plain, synchronized in _SYNCHRONIZED.items()}


def convert_sync_batchnorm(module: M) -> M:
    """Make every BatchNorm in `module` a synchronized one, in place, and return `module`.

    Mirrors `torch.nn.SyncBatchNorm.convert_sync_batchnorm`. Difference: layers stay the objects
    that they are, and only their class is another. Parameters, buffers, hooks, attributes, modes
    and whoever refers to a layer (an optimizer, a list, a second parent) are as before. torch makes
    new layers, without hooks.

    Converted are `torch.nn.BatchNorm1d`, `2d` and `3d` themselves. All else is left as it is:
    subclasses, whose `forward` is their own (torch replaces them too), what TorchScript has
    compiled, InstanceNorm, and `torch.nn.SyncBatchNorm`, which is for processes.

    Args:
        module: A model, or a BatchNorm itself.

    Raises:
        TypeError: `module` is not a module.
        ValueError: A lazy BatchNorm in it has not seen data; then nothing is converted.

    Example:
        >>> import aiopar
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        >>> type(aiopar.convert_sync_batchnorm(model)[1]).__name__
        'SynchronizedBatchNorm2d'
    """
    check_module(module)
    for path, each in module.named_modules():
        if isinstance(each, nn.LazyBatchNorm1d | nn.LazyBatchNorm2d | nn.LazyBatchNorm3d):
            raise ValueError(
                f"module {path!r} is a {type(each).__name__} that has not seen data: run a batch "
                "through the model first"
            )
    return _with_classes(module, _SYNCHRONIZED)


def revert_sync_batchnorm(module: M) -> M:
    """Make every synchronized BatchNorm in `module` a plain one: undo `convert_sync_batchnorm`.

    In place; layers stay the objects that they are. torch has no counterpart.

    Args:
        module: A model, or a synchronized BatchNorm itself.

    Raises:
        TypeError: `module` is not a module.

    Example:
        >>> import aiopar
        >>> type(aiopar.revert_sync_batchnorm(aiopar.SynchronizedBatchNorm1d(4)))
        <class 'torch.nn.modules.batchnorm.BatchNorm1d'>
    """
    check_module(module)
    return _with_classes(module, _PLAIN)


def _with_classes(root: M, classes: _Classes) -> M:
    for module in root.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]
    return root
