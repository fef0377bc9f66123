"""Replicas of a module, one a device (what `aiopar.replicate` runs on a worker)."""

from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._devices import Device, is_accelerator, parse_devices
from ._module_tree import M, ModuleTree, TensorMap
from ._replicable import check_module
from ._scatter import for_several
from ._scatter_gather import run_near
from ._tensor_copies import copied


def replicate_sync(network: M, devices: Sequence[torch.device], *, detach: bool = False) -> list[M]:
    """What `replicate` awaits; on the calling thread, `devices` parsed."""
    tree = ModuleTree(network)
    parameters = {
        device: _parameter_copies(tree.parameters, device, detach) for device in set(devices)
    }
    for copies in parameters.values():
        tree.flatten_rnns(copies)
    replicas = []
    for index, device in enumerate(devices):
        buffers = _buffer_copies(tree.buffers, device, shared=index == 0, detach=detach)
        replicas.append(tree.copy({**parameters[device], **buffers}))
    return replicas


def _parameter_copies(parameters: list[Tensor], device: torch.device, detach: bool) -> TensorMap:
    copies = {}
    for old in parameters:
        if detach:
            copies[id(old)] = old.detach().to(device)
        elif is_accelerator(old.device):
            # Through a view, made on this stream, gradients come to the original on one stream;
            # those of replicas come from several, which torch warns of.
            copies[id(old)] = old.view_as(old).to(device)
        elif old.device != device:
            copies[id(old)] = old.to(device)
    return copies


def _buffer_copies(
    buffers: list[Tensor], device: torch.device, *, shared: bool, detach: bool
) -> TensorMap:
    copies = {}
    for old in buffers:
        source = old.detach() if detach and old.requires_grad else for_several(old)
        if not (shared and old.device == device):
            copies[id(old)] = copied(source, device)
        elif source is not old:
            copies[id(old)] = source
    return copies


def replicate(
    network: M, devices: Iterable[Device], detach: bool = False
) -> Coroutine[Any, Any, list[M]]:
    """Copy a module to each of `devices`, gradients flowing back to the original.

    Mirrors `torch.nn.parallel.replicate`, awaited, for any kind of device. The copies are made on a
    worker. What holds for a replica:

    - Its parameters are differentiable copies (`parameter.to(device)`): a backward through any
      replica adds to the original's `.grad`. Frozen ones stay frozen. With `detach=True` they are
      detached. Under inference mode they are inference tensors.
    - On the device of the original they share its storage (on the CPU they are its own
      `Parameter` objects), and replicas that share another device share one copy of them: N
      replicas on one device need the memory of one.
    - Replica 0, if on the original's device, has the original's own buffers, so that in-place
      updates (BatchNorm's running statistics) persist; all other replicas have buffers of their
      own. A buffer that requires gradients is a differentiable copy.
    - A parameter, buffer or submodule that appears twice is one object in the replica too.
    - Everything else is shared with the original, as in torch: a tensor in a plain attribute
      stays where it is; a submodule, parameter or bound method (a hook, say) that is referred to
      from a plain attribute or list is the *original's*.

    Differences from torch: `parameters()`, `named_parameters()` and `state_dict()` of a replica
    are its copies (in torch they are empty, and a model that asks for its own dtype fails); hook
    dicts are copies (in torch a hook registered on a replica stays on the original); compiled
    modules and instance-patched `forward`s are refused (in torch, replicating a compiled module
    takes the parameters out of the *user's* module, and a patched forward computes with the
    original's weights); a parameter that no replica used keeps its `.grad` (in torch it gets
    zeros); `flatten_parameters()` of a replicated RNN does nothing, for that was done when it was
    copied; lazy modules, `ScriptModule`s with Python children and empty `devices` raise as below
    (torch: `RuntimeError`, and `[]` for no devices); devices may repeat, and the network may be on
    any device.

    Args:
        network: The module. A `ScriptModule` is copied by TorchScript, as in torch.
        devices: One entry a replica, as for `DeviceExecutor`.
        detach: Cut the replicas' tensors off from the originals' gradients.

    Raises:
        TypeError: It is no module; or one in it is compiled, has a patched `forward`, or is a
            `ScriptModule` with Python children; the message has its path.
        ValueError: A lazy module in it is not initialised, `devices` is empty, or there is no such
            device.

    Example:
        >>> import asyncio, aiopar, torch
        >>> network = torch.nn.Linear(2, 1)
        >>> first, second = asyncio.run(aiopar.replicate(network, ["cpu", "cpu"]))
        >>> (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum().backward()
        >>> network.bias.grad
        tensor([2.])
    """
    check_module(network)
    targets = parse_devices(devices)
    return run_near(targets[0], partial(replicate_sync, network, targets, detach=detach))
