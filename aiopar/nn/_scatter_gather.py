"""`scatter`, `scatter_kwargs` and `gather`, awaited: a worker makes the copies."""

import copy
import operator
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice, zip_longest
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._base.arguments import as_int, as_kwargs, described, returns_coroutine, shown_as
from .._base.collate import describe, out_of_range
from .._base.devices import Device, is_accelerator, parse_device, parse_devices
from .._base.thread_state import check_no_transform
from .._base.tracebacks import add_note_once
from .._base.tree import (
    Parts,
    Path,
    aligned,
    batch_children,
    children,
    format_path,
    has_own_state,
    has_tensors,
    is_cache,
    is_indexed,
    is_other_iterable,
    iterable_parts,
    moves_itself,
    tensors,
    unzip,
)
from ..executor._current import executor_near

T = TypeVar("T")
Scattered: TypeAlias = tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]
Dims: TypeAlias = "int | Sequence[Dims] | Mapping[Any, Dims] | None"
"""The dimensions of outputs: one for all, or nested as the outputs are. None: the default."""

MOST_CHECKED_ON_LOOP = 256
"""How many nodes of the inputs the event loop's thread checks; the worker checks all."""


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


# No slots=True, as in `Replicated`.
@dataclass(frozen=True, eq=False)
class Split(Generic[T]):
    """Marks an input with another batch dimension, or a sequence with one entry per sample.

    Examples are the state of an LSTM, and a list of strings. `scatter`, `scatter_kwargs` and
    `DataParallel` pass each replica its piece, without the mark. `torch.nn.parallel` has no
    counterpart.

    Attributes:
        value: The input; it must have as many samples as all other inputs.

            - A tensor, along `dim`.
            - A NumPy array, along `dim`. The pieces are views of `value`.
            - With `dim=0`, a sequence such as a list or tuple, by its length. The pieces are
              slices, and tensors in them are copied to the device. Tensors in a list may differ
              in size.
            - Another container, or any container with another `dim`: each tensor in it, along
              `dim`.
        dim: The batch dimension; may be negative.

    Raises:
        TypeError: `value` cannot be split, or `dim` is not an int.

    Example:
        >>> import asyncio, torch, aiopar
        >>> h, names = torch.zeros(2, 3, 5), ["a", "b", "c"]  # (layers, batch, features)
        >>> pieces = asyncio.run(
        ...     aiopar.scatter((aiopar.Split(h, dim=1), aiopar.Split(names)), ["cpu", "cpu"])
        ... )
        >>> [(h.shape, names) for h, names in pieces]
        [(torch.Size([2, 2, 5]), ['a', 'b']), (torch.Size([2, 1, 5]), ['c'])]
    """

    value: T
    dim: int = 0

    def __post_init__(self) -> None:
        as_int("dim", self.dim)
        value: Any = self.value
        if not (
            self._by_length
            or isinstance(value, Tensor)
            or children(value) is not None
            or is_other_iterable(value)
        ):
            raise TypeError(
                "Split takes a tensor, an array, or a sequence with one entry per sample, not "
                f"{described(value)}"
            )

    @property
    def _by_length(self) -> bool:
        """Whether `value` is sliced; else it holds tensors to split along `dim`."""
        value: Any = self.value
        kind = type(value)
        if isinstance(value, Tensor | str | bytes | Mapping) or is_cache(value):
            return False
        if hasattr(kind, "__array__"):
            return True
        return (
            self.dim == 0
            and hasattr(kind, "__len__")
            and hasattr(kind, "__getitem__")
            and not hasattr(kind, "_fields")  # a named tuple is a container
        )


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
    dicts, dataclasses and their subclasses; each piece is nested in the same way. Key-value
    caches of transformers are containers too. So are iterables whose copy `type(x)(items)` iterates
    over the same items. A dataclass whose instance has more than its fields is sliced, if `x[a:b]`
    is of its class and `dim` is 0; else it goes whole.

    - Pieces have the sizes of `torch.chunk`: the last one may be smaller, and a batch that is
      smaller than the number of devices gives fewer pieces.
    - `Split` marks an input with another batch dimension, or a sequence with one entry per sample.
    - Every device gets each tensor without dimensions and each other value that is not a tensor.
    - `Replicated` marks a tensor that every device gets whole.
    - Copies are differentiable. A piece that is on its device already is a view. In grad mode only
      the first piece per device is a view, so that replicas may edit their pieces in place.

    The call checks shapes. The `await` checks them for inputs with very many parts, and whether
    containers can be rebuilt.

    Differences from torch: any device; `Split`, `Replicated` and `chunk_sizes`; the result is
    always a list. Tensors whose sizes along `dim` differ raise `ValueError` (torch silently drops
    data). So do inputs without a part to split over several devices, unless all are `Replicated`
    (torch gives everything to each device).

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
        ValueError: Sizes differ, `dim` is out of range, nothing can be split, `chunk_sizes` do not
            fit, or a device does not exist.

    Example:
        >>> import asyncio, aiopar, torch
        >>> pieces = asyncio.run(aiopar.scatter({"x": torch.arange(5)}, ["cpu", "cpu"]))
        >>> [piece["x"].tolist() for piece in pieces]
        [[0, 1, 2], [3, 4]]
    """
    check_no_transform()  # first, because a transform changes shapes
    targets = parse_devices(devices)
    sizes = _parse_chunk_sizes(chunk_sizes, len(targets))
    piece_sizes({"inputs": inputs}, len(targets), dim, sizes, limit=MOST_CHECKED_ON_LOOP)
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
    roots = {"inputs": args, "kwargs": named}
    piece_sizes(roots, len(targets), dim, sizes, limit=MOST_CHECKED_ON_LOOP)
    call = run_near(targets[0], partial(scatter_kwargs_sync, args, named, targets, dim, sizes))
    return shown_as(call, "scatter_kwargs")


@returns_coroutine
def gather(
    outputs: Sequence[Any], output_device: Device, dim: int = 0, *, output_dims: Dims = None
) -> Coroutine[Any, Any, Any]:
    """Join the outputs of replicas along `dim`, on one device.

    Mirrors `torch.nn.parallel.gather`. All outputs must be nested in the same way. The result is
    differentiable. Only types decide how outputs are joined, never sizes or values:

    - Tensors at one position are concatenated; those without dimensions are stacked to a vector.
    - Containers are joined part by part: tuples, named tuples, dicts, dataclasses. So are iterables
      whose copy `type(x)(items)` iterates over the same items. A dataclass whose instance has more
      than its fields is no container.
    - A list that holds tensors or caches, directly or inside lists and tuples, is a container. Any
      other list (of strings, numbers, dicts, ...) has one entry per sample: lists are concatenated.
    - Key-value caches of transformers become one cache; values other than tensors are replica 0's.
    - None in all outputs stays None. Any other value becomes a list with one entry per replica.

    Differences from torch: any device, and `output_dims`. Lists without tensors are concatenated,
    and other values become a list (torch fails, or takes the first). Outputs that are nested
    differently raise `ValueError`.

    Args:
        outputs: One entry per replica.
        output_device: The device of the result; `-1` is the CPU, as in torch.
        dim: The dimension to concatenate along.
        output_dims: The dimensions to concatenate along, if they differ: an int, or ints nested as
            one output is, such as `(0, (1, 1))`. A dict has field names or keys; parts that it
            leaves out are joined along `dim`. A list or tuple at the place of a list makes that
            list a container.

    Raises:
        TypeError: `outputs` is not a list or tuple, or `output_dims` contains something other than
            ints.
        ValueError: `outputs` is empty, or the device does not exist. When awaited: outputs are
            nested differently, contain themselves, have no dimension `dim`, or `output_dims` does
            not fit them.

    Example:
        >>> import asyncio, aiopar, torch
        >>> outputs = [
        ...     {"y": torch.ones(2), "h": torch.ones(1, 2), "names": ["a", "b"], "steps": 7},
        ...     {"y": torch.zeros(1), "h": torch.zeros(1, 1), "names": ["c"], "steps": 7},
        ... ]
        >>> asyncio.run(aiopar.gather(outputs, "cpu", output_dims={"h": 1}))
        {'y': tensor([1., 1., 0.]), 'h': tensor([[1., 1., 0.]]), 'names': ['a', 'b', 'c'],
        'steps': [7, 7]}
    """
    target = parse_output_device(output_device)
    as_int("dim", dim)
    check_output_dims(output_dims)
    if not isinstance(outputs, list | tuple):
        raise TypeError(
            "outputs must be a list or tuple with one entry per replica, not "
            f"{type(outputs).__name__}"
        )
    if not outputs:
        raise ValueError("outputs is empty: expected at least one replica's output")
    call = run_near(target, partial(_gather_sync, outputs, target, dim, output_dims))
    return shown_as(call, "gather")


def run_near(device: torch.device, fn: Callable[[], T]) -> Coroutine[Any, Any, T]:
    """Await `fn()` on a worker of `device`, or on any worker if none is there."""
    check_no_transform()
    return executor_near(device).run_sync(fn)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A differentiable copy of `tensor` on `device`; `tensor` itself if it is there."""
    if tensor.device == device:  # faster than `.to`
        return tensor
    # Never non-blocking to the CPU: torch would return memory that is still being written.
    return tensor.to(device, non_blocking=device.type != "cpu")


