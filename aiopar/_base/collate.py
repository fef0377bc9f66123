"""Batches: items to one batch (`collate`, `pad_collate`), a batch to outputs (`unbatch`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_sequence

from ..errors import OutputMismatch
from .arguments import as_int, as_list, check_int
from .tracebacks import add_note_once
from .tree import (
    Parts,
    Path,
    aligned,
    batch_children,
    children,
    format_path,
    has_own_state,
    is_cache,
    is_indexed,
    unzip,
)

try:
    import numpy as np
except ImportError:  # torch does not need NumPy
    _ROWS: tuple[type[Any], ...] = (Tensor,)
    _NUMPY: tuple[type[Any], ...] = ()
else:
    _ROWS = (Tensor, np.ndarray)
    _NUMPY = (np.ndarray, np.generic)

TensorT = TypeVar("TensorT", bound=Tensor)
Item: TypeAlias = "TensorT | float | np.ndarray[Any, Any]"
"""What `collate` makes a tensor of. Only type checkers read this: NumPy may be missing."""

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The numbers that become tensors, by exact type: an `IntEnum` is not just its number."""


def is_rows(leaf: Any) -> bool:
    """Whether `leaf` is a tensor or an array, which may have one row per item."""
    return isinstance(leaf, _ROWS)


def is_numeric_array(leaf: Any) -> bool:
    """Whether `leaf` is a NumPy array or scalar of numbers, not of strings, dates or objects."""
    return isinstance(leaf, _NUMPY) and leaf.dtype.kind in "biufc"


def becomes_tensor(leaf: Any) -> bool:
    """Whether `leaf` is a tensor, or `collate` makes a tensor of it."""
    return isinstance(leaf, Tensor) or type(leaf) in NUMBERS or is_numeric_array(leaf)


def holds(test: Callable[[Any], bool], node: Any) -> bool:
    """Whether `node` or anything in it passes the test."""
    if test(node):
        return True
    parts = _item_parts(node)
    return parts is not None and any(holds(test, value) for value in parts[1])


def _item_parts(node: Any) -> Parts | None:
    """As `batch_children`, but a cache is a value: a batch of caches is a list."""
    return None if is_cache(node) else batch_children(node)


def describe(node: Any) -> str:
    """Describe a node in an error: everything that must be equal in all items."""
    name = type(node).__name__
    kind = f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
    if isinstance(node, Tensor):
        if node.is_nested:  # has no shape
            return f"{kind} that is nested"
        return f"{kind} of shape {tuple(node.shape)}, {node.dtype} on {node.device}"
    if isinstance(node, _NUMPY):
        return f"{kind} of shape {node.shape}, {node.dtype}"
    if (parts := children(node)) is None:
        return kind
    keys = list(parts[0])
    return f"{kind} of {len(keys)}" if keys == list(range(len(keys))) else f"{kind} of {keys}"


def out_of_range(dim: int, value: Any, path: Path) -> ValueError:
    """Make the error for a tensor or an array that has no dimension `dim`."""
    ndim = len(value.shape)
    return ValueError(
        f"dim {dim} is out of range for {format_path(path)} of shape {tuple(value.shape)}: "
        f"expected [{-ndim}, {ndim - 1}]"
    )


def collate(items: Sequence[Any]) -> Any:
    """Make one batch of items of one structure. Tensors get a new dim 0, with one entry per item.

    The default `collate_fn` of `aiopar.serve.Batcher`.

    ==================================  ==============================================
    in every item                       in the batch of N
    ==================================  ==============================================
    tensor, shape (...)                 tensor, shape (N, ...), by `torch.stack`
    NumPy array or scalar               tensor, shape (N, ...), a copy
    bool, int, float                    tensor, shape (N,): bool, int64, float64
    tuple, namedtuple, dict, dataclass  the same container, with a batch for each part
    list with any of the first 3 kinds  the same
    list with none of them              list of N: the items' lists, unchanged
    string, bytes, None, anything else  list of N: the items' values
    ==================================  ==============================================

    A dataclass instance with more than its fields belongs to the last row.

    Mirrors `torch.utils.data.default_collate`. Differences: tuples stay tuples (torch makes lists).
    Dataclasses and Hugging Face's `ModelOutput` are containers. Values that torch refuses are kept,
    and a list of them may have another length in each item. Different dtypes are refused, and so is
    an int among floats (torch promotes): no item changes the result of its neighbours.

    Args:
        items: The items, at least one.

    Raises:
        ValueError: `items` is empty. Or two items differ in structure, or at one place in type,
            shape, dtype or device; the error names the place and both items.
        TypeError: `items` is no iterable, or an item contains a `PackedSequence`, whose dimensions
            mix batch and time.

    Example:
        >>> import torch
        >>> from aiopar.serve import collate
        >>> collate([{"x": torch.ones(2), "id": 7}, {"x": torch.zeros(2), "id": 8}])
        {'x': tensor([[1., 1.], [0., 0.]]), 'id': tensor([7, 8])}
        >>> collate([("a question", "a text"), ("another", "a text")])
        (['a question', 'another'], ['a text', 'a text'])
        >>> collate([{"x": torch.ones(2)}, {"x": torch.ones(3)}])
        Traceback (most recent call last):
        ValueError: items differ at item['x']: item 0 is a Tensor of shape (2,), torch.float32 on
        cpu, item 1 is a Tensor of shape (3,), torch.float32 on cpu
    """
    return collate_with(Join(), items)


