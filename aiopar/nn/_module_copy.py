"""Replicas of a module, one a device (what `aiopar.replicate` runs on a worker)."""

import operator
import sys
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._base.devices import Device, current_stream, is_accelerator, parse_devices
from ._scatter_gather import for_several, run_near


def check_module(module: object) -> None:
    """Raise TypeError unless it is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(module).__name__}")


def check_placement(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Raise RuntimeError unless all of a module's tensors are on the first of its devices."""
    for tensor in tensors:
        if tensor.device != device:
            # torch's words.
            raise RuntimeError(
                f"module must have its parameters and buffers on device {device} (device_ids[0]) "
                f"but found one of them on device: {tensor.device}"
            )


def is_overridden(module: nn.Module) -> bool:
    """Whether its `forward` was patched on the instance, or it was compiled in place.

    Which a user may do at any time: it is cheap enough to ask before each call.
    """
    fields = module.__dict__
    if "forward" not in fields and fields.get("_compiled_call_impl") is None:
        return False
    return not isinstance(module, torch.jit.ScriptModule) and not _is_export_guard(module)


def _is_export_guard(module: nn.Module) -> bool:
    """Whether it is what checks the inputs of a module made by `torch.export`: without weights."""
    # As below: none can exist before its module is imported.
    unlift = sys.modules.get("torch.export._unlift")
    guards = getattr(unlift, "GuardsFn", None)  # torch 2.9 has it; earlier and later ones may not
    return guards is not None and isinstance(module, guards)


def check_replicable(root: nn.Module, modules: list[nn.Module]) -> None:
    """Raise for the first of `modules`, all below `root`, that cannot be replicated.

    Raises:
        TypeError: It is compiled, or its `forward` was patched on the instance, or it is a Python
            module below a `ScriptModule`.
        ValueError: Its parameters are not initialised yet.
    """
    # No OptimizedModule can exist before its module is imported, and that import is slow.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    for module in modules:
        if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
            raise TypeError(
                f"{_describe(root, module)} was made by torch.compile: a replica cannot run its "
                "compiled code. Replicate the module that was given to torch.compile, or run the "
                "compiled one as it is with DeviceExecutor.run_sync or parallel_apply."
            )
        if is_overridden(module):
            raise TypeError(f"{_describe(root, module)} {_refusal(module)}")
        if isinstance(module, torch.jit.ScriptModule):
            _check_scripted(root, module)
        elif _is_uninitialized(module):
            raise ValueError(
                f"{_describe(root, module)} has uninitialized parameters or buffers: run a dummy "
                "forward pass first, so that their shapes are known"
            )


def _is_uninitialized(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and is_lazy(tensor) for tensor in tensors)


def _refusal(module: nn.Module) -> str:
    if "forward" in module.__dict__:
        return (
            "has its forward patched on the instance: the replicas would all run it with the "
            "original's weights. Override forward in a subclass, or use a forward hook."
        )
    return (
        "was compiled in place by Module.compile: a replica cannot run its compiled code. "
        "Replicate a module that is not compiled."
    )


def _check_scripted(root: nn.Module, module: nn.Module) -> None:
    if not all(isinstance(child, torch.jit.ScriptModule) for child in module.children()):
        raise TypeError(
            f"{_describe(root, module)} is a ScriptModule with Python modules as children: it "
            "cannot be replicated"
        )


def _describe(root: nn.Module, module: nn.Module) -> str:
    path = next(name for name, found in root.named_modules() if found is module)
    where = f"module {path!r}" if path else "the module"
    return f"{where} ({type(module).__name__})"


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

    def _is(self, contents: "_Contents") -> bool:
        *seen, ends = self._seen
        *found, found_ends = contents
        return ends == found_ends and all(
            all(map(operator.is_, old, new)) for old, new in zip(seen, found, strict=True)
        )

    def copy(self, tensors: TensorMap) -> M:
        """A copy whose modules see `tensors`; plain attributes, hooks and modes as they are now."""
        copies: dict[int, nn.Module] = {}
        for module in self.modules:
            if id(module) in self._special:
                copies[id(module)] = _copy_special(module, tensors)
                continue
            own = module.__dict__.copy()
            _isolate(own, tensors)
            copies[id(module)] = copied = _new(type(module))
            _set_attribute(copied, "__dict__", own)
        for module, copied in zip(self.modules, copies.values(), strict=True):
            if module._modules:
                _link(copied, module._modules, copies)
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


_device = operator.attrgetter("device")
_traits = operator.attrgetter("_version", "requires_grad")


class Target(NamedTuple):
    """Where copies go: a device; `shares`: a tensor that is there already is used as it is."""

    device: torch.device
    shares: bool

    def needs_copy(self, tensor: Tensor) -> bool:
        return not self.shares or tensor.device != self.device