def move_tree(tree: Any, device: torch.device) -> Any:
    """`tree` with its tensors on `device`; objects with a method `to(device)` move themselves."""
    return unzip(partial(_moved, device), tree, 1)[0]


def move_objects(tree: Any, device: torch.device) -> Any:
    """`tree` with the objects on `device` that have a method `to(device)`."""
    return unzip(partial(_moved_by_itself, device), tree, 1)[0]


def _moved(device: torch.device, node: Any) -> list[Any] | None:
    return [move(node, device)] if isinstance(node, Tensor) else _moved_by_itself(device, node)


def _moved_by_itself(device: torch.device, node: Any) -> list[Any] | None:
    if not moves_itself(node):
        return None
    # A copy: many such methods change their object, which others may use.
    with suppress(TypeError):
        node = copy.copy(node)
    moved = node.to(device)
    return [node if moved is None else moved]


def shareable(tensor: Tensor) -> Tensor:
    """`tensor` for several replicas: a view, if it is a leaf on an accelerator with gradients."""
    is_leaf = tensor.requires_grad and tensor.is_leaf and is_accelerator(tensor.device)
    # The leaf then gets its gradients on this stream, not on those of all replicas.
    return tensor.view_as(tensor) if is_leaf and torch.is_grad_enabled() else tensor


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
    sizes = piece_sizes({"inputs": inputs}, len(targets), dim, chunk_sizes)
    return _split(inputs, targets, dim, sizes)


