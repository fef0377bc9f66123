"""How many bytes a model has: the parameters and buffers of its modules."""

import gc
from collections.abc import Iterator
from functools import partial
from itertools import chain
from types import ModuleType

from torch import nn

from ..executor._current import get_executor
from ._base_batcher import BaseBatcher
from ._replica_pool import ReplicaPool


def bytes_of(model: object) -> int | None:
    """The bytes of the weights on all devices, each memory once; None: no module was found."""
    modules = [*modules_in(model)]
    storages = {
        (tensor.device, storage.data_ptr()): storage.nbytes()
        for module in modules
        for tensor in chain(module.parameters(), module.buffers())
        for storage in [tensor.untyped_storage()]
    }
    return sum(storages.values()) * _copies(model) if modules else None


def modules_in(held: object, depth: int = 4) -> Iterator[nn.Module]:
    """The modules that a batcher, a pool, a stepper or a function refers to."""
    if isinstance(held, nn.Module):
        yield held
    elif depth and not isinstance(held, type | ModuleType):
        parts = [getattr(held, "__self__", None), *getattr(held, "__dict__", {}).values()]
        if isinstance(held, partial):
            parts += [held.func, *held.args, *held.keywords.values()]
        for cell in getattr(held, "__closure__", None) or ():
            parts += gc.get_referents(cell)  # the attribute `cell_contents` fails without contents
        for part in parts:
            yield from modules_in(part, depth - 1)


def _copies(model: object) -> int:
    """How many copies of its modules a model has: one per device, or one per process."""
    pool = model.pool if isinstance(model, BaseBatcher) else model
    if not isinstance(pool, ReplicaPool):
        return 1
    executor = pool._executor or get_executor()
    return len(set(pool.devices) if executor._dispatcher.shares_memory else pool.devices)
