"""`scatter`, `scatter_kwargs` and `gather`, awaited: a worker makes the copies."""

import math
import operator
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._base.arguments import as_int, as_kwargs, returns_coroutine, shown_as
from .._base.collate import describe
from .._base.devices import Device, is_accelerator, parse_device, parse_devices
from .._base.thread_state import check_no_transform
from .._base.tree import (
    Path,
    aligned,
    children,
    format_path,
    map_tensors,
    unzip,
)
from ..executor._current import executor_near

T = TypeVar("T")
Scattered: TypeAlias = tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]

# How many nodes of the inputs are checked on the event loop's thread.
_MOST_CHECKED_ON_LOOP = 256


# No slots=True: on CPython 3.11 `Replicated[Tensor](x)` then fails in the frozen __setattr__.
@dataclass(frozen=True, eq=False)
class Replicated(Generic[T]):
    """Marks an input that every replica gets whole, instead of a piece of it.

    Use it for inputs without a batch dimension: attention masks, lookup tables, anchors. `scatter`,
    `scatter_kwargs` and `DataParallel` copy `value` to each device that gets a piece of the batch
    (no copy is made where it is already) and pass the replica that copy, without the mark.
    Gradients of all copies add up in the original. `torch.nn.parallel` has no counterpart.

    Attributes:
        value: A tensor, or tensors nested as in `scatter`. The mark may be anywhere in the inputs.

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


@returns_coroutine
def scatter(
    inputs: Any,
    devices: Iterable[Device],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
) -> Coroutine[Any, Any, list[Any]]:
    """Split the tensors of `inputs` along `dim` into one piece per device.

    Mirrors `torch.nn.parallel.scatter`. Tensors may be nested in tuples, named tuples, lists,
    dicts, dataclasses and their subclasses; each piece is nested in the same way.

    - Pieces have the sizes of `torch.chunk`: the last one may be smaller, and a batch that is
      smaller than the number of devices gives fewer pieces.
    - Every device gets each tensor without dimensions and each value that is not a tensor.
    - Copies are differentiable. A piece that is on its device already is a view. In grad mode only
      the first piece per device is a view, so that replicas may edit their pieces in place.

    Shapes are checked when this is called. For inputs with very many parts they are checked when it
    is awaited; so is whether a container can be rebuilt.

    Differences from torch: any device; tensors whose sizes along `dim` differ raise `ValueError`
    (torch silently drops data); `Replicated` marks an input that every device gets whole;
    `chunk_sizes`; the result is always a list.

    Args:
        inputs: Tensors, nested.
        devices: The devices of the pieces; repeats are allowed.
        dim: The batch dimension of every tensor; may be negative.
        chunk_sizes: The size of each device's piece, for unequal devices. A size of 0 gives an
            empty piece.

    Returns:
        The pieces. Piece `i` is on `devices[i]`.

    Raises:
        TypeError: A container cannot be rebuilt, or a tensor cannot be split (sparse, packed).
        ValueError: Sizes differ, `dim` is out of range, `chunk_sizes` do not fit, or a device does
            not exist.

    Example:
        >>> import asyncio, aiopar, torch
        >>> pieces = asyncio.run(aiopar.scatter({"x": torch.arange(5)}, ["cpu", "cpu"]))
        >>> [piece["x"].tolist() for piece in pieces]
        [[0, 1, 2], [3, 4]]
    """
    check_no_transform()  # first, because a transform changes shapes
    targets = parse_devices(devices)
    sizes = _parse_chunk_sizes(chunk_sizes, len(targets))
    check_scatter({"inputs": inputs}, targets, dim, sizes)
    call = run_near(targets[0], partial(scatter_sync, inputs, targets, dim, sizes))
    return shown_as(call, "scatter")


@returns_coroutine
def scatter_kwargs(
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    devices: Iterable[Device],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
) -> Coroutine[Any, Any, Scattered]:
    """Split the positional and keyword arguments of a call into one call per device.

    Mirrors `torch.nn.parallel.scatter_gather.scatter_kwargs`; splits as `scatter` does. Without
    any argument both results are empty.

    Differences from torch: the sizes of positional and keyword arguments must agree (torch fills
    up the shorter result with empty calls), and those of `scatter`.

    Args:
        inputs: The positional arguments.
        kwargs: The keyword arguments, or None.
        devices: The devices of the pieces; repeats are allowed.
        dim: The batch dimension of every tensor.
        chunk_sizes: The size of each device's piece.

    Returns:
        A tuple of positional arguments and a tuple of keyword arguments, each with one entry per
        piece.

    Raises:
        TypeError: As `scatter`; or `inputs` is not a tuple or list, or `kwargs` not a dict.
        ValueError: As `scatter`.

    Example:
        >>> import asyncio, aiopar, torch
        >>> call = aiopar.scatter_kwargs((torch.arange(3),), {"scale": 2}, ["cpu", "cpu"])
        >>> asyncio.run(call)
        (((tensor([0, 1]),), (tensor([2]),)), ({'scale': 2}, {'scale': 2}))
    """
    check_no_transform()  # first, as in `scatter`
    if not isinstance(inputs, tuple | list):
        raise TypeError(f"inputs must be a tuple of arguments, not {type(inputs).__name__}")
    # Like torch, None and any false value mean no keyword arguments.
    args, named = tuple(inputs), dict(as_kwargs("kwargs", kwargs or None))
    targets = parse_devices(devices)
    sizes = _parse_chunk_sizes(chunk_sizes, len(targets))
    check_scatter({"inputs": args, "kwargs": named}, targets, dim, sizes)
    call = run_near(targets[0], partial(scatter_kwargs_sync, args, named, targets, dim, sizes))
    return shown_as(call, "scatter_kwargs")


@returns_coroutine
def gather(outputs: Sequence[Any], output_device: Device, dim: int = 0) -> Coroutine[Any, Any, Any]:
    """Join the outputs of replicas along `dim`, on one device.

    Mirrors `torch.nn.parallel.gather`. All outputs must be nested in the same way. Tensors at the
    same position are concatenated; tensors without dimensions are stacked to a vector. The result
    is differentiable.

    Differences from torch: any device (`-1` is the CPU, as in torch). Values that are not tensors
    become one value if all are equal, else a list with one entry per replica (torch fails, or takes
    the first). Outputs that are nested differently raise `ValueError`.

    Args:
        outputs: One entry per replica.
        output_device: The device of the result.
        dim: The dimension to concatenate along.

    Raises:
        TypeError: `outputs` is not a list or tuple.
        ValueError: `outputs` is empty, or the device does not exist. When awaited: outputs are
            nested differently, contain themselves, or have no dimension `dim`.

    Example:
        >>> import asyncio, aiopar, torch
        >>> asyncio.run(aiopar.gather([{"y": torch.ones(2)}, {"y": torch.zeros(1)}], "cpu"))
        {'y': tensor([1., 1., 0.])}
    """
    target = parse_output_device(output_device)
    as_int("dim", dim)
    if not isinstance(outputs, list | tuple):
        raise TypeError(
            "outputs must be a list or tuple with one entry per replica, not "
            f"{type(outputs).__name__}"
        )
    if not outputs:
        raise ValueError("outputs is empty: expected at least one replica's output")
    return shown_as(run_near(target, partial(gather_sync, outputs, target, dim)), "gather")


def run_near(device: torch.device, fn: Callable[[], T]) -> Coroutine[Any, Any, T]:
    """Await `fn()` on a worker of `device`; on any worker if the executor has none there."""
    check_no_transform()
    return executor_near(device).run_sync(fn)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A differentiable copy of `tensor` on `device`; `tensor` itself if it is there."""
    if tensor.device == device:  # faster than `.to`
        return tensor
    # Never non-blocking to the CPU: torch would return memory that is still being written.
    return tensor.to(device, non_blocking=device.type != "cpu")


