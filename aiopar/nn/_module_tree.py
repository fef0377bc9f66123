"""Shallow copies of a module tree: new modules, around tensors that are given.

Replication is two questions. *Which tensors* does replica i see: `_replicate` and `_kept_replicas`
answer that. *What is a copy of a module*: this file. A copy has its own `__dict__`, its own hook
dicts and its own `_parameters`, `_buffers` and `_modules`; everything else is shared with the
original, as in `torch.nn.parallel.replicate`.
"""

import operator
import weakref
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from ._replicable import check_replicable, is_overridden

M = TypeVar("M", bound=nn.Module)

TensorMap = Mapping[int, Tensor]
"""`id` of an original tensor -> the tensor that a copy has in its place; not in it: the original.

Whoever holds a map holds the originals too (`ModuleTree` does), so that no `id` is used again.
"""

# Asked of torch, not listed: the hook dicts and the set of non-persistent buffers of this version.
_OWN_CONTAINERS = tuple(
    name
    for name, value in vars(nn.Module()).items()
    if isinstance(value, dict | set) and name not in ("_parameters", "_buffers", "_modules")
)

_new = object.__new__
# nn.Module.__setattr__ looks through parameters, buffers and modules first: ten times slower.
_set_attribute = object.__setattr__


class ModuleTree(Generic[M]):
    """A module and all below it, each once, as flat lists made for fast checking and copying.

    Raises:
        TypeError: A module cannot be replicated: compiled, its `forward` patched on the instance,
            or a Python module below a `ScriptModule`.
        ValueError: A lazy module's parameters are not initialised yet.
    """

    __slots__ = ("_parents", "_root", "_seen", "_special", "buffers", "modules", "parameters")

    def __init__(self, root: M) -> None:
        self._root = root
        self.modules = walk(root)
        self._seen = _contents(self.modules)
        check_replicable(root, self.modules)
        children, parameters, buffers = self._seen
        self.parameters = _unique(parameters)
        # A tensor that is registered as both is one parameter, so that the tie is kept.
        known = {id(parameter) for parameter in self.parameters}
        self.buffers = [buffer for buffer in _unique(buffers) if id(buffer) not in known]
        self._special = {id(module) for module in self.modules if _copies_itself(module)}
        self._parents = [module for module in self.modules if module._modules] if children else []

    def unchanged(self) -> bool:
        """Whether the tree still has the same modules, parameters and buffers, unpatched."""
        if any(map(is_overridden, self.modules)):
            return False
        now = _contents(self.modules)
        return all(
            len(old) == len(new) and all(map(operator.is_, old, new))
            for old, new in zip(self._seen, now, strict=True)
        )

    def copy(self, tensors: TensorMap) -> M:
        """A copy whose modules see `tensors`; plain attributes, hooks and modes as they are now."""
        copies: dict[int, nn.Module] = {}
        special = self._special
        for module in self.modules:
            if id(module) in special:
                copies[id(module)] = _copy_special(module, tensors)
                continue
            fields = module.__dict__.copy()
            _isolate(fields, tensors)
            copies[id(module)] = copied = _new(type(module))
            _set_attribute(copied, "__dict__", fields)
        for parent in self._parents:
            _link(parent, copies)
        return cast("M", copies[id(self._root)])

    def flatten_rnns(self, tensors: TensorMap) -> None:
        """Put weights of RNNs that are copies on another device in one piece, as cuDNN wants them.

        Weights in the original's memory are left alone: others may be computing with them.
        """
        for module in self.modules:
            if isinstance(module, nn.RNNBase) and all(
                weight is not None and _is_moved(weight, tensors) for weight in module._flat_weights
            ):
                nn.RNNBase.flatten_parameters(cast("nn.RNNBase", _copy_special(module, tensors)))


def all_tensors(root: nn.Module) -> list[Tensor]:
    """Every parameter and buffer, some more than once: `parameters()` takes three times as long."""
    _, parameters, buffers = _contents(walk(root))
    return [tensor for tensor in parameters + buffers if tensor is not None]


def walk(root: nn.Module) -> list[nn.Module]:
    """`root` and every module below it, each once, breadth first."""
    order, seen = [root], {id(root)}
    for module in order:  # grows as it goes: breadth first, cycles end
        if module._modules:
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    order.append(child)
    return order