def scatter_kwargs_sync(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: Sequence[torch.device],
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
) -> Scattered:
    """`scatter_kwargs` on the calling thread, for parsed devices and sizes."""
    sizes = piece_sizes({"inputs": args, "kwargs": kwargs}, len(targets), dim, chunk_sizes)
    if not args and not kwargs:
        return (), ()
    pieces = _split((args, kwargs), targets, dim, sizes)
    return tuple(piece[0] for piece in pieces), tuple(piece[1] for piece in pieces)


def _split(
    tree: Any, targets: Sequence[torch.device], dim: int, sizes: Sequence[int] | None
) -> list[Any]:
    # Without sizes every device gets all.
    used = targets if sizes is None else targets[: len(sizes)]
    return unzip(partial(_split_node, used, dim, sizes), tree, len(used))


def _split_node(
    targets: Sequence[torch.device],
    dim: int,
    sizes: Sequence[int] | None,
    node: Any,
    in_cache: bool = False,
) -> list[Any] | None:
    """Split or copy a node, one value per target; None for a container and for a shared value."""
    if isinstance(node, Tensor):
        if node.ndim == 0 or sizes is None or len(sizes) == 1:
            shared = shareable(node)
            copies = [move(shared, target) for target in targets]
            # A cache counts its tokens in place.
            return [each.clone() for each in copies] if in_cache and node.ndim == 0 else copies
        return _split_tensor(node, targets, dim, sizes)
    if isinstance(node, Replicated):
        return _split(node.value, targets, dim, None)
    if isinstance(node, Split):
        if node._by_length and sizes is not None:
            return _split_sequence(node, targets, sizes)
        return _split(node.value, targets, node.dim, sizes)
    if not in_cache and has_own_state(node):
        if sizes is not None and len(sizes) > 1 and dim == 0 and is_indexed(node):
            return _split_sequence(Split(node), targets, sizes)
        return [
            move_tree(node, target)
            if moves_itself(node) or any(each.device != target for each in tensors(node))
            else node
            for target in targets
        ]
    starts_cache = not in_cache and is_cache(node)
    parts = children(node) if starts_cache else iterable_parts(node)
    if parts is None:
        return None
    _, values, rebuild = parts
    split = partial(_split_node, targets, dim, sizes, in_cache=in_cache or starts_cache)
    return [rebuild(row) for row in unzip(split, tuple(values), len(targets))]


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