class Join:
    """Stacks each column, which is the tensors at one place in all items, to one tensor."""

    def tensors(self, column: list[Any], path: Path) -> Tensor:
        """Join a column whose first item is a tensor."""
        # Stack first and look for differences afterwards: most columns have none.
        try:
            stacked = torch.stack(column)
        except (RuntimeError, TypeError) as error:
            first = describe(column[0])
            for index, item in enumerate(column):
                if describe(item) != first:
                    raise _difference(column, index, path) from None
            add_note_once(error, f"while stacking {format_path(path)} of ", f"{len(column)} items")
            raise
        dtype = column[0].dtype
        for index, tensor in enumerate(column):
            if tensor.dtype is not dtype:  # `torch.stack` promotes them
                raise _difference(column, index, path)
        return stacked

    def arrays(self, column: list[Any], path: Path) -> Tensor:
        """Join a column whose first item is an array of numbers."""
        _require(is_numeric_array, column, path)
        # torch refuses another byte order and negative strides, and warns about read-only arrays.
        natives = [np.require(item, item.dtype.newbyteorder("="), ("C", "W")) for item in column]
        return self.tensors([torch.from_numpy(native) for native in natives], path)


def collate_with(join: Join, items: Iterable[Any]) -> Any:
    """Collate items; `join` joins the tensors of each place."""
    column = as_list("items", items, "items")
    if not column:
        raise ValueError("items is empty: a batch has at least one item")
    return _collate(column, "item", join)


def _require(test: Callable[[Any], bool], column: list[Any], path: Path) -> None:
    """Raise ValueError for the first item of a column that fails the test."""
    for index, item in enumerate(column):
        if not test(item):
            raise _difference(column, index, path)


def _require_type(kind: type, column: list[Any], path: Path) -> None:
    if set(map(type, column)) != {kind}:  # faster than one by one
        _require(lambda item: type(item) is kind, column, path)


def _collate(column: list[Any], path: Path, join: Join) -> Any:
    first = column[0]
    if isinstance(first, Tensor):
        return join.tensors(column, path)
    if type(first) in NUMBERS:
        return _numbers(column, path)
    if is_numeric_array(first):
        return join.arrays(column, path)
    if _item_parts(first) is not None:
        return _containers(column, path, join)
    # Neither a tensor nor a container: such items are kept.
    _require(lambda item: not becomes_tensor(item) and _item_parts(item) is None, column, path)
    return column


def _numbers(column: list[Any], path: Path) -> Tensor:
    kind = type(column[0])
    _require_type(kind, column, path)
    try:
        return torch.tensor(column, dtype=NUMBERS[kind])
    except (RuntimeError, ValueError) as error:  # an int of more than 64 bits
        add_note_once(error, f"while collating {format_path(path)} of ", f"{len(column)} items")
        raise


def _containers(column: list[Any], path: Path, join: Join) -> Any:
    first = column[0]
    kind = type(first)
    _require_type(kind, column, path)
    if kind is PackedSequence:
        raise TypeError(
            f"cannot collate {format_path(path)}, a PackedSequence: its dimensions mix batch and "
            "time; use aiopar.serve.pad_collate, and pack in the function"
        )
    if isinstance(first, list) and not any(holds(becomes_tensor, item) for item in column):
        return column
    parts = [found for item in column if (found := children(item)) is not None]
    keys, _, rebuild = parts[0]
    columns = zip(*aligned(parts, lambda index: _difference(column, index, path)), strict=True)
    pairs = zip(keys, columns, strict=True)
    return rebuild([_collate(list(inner), (path, first, key), join) for key, inner in pairs])


def _difference(column: list[Any], index: int, path: Path) -> ValueError:
    return ValueError(
        f"items differ at {format_path(path)}: item 0 is {describe(column[0])}, item {index} is "
        f"{describe(column[index])}"
    )


