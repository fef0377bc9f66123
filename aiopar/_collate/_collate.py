"""Items of one structure to one nested tensor.

A column is what all items have at one place, in their order: the unit that all work is done by.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._checks import as_list
from .._tree import Path, aligned, children, format_path
from ._leaves import NUMBERS, becomes_tensor, describe, holds, is_numeric_array, is_opaque


def collate(items: Sequence[Any]) -> Any:
    """Items of one structure to one nested tensor with a new dim 0: entry `i` is of `items[i]`.

    The default `collate_fn` of `aiopar.serve.Batcher`.

    | in every item                      | in the batch of N                                  |
    |------------------------------------|----------------------------------------------------|
    | tensor, shape (...)                | tensor, shape (N, ...), by `torch.stack`           |
    | NumPy array or scalar              | tensor, shape (N, ...), a copy                     |
    | bool, int, float                   | tensor, shape (N,): bool, int64, float64           |
    | tuple, namedtuple, dict, dataclass | the same container, each part a batch of its own   |
    | list that holds any of the first 3 | the same                                           |
    | list that holds none of them       | list of N: the items' lists as they are            |
    | string, bytes, None, anything else | list of N: the items' values                       |

    As `torch.utils.data.default_collate`, with these differences. Tuples stay tuples, where torch
    makes lists. Dataclasses and Hugging Face's `ModelOutput` are containers. Values that torch
    refuses are kept, and a list of them (tags, say) may have another length in every item. dtypes
    that differ are refused, as is an int among floats, where torch promotes or takes the first's:
    no item changes what its neighbours become.

    Args:
        items: One item a caller, at least one.

    Raises:
        ValueError: `items` is empty, or two items differ in structure, or at one place in type,
            shape, dtype or device: the error names the place and both.
        TypeError: `items` is no iterable; and for a `PackedSequence`, whose dimensions mix batch
            and time.

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
    return collate_with(STACK, items)


class Join:
    """How the tensors of a column become one tensor: by `torch.stack`."""

    def tensors(self, column: list[Any], path: Path) -> Tensor:
        """Join a column that begins with a tensor."""
        # torch first, which finds most of what can be wrong: this is on the way of every batch.
        try:
            stacked = torch.stack(column)
        except (RuntimeError, TypeError) as error:
            first = describe(column[0])
            for index, item in enumerate(column):
                if describe(item) != first:
                    raise _difference(column, index, path) from None
            error.add_note(f"while stacking {format_path(path)} of {len(column)} items")
            raise
        dtype = column[0].dtype
        for index, tensor in enumerate(column):
            if tensor.dtype is not dtype:  # torch promotes them
                raise _difference(column, index, path)
        return stacked

    def arrays(self, column: list[Any], path: Path) -> Tensor:
        """Join a column that begins with an array of numbers."""
        import numpy as np

        shape, dtype = column[0].shape, column[0].dtype
        require(
            lambda item: is_numeric_array(item) and (item.shape, item.dtype) == (shape, dtype),
            column,
            path,
        )
        # NumPy's, since torch takes no foreign byte order and no negative strides, and warns of
        # what is read-only.
        return torch.from_numpy(np.stack(column))


STACK = Join()


def collate_with(join: Join, items: Iterable[Any]) -> Any:
    """Collate items; `join` makes one tensor of those at one place."""
    column = as_list("items", items, "items")
    if not column:
        raise ValueError("items is empty: a batch has at least one item")
    return _collate(column, "item", join)


def require(test: Callable[[Any], bool], column: list[Any], path: Path) -> None:
    """ValueError for the first item of a column that does not pass the test."""
    for index, item in enumerate(column):
        if not test(item):
            raise _difference(column, index, path)


def _require_type(kind: type, column: list[Any], path: Path) -> None:
    if set(map(type, column)) != {kind}:  # much cheaper than one by one
        require(lambda item: type(item) is kind, column, path)


def _collate(column: list[Any], path: Path, join: Join) -> Any:
    first = column[0]
    if isinstance(first, Tensor):
        return join.tensors(column, path)
    if type(first) in NUMBERS:
        return _numbers(column, path)
    if is_numeric_array(first):
        return join.arrays(column, path)
    if children(first) is not None:
        return _containers(column, path, join)
    require(is_opaque, column, path)
    return column


def _numbers(column: list[Any], path: Path) -> Tensor:
    kind = type(column[0])
    _require_type(kind, column, path)
    try:
        return torch.tensor(column, dtype=NUMBERS[kind])
    except (RuntimeError, ValueError) as error:  # an int of more than 64 bits
        error.add_note(f"while collating {format_path(path)} of {len(column)} items")
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
    return rebuild(
        [
            _collate(list(inner), (path, first, key), join)
            for key, inner in zip(keys, columns, strict=True)
        ]
    )


def _difference(column: list[Any], index: int, path: Path) -> ValueError:
    return ValueError(
        f"items differ at {format_path(path)}: item 0 is {describe(column[0])}, item {index} is "
        f"{describe(column[index])}"
    )