def _split_sequence(
    mark: Split[Any], targets: Sequence[torch.device], sizes: Sequence[int]
) -> list[Any]:
    pieces = []
    for target, size, stop in zip(targets, sizes, accumulate(sizes), strict=True):
        along: Any = slice(stop - size, stop)
        if mark.dim:
            along = (slice(None),) * (mark.dim % mark.value.ndim) + (along,)
        pieces += _split(mark.value[along], [target], 0, None)
    return pieces


def piece_sizes(
    roots: dict[str, Any],
    count: int,
    dim: int,
    chunk_sizes: Sequence[int] | None = None,
    limit: int | None = None,
) -> Sequence[int] | None:
    """Check all inputs; return the size of each piece, or None if nothing is split.

    If the roots have more than `limit` nodes, it returns None and compares no sizes.
    """
    dim = as_int("dim", dim)
    nodes = _nodes(roots, dim, iterate=limit is None)
    found = [
        (_size_along(along, node, path), path, along)
        for node, path, along in islice(nodes, limit)
        if isinstance(node, Split) or (isinstance(node, Tensor) and node.ndim > 0)
    ]
    if limit is not None and next(nodes, None) is not None:
        return None
    if not found:
        if count > 1:
            _check_all_replicated(roots, dim, count, on_loop=limit is not None)
        return None
    batch, first, first_dim = found[0]
    for size, path, along in found[1:]:
        if size != batch:
            raise ValueError(
                f"inputs to scatter differ in size along dim {first_dim}: {format_path(first)} "
                f"has {batch}, {format_path(path)} has {size}"
                + (f" along dim {along}" if along != first_dim else "")
                + "; mark an input that every replica must get whole as aiopar.Replicated(...), "
                "and one with another batch dimension as aiopar.Split(..., dim=...)"
            )
    if chunk_sizes is None and batch == 0:
        return [0] * count
    if chunk_sizes is None:  # as `torch.chunk`, perhaps fewer pieces than `count`
        size = -(-batch // count)
        return [min(size, batch - start) for start in range(0, batch, size)]
    if sum(chunk_sizes) != batch:
        raise ValueError(
            f"chunk_sizes {chunk_sizes} add up to {sum(chunk_sizes)}, expected {batch}: the size "
            f"of {format_path(first)} along dim {first_dim}"
        )
    return chunk_sizes


def _check_all_replicated(roots: dict[str, Any], dim: int, count: int, *, on_loop: bool) -> None:
    """Raise ValueError unless every input is `Replicated`; called if nothing can be split."""
    for node, path, _ in _nodes(roots, dim, iterate=not on_loop):
        if isinstance(node, Replicated):
            continue
        parts = batch_children(node)
        if parts is not None and (len(parts[1]) or isinstance(path, str)):
            continue  # the values of a root are the inputs; a root may be empty
        if on_loop and is_other_iterable(node):
            return  # the worker searches it for tensors
        raise ValueError(
            f"nothing can be split over {count} replicas: there is no tensor with a dimension, "
            f"and {format_path(path)} is {describe(node)}; mark a sequence or an array with one "
            "entry per sample as aiopar.Split(...), and an input that every replica must get whole "
            "as aiopar.Replicated(...), or use aiopar.parallel_apply with the inputs of each "
            "replica"
        )


def _nodes(roots: dict[str, Any], dim: int, *, iterate: bool) -> Iterator[tuple[Any, Path, int]]:
    """Yield every node of the trees, depth first, with the dimension to split it along.

    A `Split` of a sequence is one node; any other `Split` is replaced by the nodes of its value.
    With `iterate`, iterables that are no containers are searched.
    """
    seen: dict[tuple[int, int], Any] = {}
    for name, tree in roots.items():
        yield from _nodes_below(tree, name, dim, seen, iterate)


def _nodes_below(
    node: Any, path: Path, dim: int, seen: dict[tuple[int, int], Any], iterate: bool
) -> Iterator[tuple[Any, Path, int]]:
    if isinstance(node, Split):
        dim = node.dim
        if not node._by_length:
            node = node.value
            iterable = iterable_parts(node) if iterate else is_other_iterable(node)
            dimensions = not has_own_state(node) and any(tensor.ndim for tensor in tensors(node))
            if not (is_cache(node) or iterable or dimensions):
                raise ValueError(
                    f"cannot split {format_path(path)}, {describe(node)}: it is marked as a "
                    "Split, but has no tensor with a dimension"
                )
    if dim == 0 and has_own_state(node) and is_indexed(node):
        node = Split(node)
    yield node, path, dim
    if isinstance(node, Tensor | Replicated | Split):
        return
    if isinstance(node, PackedSequence):
        raise TypeError(
            f"cannot split {format_path(path)}, a PackedSequence: its dimensions mix batch and "
            "time; scatter the padded batch with its lengths and pack in forward"
        )
    # Once only, because a container may contain itself.
    if (id(node), dim) in seen:
        return
    parts = batch_children(node) or (iterable_parts(node) if iterate else None)
    if parts is not None:
        seen[id(node), dim] = node
        keys, values, _ = parts
        for key, value in zip(keys, values, strict=True):
            yield from _nodes_below(value, (path, node, key), dim, seen, iterate)


def _size_along(dim: int, value: Any, path: Path) -> int:
    if isinstance(value, Split):
        value = value.value
        if not hasattr(value, "shape"):
            return len(value)
    elif value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise TypeError(
            f"cannot split {format_path(path)}, a {kind} tensor: make it dense and strided, or "
            "mark it as aiopar.Replicated(...)"
        )
    try:
        size: int = value.shape[dim]
    except IndexError:
        raise out_of_range(dim, value, path) from None
    return size


def parse_output_device(device: Device) -> torch.device:
    """Parse a device; -1 is the CPU, as in torch."""
    on_cpu = type(device) is int and device == -1
    return torch.device("cpu") if on_cpu else parse_device(device)


def check_output_dims(dims: Dims) -> None:
    """Raise TypeError unless `dims` is None, an int, or a tree of ints."""
    if dims is None:
        return
    if (parts := children(dims)) is None:
        as_int("output_dims", dims, "an int, or ints that are nested as the output is")  # type: ignore[arg-type]  # what it checks
    else:
        for value in parts[1]:
            check_output_dims(value)


def _gather_sync(outputs: Sequence[Any], device: torch.device, dim: int, dims: Dims) -> Any:
    try:
        return _Gathering(device, dim).join(outputs, dims, "output")
    except RecursionError as error:
        raise ValueError(
            "cannot gather outputs in which a container contains itself or is nested too deeply"
        ) from error


class _Gathering:
    """Joins outputs on one device, along `dim` or the dimensions that `join` gets."""

    def __init__(self, device: torch.device, dim: int) -> None:
        self._device = device
        self._dim = dim

    def join(
        self, outputs: Sequence[Any], dims: Dims, path: Path, *, in_cache: bool = False
    ) -> Any:
        first = outputs[0]
        if isinstance(first, Tensor):
            for index, output in enumerate(outputs):
                if not isinstance(output, Tensor):
                    raise _difference(outputs, path, index)
            if in_cache and first.ndim == 0:
                return move(first, self._device)
            return self._join_tensors(outputs, self._dim_of(dims, first, path), path)
        if in_cache and not has_tensors(list(outputs)):
            return first
        containers = _parts(outputs, in_cache=in_cache)
        if not containers and not any(isinstance(output, Tensor) for output in outputs):
            self._dim_of(dims, first, path)
            return None if all(output is None for output in outputs) else list(outputs)
        traits = [(type(o), p is None) for o, p in zip_longest(outputs, containers)]
        if differing := [index for index, trait in enumerate(traits) if trait != traits[0]]:
            raise _difference(outputs, path, differing[0])
        joined = [parts for parts in containers if parts is not None]
        if isinstance(first, PackedSequence):
            raise TypeError(
                f"cannot gather {format_path(path)}, a PackedSequence: its dimensions mix batch "
                "and time; unpack it in forward"
            )
        keys, _, rebuild = joined[0]
        per_sample = isinstance(first, list) and not in_cache and children(dims) is None
        if per_sample and not any(map(_is_positional, chain.from_iterable(outputs))):
            [entries] = _split([*chain.from_iterable(outputs)], [self._device], 0, None)
            return rebuild(entries)
        columns = zip(*aligned(joined, partial(_difference, outputs, path)), strict=True)
        in_cache = in_cache or is_cache(first)
        parts = zip(keys, columns, _dims_below(dims, keys, first, path), strict=True)
        return rebuild(
            [self.join(each, to, (path, first, key), in_cache=in_cache) for key, each, to in parts]
        )

    def _dim_of(self, dims: Dims, first: Any, path: Path) -> int:
        if dims is None:
            return self._dim
        if children(dims) is None:
            return operator.index(dims)  # type: ignore[arg-type]  # no container: an int
        raise _misfit(dims, first, path)

    def _join_tensors(self, found: Sequence[Tensor], dim: int, path: Path) -> Tensor:
        ndim = found[0].ndim
        if ndim and not -ndim <= dim < ndim:
            raise out_of_range(dim, found[0], path)
        moved = [move(tensor, self._device) for tensor in found]
        try:
            if all(tensor.ndim == 0 for tensor in moved):
                return torch.stack(moved)
            return moved[0] if len(moved) == 1 else torch.cat(moved, dim)
        except (RuntimeError, TypeError) as error:
            kinds = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in found)
            add_note_once(error, f"while gathering {format_path(path)} of the replicas: ", kinds)
            raise