def pad_collate(
    items: Sequence[Any],
    *,
    pad_value: float | Mapping[Any, float] = 0,
    dim: int = 0,
    multiple_of: int = 1,
) -> tuple[Any, Tensor]:
    """Make one padded batch of items whose tensors differ in length, and a mask of the real values.

    As `collate`, but tensors are first padded at the end of `dim` to the longest tensor of all
    items. All tensors of one item must have the same length (token ids and their types, say), so
    that one mask describes them. Numbers and tensors without dimensions are stacked.

    Use it as the `collate_fn` of an `aiopar.serve.Batcher`, with settings as
    `partial(pad_collate, multiple_of=8)`. The batcher then calls its function with (batch, mask).

    Mirrors `torch.nn.utils.rnn.pad_sequence` with `batch_first=True`. Differences: nested items, a
    mask, and any dimension. Hugging Face's `tokenizer.pad` does this for token ids: it knows the
    model's padding token, and its mask is `attention_mask`.

    Args:
        items: The items, at least one.
        pad_value: The value of the padding. A mapping has a value for each dict key or field that
            contains tensors; the innermost key counts: `{"input_ids": 1, "attention_mask": 0}`.
        dim: The dimension of an item's tensors that differs in size. A negative one counts from the
            end of each tensor.
        multiple_of: The padded length is rounded up to a multiple of this. Then a compiler sees
            fewer shapes.

    Returns:
        The batch, with tensors of shape (N, longest, ...) if `dim` is 0. And the mask: a bool
        tensor of shape (N, longest) on the same device, True where an item has a value.

    Raises:
        ValueError: As from `collate`, except that sizes along `dim` may differ between items. Also
            if the tensors of one item differ in length, if no item has a tensor to pad, if a tensor
            has no `dim`, if `pad_value` lacks a key, or if `multiple_of` is below 1.
        TypeError: As from `collate`; also if `dim` or `multiple_of` is no int.

    Example:
        >>> import torch
        >>> from aiopar.serve import pad_collate
        >>> padded, mask = pad_collate([torch.tensor([5, 6, 7]), torch.tensor([8])])
        >>> padded
        tensor([[5, 6, 7], [8, 0, 0]])
        >>> mask
        tensor([[ True, True, True], [ True, False, False]])
    """
    multiple_of = check_int("multiple_of", multiple_of, at_least=1)
    padding = _Padding(pad_value, as_int("dim", dim), multiple_of)
    batch = collate_with(padding, items)
    return batch, padding.mask()


