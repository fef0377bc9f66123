"""Scatter: one batch to a piece for each device.

What blocks is here (the copies); `_scatter_gather` has the awaitable face.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._checks import as_int, as_kwargs
from .._devices import Device, is_accelerator, parse_devices
from .._tree import Path, children, format_path, map_tensors, unzip

T = TypeVar("T")
Scattered: TypeAlias = tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]

# What the loop's thread looks at: a fraction of a millisecond.
_FEW_PARTS = 256


# No slots=True: on CPython 3.11 `Replicated[Tensor](x)` then fails in the frozen __setattr__.
@dataclass(frozen=True, eq=False)
class Replicated(Generic[T]):
    """Marks an input that goes whole to every replica, instead of being split.

    For what has no batch dimension: attention masks, lookup tables, anchors. `scatter`,
    `scatter_kwargs` and `DataParallel` put a copy of `value` on each device that gets a piece of
    the batch (none where it is there already) and hand the replica that copy, without the mark.
    Gradients of all copies add up in the original. `torch.nn.parallel` has no such thing.

    Attributes:
        value: A tensor, or any nesting of tensors that `scatter` takes. It may stand anywhere
            inside the inputs.

    Example:
        >>> import asyncio, torch, aiopar
        >>> x, table = torch.arange(4), torch.zeros(7, 2)
        >>> pieces = asyncio.run(
        ...     aiopar.scatter((x, aiopar.Replicated(table)), ["cpu", "cpu"])
        ... )
        >>> [(piece.tolist(), whole.shape) for piece, whole in pieces]
        [([0, 1], torch.Size([7, 2])), ([2, 3], torch.Size([7, 2]))]
    """

    value: T


def check_scatter(
    roots: dict[str, Any],
    devices: Sequence[torch.device],
    dim: int,
    chunk_sizes: Sequence[int] | None = None,
) -> None:
    """Raise what scattering trees would, by shapes alone; not for those of very many parts.

    It is for the loop's thread, at the call: a worker looks again, at all that there is then.
    """
    _chunk_sizes(roots, len(devices), dim, chunk_sizes, at_most=_FEW_PARTS)


def check_chunk_sizes(given: Iterable[int], count: int) -> list[int]:
    """`given` as plain ints, if there is one for each of `count` devices."""
    try:
        sizes = [operator.index(size) for size in given]
    except TypeError:
        raise TypeError(f"chunk_sizes must be a sequence of ints, got {given!r}") from None
    if len(sizes) != count:
        raise ValueError(f"{len(sizes)} chunk_sizes were given for {count} devices")
    if any(size < 0 for size in sizes):
        raise ValueError(f"chunk_sizes must not be negative, got {sizes}")
    return sizes


def scatter_sync(
    inputs: Any,
    devices: Iterable[Device],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
) -> list[Any]:
    """Split the tensors of `inputs` along `dim`; entry `i` of the result is on `devices[i]`."""
    targets = parse_devices(devices)
    sizes = _chunk_sizes({"inputs": inputs}, len(targets), dim, chunk_sizes)
    return _deal(inputs, targets, dim, sizes)


def scatter_kwargs_sync(
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    devices: Iterable[Device],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
) -> Scattered:
    """Scatter a call's arguments; both results have an entry for each replica used.

    As in torch, a call without any argument gives `((), ())`.
    """
    args, named = as_call(inputs, kwargs)
    targets = parse_devices(devices)
    # One plan for both: torch splits them apart and pads the shorter result with empty calls.
    sizes = _chunk_sizes({"inputs": args, "kwargs": named}, len(targets), dim, chunk_sizes)
    if not args and not named:
        return (), ()
    dealt = _deal((args, named), targets, dim, sizes)
    return tuple(piece[0] for piece in dealt), tuple(piece[1] for piece in dealt)


def as_call(
    inputs: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, each in a container of its own."""
    if not isinstance(inputs, tuple | list):
        raise TypeError(f"inputs must be a tuple of arguments, not {type(inputs).__name__}")
    return tuple(inputs), dict(as_kwargs("kwargs", kwargs or None))  # torch: whatever is false


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A differentiable copy of `tensor` on `device`; itself if it is there."""
    if tensor.device == device:  # `.to` would say the same, slower
        return tensor
    # Never non-blocking towards the CPU: torch returns pinned memory that is still being written.
    return tensor.to(device, non_blocking=device.type != "cpu")


def for_several(tensor: Tensor) -> Tensor:
    """`tensor`, to be had by several replicas: a leaf on an accelerator, that learns, as a view.

    Gradients come to the leaf on the stream that the view was made on, this one. Those of replicas
    come on several, which torch warns of.
    """
    if not (tensor.requires_grad and tensor.is_leaf and is_accelerator(tensor.device)):
        return tensor
    return tensor.view_as(tensor) if torch.is_grad_enabled() else tensor


def _deal(
    tree: Any, targets: Sequence[torch.device], dim: int, sizes: Sequence[int] | None
) -> list[Any]:
    # Without a tensor to split there is nothing to count by: as in torch, every device gets all.
    used = targets if sizes is None else targets[: len(sizes)]
    return unzip(partial(_columns, used, dim, sizes), tree, len(used))


def _columns(
    targets: Sequence[torch.device], dim: int, sizes: Sequence[int] | None, node: Any
) -> list[Any] | None:
    """What each target gets of a tensor or a `Replicated`; None for anything else."""
    if isinstance(node, Tensor):
        if node.ndim == 0 or sizes is None or len(sizes) == 1:
            shared = for_several(node)
            return [move(shared, target) for target in targets]
        return _pieces(node, targets, dim, sizes)
    if isinstance(node, Replicated):
        whole = map_tensors(for_several, node.value)
        return [map_tensors(partial(move, device=target), whole) for target in targets]
    return None


def _pieces(
    tensor: Tensor, targets: Sequence[torch.device], dim: int, sizes: Sequence[int]
) -> list[Tensor]:
    pieces, start, has_view = [], 0, False
    for target, size in zip(targets, sizes, strict=True):
        # narrow, not split: autograd forbids in-place edits of split's pieces.
        piece = move(tensor.narrow(dim, start, size), target)
        if target == tensor.device:
            if has_view and torch.is_grad_enabled():
                # Views of one tensor that several replicas edit in place would race for its history
                # in the graph, and raise the version that others have saved.
                piece = piece.clone()
            has_view = True
        pieces.append(piece)
        start += size
    return pieces


def _chunk_sizes(
    roots: dict[str, Any],
    count: int,
    dim: int,
    given: Sequence[int] | None,
    at_most: float = math.inf,
) -> Sequence[int] | None:
    """The size of each piece, None if there is no tensor to split. Validates everything.

    Also None if there are more than `at_most` parts, of which some are not looked at then.
    """
    dim = as_int("dim", dim)
    sizes = None if given is None else check_chunk_sizes(given, count)
    found: list[tuple[Tensor, Path]] = []
    seen: dict[int, Any] = {}
    for name, tree in roots.items():
        at_most = _collect_batched(tree, name, found, seen, at_most)
    if not found or at_most < 0:
        return None
    batch = _size_along(dim, *found[0])
    for tensor, path in found[1:]:
        if (size := _size_along(dim, tensor, path)) != batch:
            raise ValueError(
                f"tensors to scatter differ in size along dim {dim}: {format_path(found[0][1])} "
                f"has {batch}, {format_path(path)} has {size}; mark what every replica is to get "
                "whole as aiopar.Replicated(...)"
            )
    if sizes is None:
        return _even_sizes(batch, count)
    if sum(sizes) != batch:
        raise ValueError(
            f"chunk_sizes {sizes} add up to {sum(sizes)}, expected {batch}: the size of "
            f"{format_path(found[0][1])} along dim {dim}"
        )
    return sizes


def _collect_batched(
    node: Any, path: Path, found: list[tuple[Tensor, Path]], seen: dict[int, Any], at_most: float
) -> float:
    """Append the tensors to be split to `found`, in order; how many of `at_most` nodes are left.

    Containers that are `seen` are not looked into again: they may contain themselves.
    """
    at_most -= 1
    if isinstance(node, Tensor):
        if node.ndim:
            found.append((node, path))
        return at_most
    if isinstance(node, Replicated):
        return at_most
    if isinstance(node, PackedSequence):
        raise TypeError(
            f"cannot split {format_path(path)}, a PackedSequence: its dimensions mix batch and "
            "time; scatter the padded batch with its lengths and pack in forward"
        )
    if id(node) not in seen and (parts := children(node)) is not None:
        seen[id(node)] = node
        keys, values, _ = parts
        for key, value in zip(keys, values, strict=True):
            if at_most < 0:
                break
            at_most = _collect_batched(value, (path, node, key), found, seen, at_most)
    return at_most


def _size_along(dim: int, tensor: Tensor, path: Path) -> int:
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise TypeError(
            f"cannot split {format_path(path)}, a {kind} tensor: make it dense and strided, or "
            "mark it as aiopar.Replicated(...)"
        )
    try:
        return tensor.shape[dim]
    except IndexError:
        raise ValueError(
            f"dim {dim} is out of range for {format_path(path)} of shape {tuple(tensor.shape)}: "
            f"expected [{-tensor.ndim}, {tensor.ndim - 1}]"
        ) from None


def _even_sizes(batch: int, count: int) -> list[int]:
    """The sizes of `torch.chunk`: ceil(batch / count) each, perhaps fewer pieces than `count`."""
    if batch == 0:
        return [0] * count
    size = -(-batch // count)
    full, rest = divmod(batch, size)
    return [size] * full + [rest] * bool(rest)