def _parts(outputs: Sequence[Any], *, in_cache: bool) -> list[Parts | None]:
    """The parts of outputs that are containers, or iterables that hold tensors; if any are."""
    for parts_of in (children if in_cache else batch_children, iterable_parts):
        containers = [parts_of(output) for output in outputs]
        if any(containers):
            return containers
    return []


def _is_positional(entry: Any) -> bool:
    """Whether an entry of a list is a value of the whole batch, not of one sample."""
    if isinstance(entry, list | tuple):
        return any(map(_is_positional, entry))
    return isinstance(entry, Tensor) or is_cache(entry)


def _dims_below(dims: Dims, keys: Collection[Any], node: Any, path: Path) -> Collection[Dims]:
    """The dimensions of the parts of a container, from those of the container."""
    if (parts := children(dims)) is None:
        return [dims] * len(keys)
    names, values, _ = parts
    in_order = isinstance(dims, list | tuple)
    # An optional field may be absent.
    if not in_order and {*keys, *getattr(node, "__dataclass_fields__", ())}.issuperset(names):
        by_name = dict(zip(names, values, strict=True))
        return [by_name.get(key) for key in keys]
    if in_order and len(values) == len(keys):
        return values
    raise _misfit(dims, node, path)


def _misfit(dims: Dims, node: Any, path: Path) -> ValueError:
    return ValueError(
        f"output_dims does not fit: {format_path(path)} is {describe(node)}, output_dims has "
        f"{describe(dims)} there"
    )


def _difference(outputs: Sequence[Any], path: Path, index: int) -> ValueError:
    lists = all(isinstance(output, list) for output in outputs)
    return ValueError(
        f"outputs differ at {format_path(path)}: replica 0 returned {describe(outputs[0])}, "
        f"replica {index} returned {describe(outputs[index])}"
        + ("; for a list with one tensor per sample, put each tensor into a dict" if lists else "")
    )
