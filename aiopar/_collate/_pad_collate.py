"""Items whose tensors differ in length to one padded batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .._checks import as_int, check_int
from .._tree import Path, format_path
from ._collate import Join, collate_with, require
from ._leaves import is_numeric_array


def pad_collate(
    items: Sequence[Any],
    *,
    pad_value: float | Mapping[Any, float] = 0,
    dim: int = 0,
    multiple_of: int = 1,
) -> tuple[Any, Tensor]:
    """Items whose tensors differ in length to one padded batch, and a mask of what is real.

    As `collate`, but tensors are padded at the end of `dim` to the longest of all items before they
    are stacked. An item has one length: all its tensors have it (token ids and their types, a
    spectrogram and its frames' times), which one mask therefore describes. Numbers and tensors
    without dimensions have no length and are stacked. It is a `collate_fn` of
    `aiopar.serve.Batcher`, with settings as `partial(pad_collate, multiple_of=8)`; what the
    function is given is the pair that is returned.

    The padding is `torch.nn.utils.rnn.pad_sequence`'s, batch first, which has neither mask nor
    trees nor another dimension than 0. Hugging Face's `tokenizer.pad` does the like for token ids:
    it knows the model's padding token, and has the mask as `attention_mask`.

    Args:
        items: One item a caller, at least one.
        pad_value: What fills up. A mapping has one for each dict key or field that tensors stand
            under, the innermost first: `{"input_ids": 1, "attention_mask": 0}`.
        dim: The dimension of an item's tensors that differs in size. Negative ones count from the
            end of each tensor.
        multiple_of: The padded length is rounded up to a multiple of this: fewer different shapes
            for a compiler, and sizes that matrix units like.

    Returns:
        The batch, its tensors of shape (N, longest, ...) if `dim` is 0, and the mask: a bool
        tensor of shape (N, longest) on the same device, True where an item has a value.

    Raises:
        ValueError: As from `collate`, but that sizes along `dim` may differ between items. Also for
            an item whose tensors differ in them, for items without a tensor to pad, a tensor
            without `dim`, a `pad_value` that lacks a key, and a `multiple_of` below 1.
        TypeError: As from `collate`, and for a `dim` or `multiple_of` that is no int.

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
    """Joins columns of tensors to padded ones, and knows how long each item is."""

    def __init__(self, value: float | Mapping[Any, float], dim: int, multiple_of: int) -> None:
        self._value = value
        self._dim = dim
        self._multiple_of = multiple_of
        self._lengths: list[int] = []
        self._measured: tuple[Tensor, Path] | None = None
        """The first tensor that was padded, and its place: what the others must agree with."""

    def tensors(self, column: list[Any], path: Path) -> Tensor:
        first = column[0]
        if not first.ndim:
            return super().tensors(column, path)
        dim = self._dim
        if not -first.ndim <= dim < first.ndim:
            raise ValueError(
                f"dim {dim} is out of range for {format_path(path)} of shape "
                f"{tuple(first.shape)}: expected [{-first.ndim}, {first.ndim - 1}]"
            )
        traits = _traits(first, dim)
        require(
            lambda item: isinstance(item, Tensor) and _traits(item, dim) == traits, column, path
        )
        self._measure(column, path)
        value = self._value_at(path)
        along = [item.movedim(dim, 0) for item in column] if dim else column
        padded = pad_sequence(along, batch_first=True, padding_value=value)
        if extra := self._width() - padded.shape[1]:
            padded = F.pad(padded, (0, 0) * (padded.ndim - 2) + (0, extra), value=value)
        return padded.movedim(1, dim + 1 if dim >= 0 else dim).contiguous()

    def arrays(self, column: list[Any], path: Path) -> Tensor:
        import numpy as np

        require(is_numeric_array, column, path)
        # Copies, for the reasons that `collate` has.
        copies = [np.array(item, item.dtype.newbyteorder("=")) for item in column]
        return self.tensors([torch.from_numpy(copy) for copy in copies], path)

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
                    f"{length}; an item whose tensors differ in them needs a collate_fn of its own"
                )

    def _value_at(self, path: Path) -> float:
        if not isinstance(self._value, Mapping):
            return self._value
        place = path
        while not isinstance(place, str):
            if place[2] in self._value:
                return self._value[place[2]]
            place = place[0]
        raise ValueError(
            f"pad_value has no entry for {format_path(path)}: it has {list(self._value)}"
        )


def _traits(tensor: Tensor, dim: int) -> object:
    """What tensors that are padded along `dim` must have in common."""
    shape = tuple(tensor.shape)
    at = dim % len(shape) if shape else 0
    return len(shape), shape[:at] + shape[at + 1 :], tensor.dtype, tensor.device
