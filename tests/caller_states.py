"""States that a caller may be in, and what a call sees of them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aiopar._base.devices import supported_accelerator


def _default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.9, after `set_default_device(None)`
        return torch.empty(0).device


def snapshot() -> dict[str, Any]:
    """Everything of torch's per-thread state that has to travel with a call."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cuda_dtype": torch.get_autocast_dtype("cuda"),
        "xla_dtype": torch.get_autocast_dtype("xla"),
        "device": torch.empty(0).device,
        "default_device": _default_device(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
    }


PLAIN = {
    "grad": True,
    "inference": False,
    "autocast": False,
    "dtype": torch.bfloat16,
    "cuda_dtype": torch.float16,
    "xla_dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "default_device": torch.device("cpu"),
    "hooks": None,
}


def pack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def unpack(packed: Any) -> torch.Tensor:
    return packed  # type: ignore[no-any-return]  # what `pack` returned


def outer_pack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def dtype_while_off(kind: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_autocast_dtype(kind)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype(kind, before)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def everything() -> Iterator[None]:
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.float16),
        torch.autocast("xla", torch.float16),
        torch.device("meta"),
        nested_hooks(),
    ):
        yield


@contextlib.contextmanager
def nested_hooks() -> Iterator[None]:
    with (
        torch.autograd.graph.saved_tensors_hooks(outer_pack, unpack),
        torch.autograd.graph.saved_tensors_hooks(pack, unpack),
    ):
        yield


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no-grad": torch.no_grad,
    "inference-mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast-float16": lambda: torch.autocast("cpu", torch.float16),
    "cpu-dtype-while-off": lambda: dtype_while_off("cpu", torch.float16),
    "device": lambda: torch.device("meta"),
    "default-device": default_device,
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack),
    "nested-hooks": nested_hooks,
    "everything": everything,
}
"""Each differs from `PLAIN` in what its name says."""
if supported_accelerator() == "cuda":  # else nothing could run under it
    STATES["cuda-dtype-while-off"] = lambda: dtype_while_off("cuda", torch.bfloat16)
