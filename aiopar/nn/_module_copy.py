"""Replicas of a module: which modules can be replicated, and how they are copied."""

import operator
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._base.arguments import returns_coroutine, shown_as
from .._base.devices import Device, current_stream, is_accelerator, parse_devices
from ._scatter_gather import run_near, shareable

M = TypeVar("M", bound=nn.Module)
T_co = TypeVar("T_co", covariant=True)

TensorMap: TypeAlias = Mapping[int, Tensor]
"""`id` of an original tensor -> its copy. A tensor that is not in the map is used as it is.

The owner of a map keeps the originals alive (`ModuleTree` does), so that ids stay unique.
"""

PARTS = "_modules", "_parameters", "_buffers"
# All other dicts and sets of a module in this version of torch: hooks, non-persistent buffers.
_OTHER_CONTAINERS = tuple(
    name
    for name, value in vars(nn.Module()).items()
    if isinstance(value, dict | set) and name not in PARTS
)

_new = object.__new__
# `nn.Module.__setattr__` would look through parameters, buffers and modules first.
_set_attribute = object.__setattr__


@returns_coroutine
def replicate(
    network: M, devices: Iterable[Device], detach: bool = False
) -> Coroutine[Any, Any, list[M]]:
    """Copy a module to each of `devices`; gradients flow back to the original.

    Mirrors `torch.nn.parallel.replicate`, awaited, for every kind of device. A worker makes the
    copies.

    - Parameters of a replica are differentiable copies: a backward through a replica adds to the
      original's `.grad`. Frozen parameters stay frozen. `detach=True` detaches them. Under
      inference mode they are inference tensors.
    - Replicas on the same device share the memory of the parameters; on the original's device it is
      the original's memory. A forward may write to that memory under `no_grad` (clamp, `max_norm`).
      All replicas on the device make the write, so the write must be idempotent.
    - On the original's device, replica 0 uses the original's own buffers: in-place updates
      (BatchNorm's running statistics) persist. All other replicas have their own buffers. A buffer
      that requires gradients is a differentiable copy.
    - A parameter, buffer or submodule that appears twice is one object in the replica too.
    - Copies have the attributes of their parameters and buffers (`weight.scale`), on their device.
      A copy of a `torch.nn.Parameter` without a graph (`detach=True`, outside grad mode, frozen)
      is a `torch.nn.Parameter`.
    - Everything else is shared with the original, as in torch. A tensor in a plain attribute stays
      on its device. A plain attribute that refers to a submodule, a parameter or a bound method
      (a hook, for example) still refers to the original's.

    Differences from torch:

    - `devices` may repeat, and the network may be on any device.
    - `parameters()`, `named_parameters()` and `state_dict()` of a replica give its copies. In torch
      they are empty, so a model that asks for its own dtype fails.
    - Hook dicts are copied. In torch a hook registered on a replica stays on the original.
    - Compiled modules and modules with an instance-patched `forward` are refused. torch takes the
      parameters out of the user's compiled module; a patched `forward` computes with the
      original's weights.
    - A parameter that no replica used keeps its `.grad`. In torch it becomes zeros.
    - `flatten_parameters()` of a replicated RNN does nothing: its weights are flat already.
    - Lazy modules, a `ScriptModule` with Python children and empty `devices` raise the errors
      below. torch raises `RuntimeError`, and returns `[]` for no devices.

    Args:
        network: The module. TorchScript copies a `ScriptModule`, as in torch.
        devices: One entry per replica, as for `DeviceExecutor`.
        detach: Whether gradients stop at the replicas.

    Raises:
        TypeError: `network` is not a module; or a module in it is compiled, has a patched
            `forward`, or is a `ScriptModule` with Python children. The message has its path.
        ValueError: A lazy module is not initialised, `devices` is empty, or a device does not
            exist.

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
    call = run_near(targets[0], partial(replicate_sync, network, targets, detach=detach))
    return shown_as(call, "replicate")


def replicate_sync(network: M, devices: Sequence[torch.device], *, detach: bool = False) -> list[M]:
    """`replicate` on the calling thread, for parsed devices."""
    tree = ModuleTree(network)
    parameters = {
        device: _parameter_copies(tree.parameters, device, detach) for device in set(devices)
    }
    for copies in parameters.values():
        tree.flatten_rnns(copies)
    replicas, used = [], set[torch.device]()
    for index, device in enumerate(devices):
        own = parameters[device]
        # Versions matter in backward only. Without gradients the parameters are shared as they are.
        if device in used and torch.is_grad_enabled():
            own = {id(old): _alias(own.get(id(old), old)) for old in tree.parameters}
        used.add(device)
        buffers = _buffer_copies(tree.buffers, device, shared=index == 0, detach=detach)
        replicas.append(tree.copy({**own, **buffers}))
    return replicas


class _Alias(torch.autograd.Function):
    """A tensor with the memory of its original, and a version of its own.

    With a shared version, a write in the forward of one replica would fail another's backward.
    """

    @staticmethod
    def forward(ctx: Any, original: Tensor) -> Tensor:
        return original.data  # `detach` would share the version

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent


def _alias(original: Tensor) -> Tensor:
    alias = like(original, _Alias.apply(original))  # type: ignore[no-untyped-call]
    # torch deep-copies leaves only. A forward may deep-copy a submodule, as in replica 0.
    alias.__deepcopy__ = original.__deepcopy__  # type: ignore[method-assign]
    return alias


def _parameter_copies(parameters: list[Tensor], device: torch.device, detach: bool) -> TensorMap:
    copies = {}
    for old in parameters:
        if detach:
            copies[id(old)] = like(old, old.detach().to(device))
        elif is_accelerator(old.device):
            # Through a view, the original gets its gradients on this stream, as in `shareable`.
            copies[id(old)] = like(old, old.view_as(old).to(device))
        elif old.device != device:
            copies[id(old)] = like(old, old.to(device))
    return copies


def like(original: Tensor, made: Tensor, *, requires_grad: bool = False) -> Tensor:
    """`made`, a copy of `original`: a parameter if `original` is one, unless `made` has a graph.

    `made` may be changed. `requires_grad` is for a copy without a graph.
    """
    if not made.requires_grad and isinstance(original, nn.Parameter):
        if type(made) is Tensor and issubclass(type(original), nn.Parameter):
            # As `nn.Parameter` does. The constructor of a subclass may take other arguments.
            made = Tensor._make_subclass(type(original), made, requires_grad)
        else:
            made = nn.Parameter(made, requires_grad)
    elif requires_grad:
        made.requires_grad_()
    give_attributes(made, original)
    return made


def give_attributes(made: Tensor, original: Tensor) -> None:
    """Give `made`, a copy of `original`, the attributes that a user has set, on its device."""
    own = vars(made)
    for name, value in vars(original).items():
        if name not in own:  # a tensor that is made of tensors has its parts already
            own[name] = value.to(made.device) if isinstance(value, Tensor) else value


def _buffer_copies(
    buffers: list[Tensor], device: torch.device, *, shared: bool, detach: bool
) -> TensorMap:
    copies = {}
    for old in buffers:
        made = old.detach() if detach and old.requires_grad else shareable(old)
        if not (shared and old.device == device):
            made = copied(made, device)
        if made is not old:
            copies[id(old)] = like(old, made)
    return copies


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to `device`, into memory of its own."""
    # `to(copy=True)` on the same device cannot copy MKLDNN's layout; `clone` can.
    return tensor.clone() if tensor.device == device else tensor.to(device, copy=True)


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Block until the kernels that this thread launched on the tensors' devices are done."""
    for device in filter(is_accelerator, {tensor.device for tensor in tensors}):
        current_stream(device).synchronize()


