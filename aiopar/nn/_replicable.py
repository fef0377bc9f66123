"""Which modules cannot be replicated, said before any work is done."""

import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


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
