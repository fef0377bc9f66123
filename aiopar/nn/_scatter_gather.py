"""`scatter`, `scatter_kwargs` and `gather`, awaited: the copies are made on a worker."""

import math
import operator
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._base.arguments import as_int, as_kwargs
from .._base.devices import Device, is_accelerator, parse_device, parse_devices
from .._base.thread_state import check_no_transform
from .._base.tree import (
    Parts,
    Path,
    aligned,
    children,
    format_path,
    has_tensors,
    map_tensors,
    unzip,
)
from ..executor._current import executor_near

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


def run_near(device: torch.device, fn: Callable[[], T]) -> Coroutine[Any, Any, T]:
    """Await `fn()` on a worker of `device` if the current executor has one, else on any."""
    check_no_transform()
    return executor_near(device).run_sync(fn)


def scatter(
    inputs: Any,
    devices: Iterable[Device],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
) -> Coroutine[Any, Any, list[Any]]:
    """Split the tensors of `inputs` along `dim`, a piece for each device, in order.

    Mirrors `torch.nn.parallel.scatter`. `inputs` may nest tensors in tuples, named tuples, lists,
    dicts, dataclasses and their subclasses; each piece is nested in the same way. Pieces are as
    `torch.chunk` makes them: a batch that does not divide leaves a smaller last piece, one smaller
    than the number of devices makes fewer pieces. A tensor of no dimension, and whatever is no
    tensor, goes to every device. Copies are differentiable; a piece that is on its device already
    is a view, in grad mode the first such piece alone: replicas may then edit theirs in place.
    Shapes are checked when this is called; those of inputs of very many parts, and whether
    containers can be rebuilt, when it is awaited.

    Differences from torch: any devices; tensors whose sizes along `dim` disagree raise (torch
    silently drops data); `Replicated` marks what goes whole to every device; `chunk_sizes`; always
    a list.

    Args:
        inputs: Tensors, nested.
        devices: Where the pieces go; repeats are allowed.
        dim: The batch dimension of every tensor; may be negative.
        chunk_sizes: The size of each device's piece, for unequal devices; 0 gives an empty piece.

    Returns:
        One entry for each piece; entry `i` is on `devices[i]`.

    Raises:
        TypeError: A container cannot be rebuilt, or a tensor cannot be split (sparse, packed).
        ValueError: Sizes disagree, `dim` is out of range, `chunk_sizes` do not fit, or there is
            no such device.

    Example:
        >>> import asyncio, aiopar, torch
        >>> pieces = asyncio.run(aiopar.scatter({"x": torch.arange(5)}, ["cpu", "cpu"]))
        >>> [piece["x"].tolist() for piece in pieces]
        [[0, 1, 2], [3, 4]]
    """
    check_no_transform()  # first: shapes are others within one
    targets = parse_devices(devices)
    sizes = None if chunk_sizes is None else check_chunk_sizes(chunk_sizes, len(targets))
    check_scatter({"inputs": inputs}, targets, dim, sizes)
    return run_near(targets[0], partial(scatter_sync, inputs, targets, dim, chunk_sizes=sizes))


def scatter_kwargs(
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    devices: Iterable[Device],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
) -> Coroutine[Any, Any, Scattered]:
    """Scatter a call's positional and keyword arguments, by one common plan.

    Mirrors `torch.nn.parallel.scatter_gather.scatter_kwargs`; splits as `scatter` does. The two
    results have one entry a piece; without any argument both are empty.

    Differences from torch: sizes have to agree across positional and keyword arguments (torch pads
    the shorter side with empty calls).

    Args:
        inputs: Positional arguments.
        kwargs: Keyword arguments, or None.
        devices: Where the pieces go; repeats are allowed.
        dim: The batch dimension of every tensor.
        chunk_sizes: The size of each device's piece.

    Raises:
        TypeError: As `scatter`.
        ValueError: As `scatter`.

    Example:
        >>> import asyncio, aiopar, torch
        >>> call = aiopar.scatter_kwargs((torch.arange(3),), {"scale": 2}, ["cpu", "cpu"])
        >>> asyncio.run(call)
        (((tensor([0, 1]),), (tensor([2]),)), ({'scale': 2}, {'scale': 2}))
    """
    check_no_transform()  # first, as in `scatter`
    args, named = as_call(inputs, kwargs)
    targets = parse_devices(devices)
    sizes = None if chunk_sizes is None else check_chunk_sizes(chunk_sizes, len(targets))
    check_scatter({"inputs": args, "kwargs": named}, targets, dim, sizes)
    scatter_all = partial(scatter_kwargs_sync, args, named, targets, dim, chunk_sizes=sizes)
    return run_near(targets[0], scatter_all)


def gather(outputs: Sequence[Any], output_device: Device, dim: int = 0) -> Coroutine[Any, Any, Any]:
    """Join the outputs of replicas along `dim`, on one device.

    Mirrors `torch.nn.parallel.gather`. Outputs nest alike; each tensor is the concatenation of its
    namesakes, tensors of no dimension are stacked to a vector. Differentiable.

    Differences from torch: any device (`-1` is the CPU, as in torch); values that are no tensors
    collapse to one if all are equal, else become a list (torch fails, or takes the first);
    outputs that nest differently raise.

    Args:
        outputs: One entry a replica.
        output_device: Where the result goes.
        dim: The dimension to concatenate along.

    Raises:
        TypeError: `outputs` is not a list or tuple.
        ValueError: It is empty, or there is no such device; when awaited: the outputs nest
            differently, or have no such dimension.

    Example:
        >>> import asyncio, aiopar, torch
        >>> asyncio.run(aiopar.gather([{"y": torch.ones(2)}, {"y": torch.zeros(1)}], "cpu"))
        {'y': tensor([1., 1., 0.])}
    """
    target = parse_output_device(output_device)
    check_gather(outputs, dim)
    return run_near(target, partial(gather_sync, outputs, target, dim))