class Forward(Protocol[T_co]):
    """A module, for type checkers: they read the type of its output from its `forward`."""

    @property
    def forward(self) -> Callable[..., T_co]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def check_module(module: object) -> nn.Module:
    """Return `module`, or raise TypeError if it is not a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(module).__name__}")
    return module


def check_placement(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Raise RuntimeError unless all tensors of a module are on `device`, its first one."""
    for tensor in tensors:
        if tensor.device != device:
            raise RuntimeError(  # torch's words
                f"module must have its parameters and buffers on device {device} (device_ids[0]) "
                f"but found one of them on device: {tensor.device}"
            )


def check_replicable(root: nn.Module, modules: list[nn.Module]) -> None:
    """Raise as `replicate` for the first of `modules`, all in `root`, that cannot be replicated."""
    # The import is slow. Until someone imports it, no OptimizedModule can exist.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    for module in modules:
        if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
            raise TypeError(
                f"{_describe(root, module)} was made by torch.compile: a replica cannot run its "
                "compiled code. Replicate the module that was given to torch.compile, or run the "
                "compiled module itself with DeviceExecutor.run_sync or parallel_apply. A "
                "ReplicaPool compiles its replicas: ReplicaPool(module, compile=True)."
            )
        if _is_patched(module):
            raise TypeError(
                f"{_describe(root, module)} has its forward patched on the instance: the replicas "
                "would all run it with the original's weights. Override forward in a subclass, or "
                "use a forward hook."
                if "forward" in module.__dict__
                else f"{_describe(root, module)} was compiled in place by Module.compile: a "
                "replica cannot run its compiled code. Replicate a module that is not compiled."
            )
        if isinstance(module, torch.jit.ScriptModule):
            if not all(isinstance(child, torch.jit.ScriptModule) for child in module.children()):
                raise TypeError(
                    f"{_describe(root, module)} is a ScriptModule with Python modules as children: "
                    "it cannot be replicated"
                )
        elif any(t is not None and is_lazy(t) for t in _contents([module]).tensors):
            raise ValueError(
                f"{_describe(root, module)} has uninitialized parameters or buffers: run a dummy "
                "forward pass first, so that their shapes are known"
            )