class _Padding(Join):
    """Pads the tensors of a column before it stacks them; keeps the length of each item."""

    def __init__(self, value: float | Mapping[Any, float], dim: int, multiple_of: int) -> None:
        self._value = value
        self._dim = dim
        self._multiple_of = multiple_of
        self._lengths: list[int] = []
        self._measured: tuple[Tensor, Path] | None = None
        """The first padded tensor, and its place; an item's other tensors must have its length."""

    def tensors(self, column: list[Any], path: Path) -> Tensor:
        first = column[0]
        if not first.ndim:
            return super().tensors(column, path)
        dim = self._dim
        if not -first.ndim <= dim < first.ndim:
            raise out_of_range(dim, first, path)
        traits = _traits(first, dim)
        _require(lambda item: _traits(item, dim) == traits, column, path)
        self._measure(column, path)
        value = self._value_at(path)
        along = [item.movedim(dim, 0) for item in column] if dim else column
        padded = pad_sequence(along, batch_first=True, padding_value=value)
        if extra := self._width() - padded.shape[1]:
            padded = F.pad(padded, (0, 0) * (padded.ndim - 2) + (0, extra), value=value)
        return padded.movedim(1, dim + 1 if dim >= 0 else dim).contiguous()

    def mask(self) -> Tensor:
        if self._measured is None:
            raise ValueError(
                "items hold no tensor with a length to pad: use aiopar.serve.collate for them"
            )
        device = self._measured[0].device
        lengths = torch.tensor(self._lengths, device=device)
        return torch.arange(self._width(), device=device) < lengths.unsqueeze(1)

    def _width(self) -> int:
        return -(-max(self._lengths) // self._multiple_of) * self._multiple_of

    def _measure(self, column: list[Any], path: Path) -> None:
        lengths = [item.shape[self._dim] for item in column]
        if self._measured is None:
            self._lengths, self._measured = lengths, (column[0], path)
            return
        for index, (length, expected) in enumerate(zip(lengths, self._lengths, strict=True)):
            if length != expected:
                raise ValueError(
                    f"item {index} has two lengths along dim {self._dim}: "
                    f"{format_path(self._measured[1])} has {expected}, {format_path(path)} has "
                    f"{length}; items whose tensors differ in length need your own collate_fn"
                )

    def _value_at(self, path: Path) -> float:
        if not isinstance(self._value, Mapping):
            return self._value
        place = path
        while not isinstance(place, str):
            place, _, key = place
            if key in self._value:
                return self._value[key]
        raise ValueError(
            f"pad_value has no entry for {format_path(path)}: it has {list(self._value)}"
        )


def _traits(item: Any, dim: int) -> object:
    """What must be equal in all tensors that are padded along `dim`; None for other items."""
    if not isinstance(item, Tensor):
        return None
    others = [size for at, size in enumerate(item.shape) if at != dim % item.ndim]
    return item.ndim, others, item.dtype, item.device


def unbatch(outputs: Any, count: int) -> list[Any]:
    """Split a function's result for a batch of `count` items into one output per item.

    The default `unbatch_fn` of `aiopar.serve.Batcher`. Only types decide how the result is read,
    so a size that equals `count` by chance never changes the meaning:

    - A list at the top has one output per item.
    - Everything else is one tree for the whole batch. Tensors and NumPy arrays in it have size
      `count` in dim 0, and are split there. A list in the tree that holds no tensor or array has
      one value per item. Other lists and containers are searched. Any other value goes to every
      item.
    - A dataclass whose instance has more than its fields is indexed, if it can be.
    - A tuple that has no tensor, array or list in it is read as a list.

    So `[boxes_of_a, boxes_of_b]` is two outputs, and `(logits, hidden)` is two tensors of a batch.
    `unbatch(collate(items), len(items))` returns the items, with tensors in place of numbers and
    arrays, except for items that are lists of tensors, arrays or numbers. A result without any
    value per item, probably a mistake, is refused; so is the result for empty items (`{}`).

    The outputs are views, made by `Tensor.unbind`. One view keeps the whole batch in memory, and
    under autograd views cannot be edited in place: `clone()` an output that you keep.

    Args:
        outputs: The result of the function.
        count: How many items the batch had, at least one.

    Raises:
        aiopar.OutputMismatch: `outputs` does not have one output per item. The error names the
            place, its content, and `count`.

    Example:
        >>> import torch
        >>> from aiopar.serve import unbatch
        >>> unbatch({"score": torch.tensor([0.5, 1.5]), "label": ["cat", "dog"]}, 2)
        [{'score': tensor(0.5000), 'label': 'cat'}, {'score': tensor(1.5000), 'label': 'dog'}]
    """
    if _is_one_per_item(outputs, count):
        return list(outputs.unbind() if isinstance(outputs, Tensor) else outputs)
    return unzip(partial(_pieces, count), outputs, count)


def check_batched(outputs: Any, count: int) -> None:
    """Raise the `aiopar.OutputMismatch` that `unbatch` would raise; split nothing."""
    _is_one_per_item(outputs, count)


def _is_one_per_item(outputs: Any, count: int) -> bool:
    """Whether `outputs` is a tensor or a list of one output per item; checks all sizes."""
    if not isinstance(outputs, (Tensor, list)):
        if _check(outputs, count, "output"):
            return False
        if type(outputs) is not tuple:
            raise _mismatch("no batch", count, outputs, "output")
    _check_size(outputs, count, "output")
    return True


def _check(node: Any, count: int, path: Path) -> bool:
    """Whether anything in `node` has one value per item; raises OutputMismatch for other sizes."""
    if is_rows(node):
        _check_size(node, count, path)
        return True
    if has_own_state(node):
        if indexed := is_indexed(node):
            _check_size(node, count, path)
        return indexed
    if isinstance(node, list) and not holds(is_rows, node):
        _check_size(node, count, path)
        return True
    if isinstance(node, PackedSequence):  # its dimensions mix batch and time
        raise _mismatch("no batch", count, node, path)
    if (parts := _item_parts(node)) is None:
        return False
    pairs = zip(parts[0], parts[1], strict=True)
    found = [_check(value, count, (path, node, key)) for key, value in pairs]
    return any(found)


def _check_size(values: Any, count: int, path: Path) -> None:
    if is_rows(values) and not values.ndim:
        raise _mismatch("no batch", count, values, path)
    # A nested tensor may have no `len`.
    size = values.size(0) if isinstance(values, Tensor) else len(values)
    if size != count:
        raise _mismatch(_amount(size, "output"), count, values, path)


def _pieces(count: int, node: Any) -> list[Any] | None:
    """Return one value per item; None for a node that is searched or goes to every item."""
    if is_cache(node):
        return [node] * count
    if has_own_state(node):
        return [node[index] for index in range(count)] if is_indexed(node) else [node] * count
    if isinstance(node, Tensor):
        return list(node.unbind())
    if is_rows(node) or (isinstance(node, list) and not holds(is_rows, node)):
        return list(node)
    return None


def _mismatch(found: str, count: int, node: Any, path: Path) -> OutputMismatch:
    return OutputMismatch(
        f"the function returned {found} for a batch of {_amount(count, 'item')}: "
        f"{format_path(path)} is {describe(node)}; expected size {count} in dim 0 of tensors "
        f"(alone, or in a tuple, dict or dataclass), or a list of {count}"
    )


def _amount(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
