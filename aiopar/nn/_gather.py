"""Gather: the outputs of the replicas to one output on one device.

What blocks is here (the copies); `_scatter_gather` has the awaitable face.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._checks import as_int
from .._devices import Device, parse_device
from .._tree import Parts, Path, aligned, children, format_path, has_tensors
from ._scatter import move


class _Target(NamedTuple):
    device: torch.device
    dim: int
    cyclic: bool = False
    """Whether outputs contain themselves: where they have no tensors they are not looked into."""


def parse_output_device(device: Device) -> torch.device:
    """As `parse_device`; -1 is the CPU, as in torch."""
    on_cpu = type(device) is int and device == -1
    return torch.device("cpu") if on_cpu else parse_device(device)


def gather_sync(outputs: Sequence[Any], output_device: Device, dim: int = 0) -> Any:
    """Join outputs of one shape of nesting: tensors along `dim`, other values if they are equal."""
    check_gather(outputs, dim)
    target = _Target(parse_output_device(output_device), as_int("dim", dim))
    try:
        return _join(outputs, target, "output")
    except RecursionError:
        pass
    try:
        return _join(outputs, target._replace(cyclic=True), "output")
    except RecursionError as error:
        raise ValueError(
            "cannot gather outputs in which something with tensors contains itself, or is nested "
            "too deeply"
        ) from error


def check_gather(outputs: Sequence[Any], dim: int) -> None:
    """Raise if they cannot be outputs of replicas; how they nest is seen when they are joined."""
    as_int("dim", dim)
    if not isinstance(outputs, list | tuple):
        raise TypeError(
            f"outputs must be a list or tuple, one entry a replica, not {type(outputs).__name__}"
        )
    if not outputs:
        raise ValueError("outputs is empty: expected at least one replica's output")


def _join(outputs: Sequence[Any], target: _Target, path: Path) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        if all(isinstance(output, Tensor) for output in outputs):
            return _join_tensors(outputs, target, path)
        raise _differing_types(outputs, path)
    if target.cyclic and not any(map(has_tensors, outputs)):
        return _collapse(outputs)
    all_parts = [children(output) for output in outputs]
    containers = [parts for parts in all_parts if parts is not None]
    if not containers and not any(isinstance(output, Tensor) for output in outputs):
        return _collapse(outputs)
    if any(type(output) is not type(first) for output in outputs):
        raise _differing_types(outputs, path)
    if isinstance(first, PackedSequence):
        raise TypeError(
            f"cannot gather {format_path(path)}, a PackedSequence: its dimensions mix batch and "
            "time; unpack it in forward"
        )
    keys, _, rebuild = containers[0]
    columns = zip(*aligned(containers, partial(_mismatch, containers, path)), strict=True)
    return rebuild(
        [_join(inner, target, (path, first, key)) for key, inner in zip(keys, columns, strict=True)]
    )


def _mismatch(containers: Sequence[Parts], path: Path, index: int) -> ValueError:
    first, other = containers[0][0], containers[index][0]
    return ValueError(
        f"replicas disagree on the contents of {format_path(path)}: replica 0 has "
        f"{_describe_keys(list(first))}, replica {index} has {_describe_keys(list(other))}"
    )


def _describe_keys(keys: list[Any]) -> str:
    if keys == list(range(len(keys))):
        return f"{len(keys)} items"
    return f"keys {keys}"


def _join_tensors(tensors: Sequence[Tensor], target: _Target, path: Path) -> Tensor:
    dim, ndim = target.dim, tensors[0].ndim
    if ndim and not -ndim <= dim < ndim:
        raise ValueError(
            f"dim {dim} is out of range for {format_path(path)} of shape "
            f"{tuple(tensors[0].shape)}: expected [{-ndim}, {ndim - 1}]"
        )
    moved = [move(tensor, target.device) for tensor in tensors]
    try:
        if all(tensor.ndim == 0 for tensor in moved):
            return torch.stack(moved)
        return moved[0] if len(moved) == 1 else torch.cat(moved, dim)
    except (RuntimeError, TypeError) as error:
        kinds = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors)
        error.add_note(f"while gathering {format_path(path)} of the replicas: {kinds}")
        raise


def _collapse(values: Sequence[Any]) -> Any:
    """The value that all replicas agree on, or the list of what each has."""
    first = values[0]
    if all(_same(first, value) for value in values):
        return first
    return list(values)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):  # True == 1 == 1.0
        return False
    if isinstance(a, float) and math.isnan(a) and math.isnan(b):
        return True
    try:
        equal = a == b
    except Exception:  # noqa: BLE001  # a user's __eq__ may raise anything
        return False
    # An elementwise answer (an array, a data frame) is no answer; NumPy's scalars have shape ().
    return equal is True or (getattr(equal, "shape", None) == () and bool(equal))


def _differing_types(outputs: Sequence[Any], path: Path) -> ValueError:
    kinds = [type(output).__name__ for output in outputs]
    return ValueError(f"replicas returned different types at {format_path(path)}: {kinds}")
