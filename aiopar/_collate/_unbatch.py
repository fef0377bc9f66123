"""What a function returned for a batch to one output an item."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._errors import OutputMismatch
from .._tree import Path, children, format_path, unzip
from ._leaves import describe, holds, is_rows


def unbatch(outputs: Any, count: int) -> list[Any]:
    """What a function returned for a batch of `count` items, as one output an item.

    The default `unbatch_fn` of `aiopar.serve.Batcher`. The types alone say how it is read, so that
    a size that happens to equal `count` never changes the meaning:

    - A list at the top has one output an item, whatever they are.
    - Anything else is one tree for the whole batch. Tensors and NumPy arrays in it have size
      `count` in dim 0 and are taken apart there. A list in it that holds none of them has one value
      an item. Lists that do and other containers are walked. What else there is goes to all.
    - A tuple in which nothing has one value an item is read as a list.

    So `[boxes_of_a, boxes_of_b]` is two outputs and `(logits, hidden)` two tensors of a batch,
    whatever its size. `unbatch(collate(items), len(items))` gives the items back, numbers and
    arrays as tensors, but for items that are themselves lists of such or of tensors. Of items that
    hold nothing at all, `{}`, the batch holds nothing either: it is refused as every output is in
    which nothing has one value an item, for a function may have returned it by mistake.

    The pieces are views, by `Tensor.unbind`: the whole batch lives while one of them does, and
    under autograd they cannot be edited in place. `clone()` what is kept for long.

    Args:
        outputs: What the function returned.
        count: How many items the batch had, at least one.

    Raises:
        aiopar.OutputMismatch: There is not one output for each item: the error names the place,
            what is there, and `count`.

    Example:
        >>> import torch
        >>> from aiopar.serve import unbatch
        >>> unbatch({"score": torch.tensor([0.5, 1.5]), "label": ["cat", "dog"]}, 2)
        [{'score': tensor(0.5000), 'label': 'cat'}, {'score': tensor(1.5000), 'label': 'dog'}]
    """
    if isinstance(outputs, Tensor):
        _check_size(outputs, count, "output")
        return list(outputs.unbind())
    if _is_one_an_item(outputs, count):
        return list(outputs)
    return unzip(_pieces, outputs, count)


def check_batched(outputs: Any, count: int) -> None:
    """Raise what `unbatch` would, `aiopar.OutputMismatch`, without taking anything apart."""
    if isinstance(outputs, Tensor):
        _check_size(outputs, count, "output")
    else:
        _is_one_an_item(outputs, count)


def _is_one_an_item(outputs: Any, count: int) -> bool:
    """Whether these, which are no tensor, are a list of one output an item. Checks everything."""
    if not isinstance(outputs, list):
        if _check(outputs, count, "output"):
            return False
        if type(outputs) is not tuple:
            raise _mismatch("no batch", count, outputs, "output")
    _check_length(outputs, count, "output")
    return True


def _check(node: Any, count: int, path: Path) -> bool:
    """Whether anything in `node` has one value an item; OutputMismatch if not as many as items."""
    if is_rows(node):
        _check_size(node, count, path)
        return True
    if isinstance(node, list) and not holds(is_rows, node):
        _check_length(node, count, path)
        return True
    if isinstance(node, PackedSequence):  # its dimensions mix batch and time
        raise _mismatch("no batch", count, node, path)
    if (parts := children(node)) is None:
        return False
    pairs = zip(parts[0], parts[1], strict=True)
    found = [_check(value, count, (path, node, key)) for key, value in pairs]
    return any(found)


def _check_size(rows: Any, count: int, path: Path) -> None:
    if not rows.ndim:
        raise _mismatch("no batch", count, rows, path)
    if (size := rows.shape[0]) != count:
        raise _mismatch(_amount(size, "output"), count, rows, path)


def _check_length(values: Sequence[Any], count: int, path: Path) -> None:
    if len(values) != count:
        raise _mismatch(_amount(len(values), "output"), count, values, path)


def _pieces(node: Any) -> list[Any] | None:
    """One value an item, of what was checked; None for what is walked or goes to all."""
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