def _contents(modules: list[nn.Module]) -> tuple[list[Any], list[Any], list[Any]]:
    """All children, parameters and buffers, in order, with repeats and None."""
    children: list[Any] = []
    parameters: list[Any] = []
    buffers: list[Any] = []
    for module in modules:
        children += module._modules.values()
        parameters += module._parameters.values()
        buffers += module._buffers.values()
    return children, parameters, buffers


def _unique(tensors: list[Tensor | None]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def _is_moved(original: Tensor, tensors: TensorMap) -> bool:
    return tensors.get(id(original), original).device != original.device


def _isolate(fields: dict[str, Any], tensors: TensorMap) -> None:
    """Give the copy `fields` of a module's `__dict__` containers of its own."""
    for name in _OWN_CONTAINERS:
        fields[name] = fields[name].copy()
    if tensors:
        get = tensors.get
        parameters = {name: get(id(old), old) for name, old in fields["_parameters"].items()}
        buffers = {name: get(id(old), old) for name, old in fields["_buffers"].items()}
    else:
        parameters = fields["_parameters"].copy()
        buffers = fields["_buffers"].copy()
    # Straight into the dicts: `register_parameter` refuses a non-leaf, and a plain attribute (as
    # in torch) would leave `parameters()` empty.
    fields["_parameters"] = fields["_former_parameters"] = parameters
    fields["_buffers"] = buffers
    fields["_modules"] = {}  # `_link` fills it
    fields["_is_replica"] = True


def _link(parent: nn.Module, copies: Mapping[int, nn.Module]) -> None:
    copied = copies[id(parent)]
    children = {
        name: None if child is None else copies[id(child)]
        for name, child in parent._modules.items()
    }
    if isinstance(copied, torch.jit.ScriptModule):
        for name, child in children.items():
            copied._modules[name] = child  # TorchScript's own mapping writes through to C++
    else:
        copied.__dict__["_modules"] = children


def _has_own_protocol(module: nn.Module) -> bool:
    """Whether its author, not torch, wrote its `_replicate_for_data_parallel`.

    torch's overrides (RNNs, lazy modules, `fx.GraphModule`) are about what this file does.
    """
    return not type(module)._replicate_for_data_parallel.__module__.startswith("torch.")


def _replicate_itself(module: nn.Module) -> nn.Module:
    copied: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    return copied


def _copies_itself(module: nn.Module) -> bool:
    special = isinstance(module, torch.jit.ScriptModule | nn.RNNBase)
    return special or _has_own_protocol(module)


def _copy_special(module: nn.Module, tensors: TensorMap) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        return _copy_scripted(module, tensors)
    if _has_own_protocol(module):
        copied = _replicate_itself(module)
        fields = copied.__dict__
        fields.update({name: module.__dict__[name] for name in ("_parameters", "_buffers")})
    else:
        copied = _new(type(module))
        fields = module.__dict__.copy()
        _set_attribute(copied, "__dict__", fields)
    _isolate(fields, tensors)
    if isinstance(module, nn.RNNBase):
        _isolate_flat_weights(fields, tensors)
    return copied


def _copy_scripted(module: nn.Module, tensors: TensorMap) -> nn.Module:
    copied = _replicate_itself(module)
    for named in (module._parameters, module._buffers):
        for name, old in named.items():
            if old is not None and id(old) in tensors:
                setattr(copied, name, tensors[id(old)])
    return copied


def _isolate_flat_weights(fields: dict[str, Any], tensors: TensorMap) -> None:
    """An RNN computes with `_flat_weights`, not with its parameters: they must be the copies."""
    weights = [tensors.get(id(old), old) for old in fields["_flat_weights"]]
    fields["_flat_weights"] = weights
    fields["_flat_weights_names"] = fields["_flat_weights_names"].copy()
    # RNNBase.forward rebuilds the list itself when these do not point to its parameters.
    fields["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in weights]
    # Written for DataParallel, many models flatten in forward. Ours are flat already, and shared:
    # moving the weights while another replica reads them would be a race.
    fields["flatten_parameters"] = _already_flat


def _already_flat() -> None:
    """The weights of a replica are flattened once, when they are copied."""