class TensorCopies:
    """For each target, the copies of some tensors, by the `id` of the original.

    A copy holds while nothing has written to it or to its original: `_version`, address, storage
    and `requires_grad` of both are as they were. A write that leaves no such trace is not seen:
    one through `.data`, NumPy or a custom kernel, and any to a tensor that was made in inference
    mode (it has no version).

    Not thread-safe: its owner has a lock.
    """

    __slots__ = (
        "_homes",
        "_marks",
        "_owners",
        "_storages",
        "_targets",
        "_tensors",
        "_watched",
        "maps",
    )

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._tensors: Sequence[Tensor] = ()
        self.maps: list[dict[int, Tensor]] = [{} for _ in targets]
        self._forget()

    def _forget(self) -> None:
        # Parallel lists, for speed: the originals that have copies, then the copies; whose each
        # is (the id of the original); and what each looked like when it was known to hold.
        self._watched: list[Tensor] = []
        self._owners: list[int] = []
        self._marks: list[object] = []
        self._storages: list[weakref.ref[torch.UntypedStorage] | None] = []
        self._homes: list[torch.device] | None = None

    def copied(self) -> set[int]:
        """The ids of the originals that have a copy."""
        return set(self._owners)

    def hold(self) -> bool:
        """Whether all copies hold, and all tensors are on the devices they were on."""
        return (
            list(map(_device, self._tensors)) == self._homes
            and _marks(self._watched) == self._marks
            and all(map(_is_alive, self._storages))
        )

    def renew(self, tensors: Sequence[Tensor], *, everything: bool = False) -> None:
        """Copy `tensors` where there is no copy that holds; `settle` must follow.

        No copy is written to: a call may be computing with it. Those that do not hold are let go
        one by one, so that two sets of weights are never needed at once.
        """
        holding = set() if everything else self._holding()
        self._forget()  # a copy may fail (out of memory): until `settle`, nothing holds
        self._tensors = tensors
        # Looked at before they are read: what is written meanwhile is seen by the next call.
        originals = [t for t in tensors if any(to.needs_copy(t) for to in self._targets)]
        self._watch(originals, map(id, originals))
        for index, target in enumerate(self._targets):
            old = self.maps[index]
            made = self.maps[index] = dict[int, Tensor]()
            for tensor in filter(target.needs_copy, tensors):
                copy = old.pop(id(tensor), None)
                if id(tensor) not in holding:
                    copy = None
                made[id(tensor)] = _leaf(tensor, target.device) if copy is None else copy

    def settle(self) -> None:
        """From here on the copies, too, must stay as they are.

        Blocks until they are complete: the next call finds that they hold, and computes with them
        on other streams, at once.
        """
        for made in self.maps:
            synchronize(made.values())
            self._watch(made.values(), made)
        self._homes = list(map(_device, self._tensors))

    def _watch(self, tensors: Iterable[Tensor], owners: Iterable[int]) -> None:
        self._owners += owners
        found = list(tensors)
        self._watched += found
        self._marks += _marks(found)
        self._storages += map(_storage, found)

    def _holding(self) -> set[int]:
        """The ids of the originals that have not changed, nor any of their copies."""
        if self._homes is None:
            return set()
        now = _marks(self._watched)
        changed = {
            owner
            for owner, old, new, storage in zip(
                self._owners, self._marks, now, self._storages, strict=True
            )
            if old != new or not _is_alive(storage)
        }
        return self.copied() - changed


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Block until what this thread has launched on the devices of `tensors` is done."""
    for device in filter(is_accelerator, {tensor.device for tensor in tensors}):
        current_stream(device).synchronize()


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, in memory of its own."""
    # In its place by `clone`: `to(copy=True)` cannot copy what is in MKLDNN's layout.
    return tensor.clone() if tensor.device == device else tensor.to(device, copy=True)


def _leaf(original: Tensor, device: torch.device) -> Tensor:
    """A copy that is to autograd what the original is: a leaf, asking for gradients or not."""
    copy = copied(original.detach(), device)
    if isinstance(original, nn.Parameter):
        return nn.Parameter(copy, original.requires_grad)
    return copy.requires_grad_(original.requires_grad)


def _marks(tensors: Sequence[Tensor]) -> list[object]:
    try:
        return list(zip(map(_traits, tensors), map(Tensor.data_ptr, tensors), strict=True))
    except RuntimeError:
        return [_mark(tensor) for tensor in tensors]


def _mark(tensor: Tensor) -> object:
    # No version: made in inference mode. No address: sparse, and others without one storage.
    version = None if tensor.is_inference() else tensor._version
    storage = _storage(tensor)
    return (version, tensor.requires_grad), None if storage is None else tensor.data_ptr()


def _storage(tensor: Tensor) -> "weakref.ref[torch.UntypedStorage] | None":
    """Dead when the storage is freed: after that its address may be that of another one.

    `module.half()` and `.float()` between two calls: same version, often the same address, other
    weights.
    """
    try:
        return weakref.ref(tensor.untyped_storage())
    except RuntimeError:  # sparse, and others without a storage
        return None


def _is_alive(storage: "weakref.ref[torch.UntypedStorage] | None") -> bool:
    return storage is None or storage() is not None


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