def shareable(tensor: Tensor) -> Tensor:
    """`tensor` for several replicas: a view, if it is a leaf on an accelerator with gradients.

    A leaf gets its gradients on the stream on which the view was made. Without the view they come
    from the streams of all replicas, and torch warns.
    """
    if not (tensor.requires_grad and tensor.is_leaf and is_accelerator(tensor.device)):
        return tensor
    return tensor.view_as(tensor) if torch.is_grad_enabled() else tensor


def check_scatter(
    roots: dict[str, Any],
    devices: Sequence[torch.device],
    dim: int,
    chunk_sizes: Sequence[int] | None = None,
) -> None:
    """Raise if `roots` (name -> tree) cannot be scattered; trees with many nodes are not checked.

    This runs on the loop's thread at the call. The worker checks again, and completely.
    """
    _piece_sizes(roots, len(devices), dim, chunk_sizes, limit=_MOST_CHECKED_ON_LOOP)


def _parse_chunk_sizes(given: Iterable[int] | None, count: int) -> list[int] | None:
    if given is None:
        return None
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
    targets: Sequence[torch.device],
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
) -> list[Any]:
    """`scatter` on the calling thread, for parsed devices and sizes."""
    sizes = _piece_sizes({"inputs": inputs}, len(targets), dim, chunk_sizes)
    return _split(inputs, targets, dim, sizes)


