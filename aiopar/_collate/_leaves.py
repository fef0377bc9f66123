"""What items and outputs are made of: the leaves that become tensors, and words for them all."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._tree import children

try:
    import numpy as np
except ImportError:  # torch does without NumPy, and then nothing can be an array
    _ROWS: tuple[type[Any], ...] = (Tensor,)
    _NUMPY: tuple[type[Any], ...] = ()
else:
    _ROWS = (Tensor, np.ndarray)
    _NUMPY = (np.ndarray, np.generic)

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The numbers that become tensors, by exact type: an `IntEnum` means more than its number."""


def is_rows(leaf: Any) -> bool:
    """Whether it is a tensor or an array, which may have one row an item."""
    return isinstance(leaf, _ROWS)


def is_numeric_array(leaf: Any) -> bool:
    """Whether it is a NumPy array or scalar of numbers, not of strings, dates or objects."""
    return isinstance(leaf, _NUMPY) and leaf.dtype.kind in "biufc"


def becomes_tensor(leaf: Any) -> bool:
    """Whether it is a tensor, or `collate` makes one of it."""
    return isinstance(leaf, Tensor) or type(leaf) in NUMBERS or is_numeric_array(leaf)


def is_opaque(node: Any) -> bool:
    """Whether `collate` leaves it as it is: neither a container nor made a tensor."""
    return not becomes_tensor(node) and children(node) is None


def holds(test: Callable[[Any], bool], node: Any) -> bool:
    """Whether `node` passes the test, or anything in it does."""
    if test(node):
        return True
    parts = children(node)
    return parts is not None and any(holds(test, value) for value in parts[1])


def describe(node: Any) -> str:
    """What a node is, for errors: all in which two that are stacked must agree."""
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