def _is_patched(module: nn.Module) -> bool:
    """Whether `forward` is patched on the instance, or the module was compiled in place."""
    fields = module.__dict__
    if "forward" not in fields and fields.get("_compiled_call_impl") is None:
        return False
    # `torch.export` makes such modules to check inputs, in some versions. They have no weights.
    guards = getattr(sys.modules.get("torch.export._unlift"), "GuardsFn", ())
    return not isinstance(module, torch.jit.ScriptModule) and not isinstance(module, guards)


def _describe(root: nn.Module, module: nn.Module) -> str:
    path = next(name for name, found in root.named_modules() if found is module)
    where = f"module {path!r}" if path else "the module"
    return f"{where} ({type(module).__name__})"


def walk(root: nn.Module) -> list[nn.Module]:
    """Return `root` and every module in it, each once, breadth first."""
    order, seen = [root], {id(root)}
    for module in order:  # grows during the loop
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                order.append(child)
    return order


def all_tensors(root: nn.Module) -> list[Tensor]:
    """Return every parameter and buffer of `root`; some may appear more than once."""
    return [tensor for tensor in _contents(walk(root)).tensors if tensor is not None]


class _Contents(NamedTuple):
    """All children, parameters and buffers of some modules, in order, with repeats and None."""

    children: list[nn.Module | None]
    parameters: list[Tensor | None]
    buffers: list[Tensor | None]
    ends: list[int]  # the lengths of the three lists after each module

    @property
    def tensors(self) -> list[Tensor | None]:
        return self.parameters + self.buffers

    def same_objects(self, other: "_Contents") -> bool:
        ours, theirs = chain(*self[:3]), chain(*other[:3])
        return self.ends == other.ends and all(map(operator.is_, ours, theirs))


def _contents(modules: Iterable[nn.Module]) -> _Contents:
    found = _Contents([], [], [], [])
    children, parameters, buffers, ends = found
    for module in modules:
        # Not from `__dict__`: a `ScriptModule` keeps its parts elsewhere.
        children += module._modules.values()
        parameters += module._parameters.values()
        buffers += module._buffers.values()
        ends += (len(children), len(parameters), len(buffers))
    return found


