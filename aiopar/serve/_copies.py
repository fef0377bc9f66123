"""Copies of modules that share nothing that a call writes; made on a worker."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._devices import is_accelerator
from ..nn._module_tree import all_tensors
from ..nn._replicate import replicate_sync


def copies_of(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """A replica for each of `devices`, complete there.

    Parameters are shared by those on one device, with `module` too if it is there. Buffers are
    their own: replica 0 of `replicate` would have those of `module`, so it is not one of them.
    """
    with torch.inference_mode(False), torch.no_grad():
        _, *copies = replicate_sync(module, [devices[0], *devices], detach=True)
        for made in copies:
            _complete(made)
    return copies


def loaded_copy(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool
) -> tuple[nn.Module, Any]:
    """A deep copy with other weights, complete; and what `load_state_dict` says of its keys."""
    with torch.inference_mode(False):
        loaded = copy.deepcopy(module)
        keys = loaded.load_state_dict(state_dict, strict)
    _complete(loaded)
    return loaded, keys


def _complete(module: nn.Module) -> None:
    """Wait until what this thread has launched for the tensors of `module` is done.

    Calls compute with them on other streams, at once.
    """
    devices = {tensor.device for tensor in all_tensors(module)}
    for device in filter(is_accelerator, devices):
        torch.accelerator.current_stream(device).synchronize()
