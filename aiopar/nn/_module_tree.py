"""Shallow copies of a module tree: new modules, around tensors that are given.

Replication is two questions. *Which tensors* does replica i see: `_replicate` and `_kept_replicas`
answer that. *What is a copy of a module*: this file. A copy has its own `__dict__`, its own hook
dicts and its own `_parameters`, `_buffers` and `_modules`; everything else is shared with the
original, as in `torch.nn.parallel.replicate`.
"""

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from ._replicable import check_replicable, is_overridden

M = TypeVar("M", bound=nn.Module)

Fields = dict[str, Any]
"""The `__dict__` of a module."""

TensorMap = Mapping[int, Tensor]
"""`id` of an original tensor -> the tensor that a copy has in its place; not in it: the original.

Whoever holds a map holds the originals too (`ModuleTree` does), so that no `id` is used again.
"""

# Asked of torch, not listed: the dicts and sets that every module has in this version.
CONTAINERS = tuple(
    name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)
)
PARTS = "_modules", "_parameters", "_buffers"
# Those of hooks, and the set of non-persistent buffers.
_OWN_CONTAINERS = tuple(name for name in CONTAINERS if name not in PARTS)

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

    __slots__ = ("_root", "_seen", "_special", "buffers", "modules", "parameters")

    def __init__(self, root: M) -> None:
        self._root = root
        self.modules = walk(root)
        self._seen = _contents(map(_parts, self.modules))
        check_replicable(root, self.modules)
        _, parameters, buffers, _ = self._seen
        self.parameters = _unique(parameters)
        # A tensor that is registered as both is one parameter, so that the tie is kept.
        known = {id(parameter) for parameter in self.parameters}
        self.buffers = [buffer for buffer in _unique(buffers) if id(buffer) not in known]
        self._special = {id(module) for module in self.modules if _copies_itself(module)}

    def unchanged(self) -> bool:
        """Whether the tree still has the same modules, parameters and buffers, unpatched."""
        if any(map(is_overridden, self.modules)):
            return False
        return self._is(_contents(map(_parts, self.modules)))

    def describes(self, fields: Iterable[Fields]) -> bool:
        """Whether the same were there when the modules had `fields`."""
        return self._is(_contents(tuple(map(one.__getitem__, PARTS)) for one in fields))

    def _is(self, contents: "_Contents") -> bool:
        *seen, ends = self._seen
        *found, found_ends = contents
        return ends == found_ends and all(
            all(map(operator.is_, old, new)) for old, new in zip(seen, found, strict=True)
        )

    def copy(self, tensors: TensorMap, fields: Sequence[Fields] | None = None) -> M:
        """A copy whose modules see `tensors`; plain attributes, hooks and modes as they are now.

        Or as they were when the modules, torch's plainest, had `fields`.
        """
        copies: dict[int, nn.Module] = {}
        special = self._special
        children = [module._modules for module in self.modules]
        if fields is not None:
            children = [one["_modules"] for one in fields]
        for index, module in enumerate(self.modules):
            if id(module) in special:
                copies[id(module)] = _copy_special(module, tensors)
                continue
            own = (module.__dict__ if fields is None else fields[index]).copy()
            _isolate(own, tensors)
            copies[id(module)] = copied = _new(type(module))
            _set_attribute(copied, "__dict__", own)
        for copied, originals in zip(copies.values(), children, strict=True):
            if originals:
                _link(copied, originals, copies)
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
    _, parameters, buffers, _ = _contents(map(_parts, walk(root)))
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


# Not from its `__dict__`: those of a `ScriptModule` are not there.
_parts = operator.attrgetter(*PARTS)
_Contents: TypeAlias = tuple[list[Any], list[Any], list[Any], list[int]]


def _contents(parts: Iterable[tuple[Any, ...]]) -> _Contents:
    """All children, parameters and buffers, in order, with repeats and None; and whose they are."""
    children: list[Any] = []
    parameters: list[Any] = []
    buffers: list[Any] = []
    ends: list[int] = []
    for own_children, own_parameters, own_buffers in parts:
        children += own_children.values()
        parameters += own_parameters.values()
        buffers += own_buffers.values()
        ends += (len(children), len(parameters), len(buffers))
    return children, parameters, buffers, ends


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


def _link(
    copied: nn.Module, originals: Mapping[str, nn.Module | None], copies: Mapping[int, nn.Module]
) -> None:
    children = {
        name: None if child is None else copies[id(child)] for name, child in originals.items()
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
