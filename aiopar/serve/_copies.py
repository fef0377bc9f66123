"""Copies of modules that share nothing that a call writes; made on a worker.

They are complete when they are returned: calls compute with them on other streams, at once.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..nn._module_tree import all_tensors
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
    """A deep copy with other weights; and what `load_state_dict` says of its keys."""
    with torch.inference_mode(False):
        loaded = copy.deepcopy(module)
        keys = loaded.load_state_dict(state_dict, strict)
    synchronize(all_tensors(loaded))
    return loaded, keys