class ModuleTree(Generic[M]):
    """A module and every module in it, as flat lists: fast to compare and to copy.

    Modules, parameters and buffers are listed once each. A tensor that is both is a parameter.
    """

    def __init__(self, root: M) -> None:
        self.modules = walk(root)
        self._contents = _contents(self.modules)
        check_replicable(root, self.modules)
        self.parameters = _unique(self._contents.parameters)
        known = set(map(id, self.parameters))
        self.buffers = [b for b in _unique(self._contents.buffers) if id(b) not in known]
        special = torch.jit.ScriptModule, nn.RNNBase
        self._special = {
            id(module)
            for module in self.modules
            if isinstance(module, special) or _replicates_itself(module)
        }

    def unchanged(self) -> bool:
        """Whether the modules have the same children, parameters and buffers, and no patches."""
        if any(map(_is_patched, self.modules)):
            return False
        return self._contents.same_objects(_contents(self.modules))

    def copy(self, tensors: TensorMap) -> M:
        """Copy the root, with the copied `tensors`; attributes, hooks and modes are as now."""
        copies: dict[int, nn.Module] = {}
        for module in self.modules:
            special = id(module) in self._special
            copies[id(module)] = (_copy_special if special else _copy)(module, tensors)
        for module, copy in zip(self.modules, copies.values(), strict=True):
            if module._modules:
                _link(copy, module._modules, copies)
        return cast("M", copies[id(self.modules[0])])

    def flatten_rnns(self, tensors: TensorMap) -> None:
        """Make the copied weights of each RNN contiguous, as cuDNN wants them.

        Only copies on another device: other calls may compute with the original's weights now.
        """
        for module in self.modules:
            if isinstance(module, nn.RNNBase) and all(
                weight is not None and tensors.get(id(weight), weight).device != weight.device
                for weight in module._flat_weights
            ):
                nn.RNNBase.flatten_parameters(cast("nn.RNNBase", _copy_special(module, tensors)))


def _unique(tensors: list[Tensor | None]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def _isolate(fields: dict[str, Any], tensors: TensorMap) -> None:
    """Give `fields`, a copy of a module's `__dict__`, containers and tensors of its own."""
    for name in _OTHER_CONTAINERS:
        fields[name] = fields[name].copy()
    get = tensors.get
    # `register_parameter` refuses a non-leaf. `parameters()` would not find plain attributes, which
    # torch's replicas have.
    parameters = {name: get(id(old), old) for name, old in fields["_parameters"].items()}
    fields["_parameters"] = fields["_former_parameters"] = parameters
    fields["_buffers"] = {name: get(id(old), old) for name, old in fields["_buffers"].items()}
    fields["_modules"] = {}  # `_link` fills it
    fields["_is_replica"] = True


def _link(
    copy: nn.Module, originals: Mapping[str, nn.Module | None], copies: Mapping[int, nn.Module]
) -> None:
    """Give `copy` the copies of its original's children."""
    children = {
        name: None if child is None else copies[id(child)] for name, child in originals.items()
    }
    if isinstance(copy, torch.jit.ScriptModule):
        for name, child in children.items():
            copy._modules[name] = child  # TorchScript's own mapping, which writes to C++
    else:
        copy.__dict__["_modules"] = children


def _replicates_itself(module: nn.Module) -> bool:
    # `ModuleTree.copy` does what torch's own overrides do (RNNs, lazy modules, `fx.GraphModule`).
    return not type(module)._replicate_for_data_parallel.__module__.startswith("torch.")


def _copy(module: nn.Module, tensors: TensorMap) -> nn.Module:
    copy: nn.Module = _new(type(module))
    fields = module.__dict__.copy()
    _isolate(fields, tensors)
    _set_attribute(copy, "__dict__", fields)
    return copy


def _copy_special(module: nn.Module, tensors: TensorMap) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        copy: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for name, old in chain(module._parameters.items(), module._buffers.items()):
            if old is not None and id(old) in tensors:
                setattr(copy, name, tensors[id(old)])
        return copy
    if _replicates_itself(module):
        copy = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        copy.__dict__.update({name: module.__dict__[name] for name in ("_parameters", "_buffers")})
        _isolate(copy.__dict__, tensors)
    else:
        copy = _copy(module, tensors)
    if isinstance(module, nn.RNNBase):
        _isolate_flat_weights(copy.__dict__, tensors)
    return copy


def _isolate_flat_weights(fields: dict[str, Any], tensors: TensorMap) -> None:
    """Put the copies into `_flat_weights`: an RNN computes with these, not its parameters."""
    weights = [tensors.get(id(old), old) for old in fields["_flat_weights"]]
    fields["_flat_weights"] = weights
    fields["_flat_weights_names"] = fields["_flat_weights_names"].copy()
    # RNNBase.forward rebuilds the list if these do not refer to its parameters.
    fields["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in weights]
    # Many models flatten in forward. The weights must not move: another replica may read them.
    fields["flatten_parameters"] = _already_flat


def _already_flat() -> None:
    """In place of `flatten_parameters` of a replica: its weights are flat."""