def scatter_kwargs_sync(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: Sequence[torch.device],
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
) -> Scattered:
    """`scatter_kwargs` on the calling thread, for parsed devices and sizes."""
    sizes = _piece_sizes({"inputs": args, "kwargs": kwargs}, len(targets), dim, chunk_sizes)
    if not args and not kwargs:
        return (), ()
    pieces = _split((args, kwargs), targets, dim, sizes)
    return tuple(piece[0] for piece in pieces), tuple(piece[1] for piece in pieces)


def _split(
    tree: Any, targets: Sequence[torch.device], dim: int, sizes: Sequence[int] | None
) -> list[Any]:
    # Without a tensor to split there is no batch size: as in torch, every device gets all.
    used = targets if sizes is None else targets[: len(sizes)]
    return unzip(partial(_split_node, used, dim, sizes), tree, len(used))


def _split_node(
    targets: Sequence[torch.device], dim: int, sizes: Sequence[int] | None, node: Any
) -> list[Any] | None:
    """Split or copy a tensor or `Replicated`, one value per target; None for other nodes."""
    if isinstance(node, Tensor):
        if node.ndim == 0 or sizes is None or len(sizes) == 1:
            shared = shareable(node)
            return [move(shared, target) for target in targets]
        return _split_tensor(node, targets, dim, sizes)
    if isinstance(node, Replicated):
        whole = map_tensors(shareable, node.value)
        return [map_tensors(partial(move, device=target), whole) for target in targets]
    return None


def _split_tensor(
    tensor: Tensor, targets: Sequence[torch.device], dim: int, sizes: Sequence[int]
) -> list[Tensor]:
    pieces, start, has_view = [], 0, False
    for target, size in zip(targets, sizes, strict=True):
        # narrow, not split: autograd forbids in-place edits of split's pieces.
        piece = move(tensor.narrow(dim, start, size), target)
        if target == tensor.device:
            if has_view and torch.is_grad_enabled():
                # If several replicas edited views of one tensor in place, they would race for its
                # autograd history, and raise the version of tensors that others have saved.
                piece = piece.clone()
            has_view = True
        pieces.append(piece)
        start += size
    return pieces


def _piece_sizes(
    roots: dict[str, Any],
    count: int,
    dim: int,
    chunk_sizes: Sequence[int] | None,
    limit: int | None = None,
) -> Sequence[int] | None:
    """Check all tensors; return the size of each piece, or None if there is no tensor to split.

    Also None if the roots have more than `limit` nodes: then sizes are not compared.
    """
    dim = as_int("dim", dim)
    nodes = _nodes(roots)
    found = [
        (node, path)
        for node, path in islice(nodes, limit)
        if isinstance(node, Tensor) and node.ndim
    ]
    if not found or (limit is not None and next(nodes, None) is not None):
        return None
    batch = _size_along(dim, *found[0])
    for tensor, path in found[1:]:
        if (size := _size_along(dim, tensor, path)) != batch:
            raise ValueError(
                f"tensors to scatter differ in size along dim {dim}: {format_path(found[0][1])} "
                f"has {batch}, {format_path(path)} has {size}; mark an input that every replica "
                "must get whole as aiopar.Replicated(...)"
            )
    if chunk_sizes is None:
        return _even_sizes(batch, count)
    if sum(chunk_sizes) != batch:
        raise ValueError(
            f"chunk_sizes {chunk_sizes} add up to {sum(chunk_sizes)}, expected {batch}: the size "
            f"of {format_path(found[0][1])} along dim {dim}"
        )
    return chunk_sizes


def _nodes(roots: dict[str, Any]) -> Iterator[tuple[Any, Path]]:
    """Yield every node of the trees, depth first, but nothing inside a `Replicated`."""
    seen: dict[int, Any] = {}
    return chain.from_iterable(_nodes_below(tree, name, seen) for name, tree in roots.items())


