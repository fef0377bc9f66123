"""Copies of modules that share nothing that a call writes; made on a worker.

They are complete when they are returned: calls compute with them on other streams, at once.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..nn._module_tree import PARTS, all_tensors
from ..nn._replicate import replicate_sync
from ..nn._tensor_copies import synchronize


def copies_of(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """A replica for each of `devices`.

    Parameters are shared by those on one device, with `module` too if it is there. Buffers are
    their own: replica 0 of `replicate` would have those of `module`, so it is not one of them.
    """
    with torch.inference_mode(False), torch.no_grad():
        _, *copies = replicate_sync(module, [devices[0], *devices], detach=True)
        for made in copies:
            synchronize(all_tensors(made))
    return copies


def loaded_copy(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool
) -> tuple[nn.Module, Any]:
    """A deep copy with other weights; and what `load_state_dict` says of its keys.

    Attributes that cannot be copied (a lock, a tensor with a graph) are shared, as replicas do.
    """
    with torch.inference_mode(False):
        loaded = _deep_copy(module)
        keys = loaded.load_state_dict(state_dict, strict)
    synchronize(all_tensors(loaded))
    return loaded, keys


def _deep_copy(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001, S110  # of the user's own classes too
        pass  # and what was copied until then is let go of
    modules = {id(one): one for one in module.modules()}
    shared = {
        id(value): value
        for one in modules.values()
        for name, value in vars(one).items()
        if name not in PARTS and not _is_copyable(value, modules)
    }
    return copy.deepcopy(module, shared)


def _is_copyable(value: Any, modules: dict[int, nn.Module]) -> bool:
    """Whether it can be, but for the `modules` that it may refer to: these are copied."""
    try:
        copy.deepcopy(value, modules.copy())
    except Exception:  # noqa: BLE001  # ditto
        return False
    return True