def _nodes_below(node: Any, path: Path, seen: dict[int, Any]) -> Iterator[tuple[Any, Path]]:
    yield node, path
    if isinstance(node, Tensor | Replicated):
        return
    if isinstance(node, PackedSequence):
        raise TypeError(
            f"cannot split {format_path(path)}, a PackedSequence: its dimensions mix batch and "
            "time; scatter the padded batch with its lengths and pack in forward"
        )
    # Once only, because a container may contain itself.
    if id(node) not in seen and (parts := children(node)) is not None:
        seen[id(node)] = node
        keys, values, _ = parts
        for key, value in zip(keys, values, strict=True):
            yield from _nodes_below(value, (path, node, key), seen)


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
        raise _out_of_range(dim, tensor, path) from None


def _out_of_range(dim: int, tensor: Tensor, path: Path) -> ValueError:
    return ValueError(
        f"dim {dim} is out of range for {format_path(path)} of shape {tuple(tensor.shape)}: "
        f"expected [{-tensor.ndim}, {tensor.ndim - 1}]"
    )


def _even_sizes(batch: int, count: int) -> list[int]:
    """The sizes of `torch.chunk`: ceil(batch / count) each, perhaps fewer pieces than `count`."""
    if batch == 0:
        return [0] * count
    size = -(-batch // count)
    full, rest = divmod(batch, size)
    return [size] * full + [rest] * bool(rest)


def parse_output_device(device: Device) -> torch.device:
    """Parse a device; -1 is the CPU, as in torch."""
    on_cpu = type(device) is int and device == -1
    return torch.device("cpu") if on_cpu else parse_device(device)


def gather_sync(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """`gather` on the calling thread, for a parsed device."""
    try:
        return _join(outputs, device, dim, "output")
    except RecursionError as error:
        raise ValueError(
            "cannot gather outputs in which a container contains itself or is nested too deeply"
        ) from error


def _join(outputs: Sequence[Any], device: torch.device, dim: int, path: Path) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        for index, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                raise _difference(outputs, path, index)
        return _join_tensors(outputs, device, dim, path)
    all_parts = [children(output) for output in outputs]
    containers = [parts for parts in all_parts if parts is not None]
    if not containers and not any(isinstance(output, Tensor) for output in outputs):
        return _join_values(outputs)
    for index, output in enumerate(outputs):
        if type(output) is not type(first):
            raise _difference(outputs, path, index)
    if isinstance(first, PackedSequence):
        raise TypeError(
            f"cannot gather {format_path(path)}, a PackedSequence: its dimensions mix batch and "
            "time; unpack it in forward"
        )
    keys, _, rebuild = containers[0]
    columns = zip(*aligned(containers, partial(_difference, outputs, path)), strict=True)
    return rebuild(
        [
            _join(inner, device, dim, (path, first, key))
            for key, inner in zip(keys, columns, strict=True)
        ]
    )


def _join_tensors(tensors: Sequence[Tensor], device: torch.device, dim: int, path: Path) -> Tensor:
    ndim = tensors[0].ndim
    if ndim and not -ndim <= dim < ndim:
        raise _out_of_range(dim, tensors[0], path)
    moved = [move(tensor, device) for tensor in tensors]
    try:
        if all(tensor.ndim == 0 for tensor in moved):
            return torch.stack(moved)
        return moved[0] if len(moved) == 1 else torch.cat(moved, dim)
    except (RuntimeError, TypeError) as error:
        kinds = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors)
        error.add_note(f"while gathering {format_path(path)} of the replicas: {kinds}")
        raise


def _join_values(values: Sequence[Any]) -> Any:
    """Return the value if all replicas have the same one, else the list of all values."""
    first = values[0]
    return first if all(_are_equal(first, value) for value in values) else list(values)


def _are_equal(a: Any, b: Any) -> bool:
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
    # Arrays and data frames compare elementwise: not equal. NumPy scalars give shape ().
    return equal is True or (getattr(equal, "shape", None) == () and bool(equal))


def _difference(outputs: Sequence[Any], path: Path, index: int) -> ValueError:
    return ValueError(
        f"outputs differ at {format_path(path)}: replica 0 returned {describe(outputs[0])}, "
        f"replica {index} returned {describe(outputs[index])}"
    )
