"""`pad_collate`: items of different lengths to a batch and its mask."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from aiopar._base.collate import pad_collate
from tests.sample_trees import Sample

ones = torch.ones


@st.composite
def _variable_length(draw: st.DrawFn) -> tuple[list[Tensor], int]:
    """Items that differ in size along a dim, and that dim."""
    rest = draw(st.lists(st.integers(0, 3), max_size=2))
    dim = draw(st.integers(-len(rest) - 1, len(rest)))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
    items = []
    for length in draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)):
        shape = list(rest)
        shape.insert(dim % (len(rest) + 1), length)
        items.append(torch.arange(torch.Size(shape).numel()).view(shape).to(dtype))
    return items, dim


class TestPadCollate:
    @given(_variable_length(), st.integers(0, 1), st.integers(1, 4))
    def test_each_item_is_there_and_the_rest_is_the_pad_value(
        self, drawn: tuple[list[Tensor], int], value: int, multiple: int
    ) -> None:
        items, dim = drawn
        padded, mask = pad_collate(items, pad_value=value, dim=dim, multiple_of=multiple)
        lengths = [item.shape[dim] for item in items]
        longest = max(lengths)
        width = next(size for size in range(longest, longest + multiple) if size % multiple == 0)
        assert (padded.dtype, padded.is_contiguous()) == (items[0].dtype, True)
        assert mask.tolist() == [[place < length for place in range(width)] for length in lengths]
        for row, item, length in zip(padded, items, lengths, strict=True):
            assert torch.equal(row.narrow(dim, 0, length), item)
            assert row.shape[dim] == width
            assert (row.narrow(dim, length, width - length) == value).all()

    def test_one_mask_for_all_tensors_of_an_item(self) -> None:
        def item(length: int) -> dict[str, Any]:
            return {
                "ids": torch.arange(length),
                "frames": ones(length, 2),
                "id": length,
                "text": "t",
            }

        batch, mask = pad_collate([item(3), item(1)])
        assert batch["ids"].tolist() == [[0, 1, 2], [0, 0, 0]]
        assert batch["frames"].shape == (2, 3, 2)
        assert (batch["id"].tolist(), batch["text"]) == ([3, 1], ["t", "t"])
        assert mask.tolist() == [[True] * 3, [True, False, False]]

    def test_a_pad_value_for_each_key(self) -> None:
        def item(length: int) -> dict[str, Any]:
            return {"text": Sample((ones(length), ones(length))), "labels": ones(length)}

        values = {"image": 7, "labels": -100}
        batch, _ = pad_collate([item(1), item(2)], pad_value=values)
        assert [part.tolist()[0] for part in batch["text"].image] == [[1, 7], [1, 7]]
        assert batch["labels"].tolist()[0] == [1, -100]
        with pytest.raises(ValueError, match=r"no entry for item\['text'\].image\[0\].*\['ids'\]"):
            pad_collate([item(1)], pad_value={"ids": 0})

    def test_settings_by_partial(self) -> None:
        padded, _ = partial(pad_collate, pad_value=9, multiple_of=4)([ones(1), ones(3)])
        assert padded.tolist() == [[1, 9, 9, 9], [1, 1, 1, 9]]

    @pytest.mark.parametrize(
        ("items", "dim", "message"),
        [
            ([ones(2), ones(3, 1)], 0, r"items differ at item: .*\(2,\).*\(3, 1\)"),
            ([ones(2, 4), ones(3, 5)], 0, r"items differ at item: .*\(2, 4\).*\(3, 5\)"),
            ([ones(4, 2), ones(4)], 1, r"items differ at item: .*\(4, 2\).*\(4,\)"),
            ([ones(2), torch.tensor(1.0)], 0, r"items differ at item: .*\(2,\).*shape \(\)"),
            ([torch.tensor(1.0), ones(2)], 0, r"items differ at item: .*shape \(\).*\(2,\)"),
            ([ones(2), ones(3).long()], 0, r"items differ at item: .*float32.*int64"),
            ([ones(2), "a"], 0, "items differ at item: .*Tensor.*a str"),
            ([np.ones(2), ones(2)], 0, "items differ at item: .*ndarray.*Tensor"),
            ([ones(2)], 1, r"dim 1 is out of range for item of shape \(2,\): expected \[-1, 0\]"),
            (
                [(ones(2), ones(2)), (ones(3), ones(4))],
                0,
                r"item 1 has two lengths along dim 0: item\[0\] has 3, item\[1\] has 4",
            ),
            (["a", "b"], 0, "items hold no tensor with a length"),
        ],
    )
    def test_what_cannot_be_padded(self, items: list[Any], dim: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            pad_collate(items, dim=dim)

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"multiple_of": 0}, ValueError, "multiple_of must be at least 1, got 0"),
            ({"multiple_of": 1.5}, TypeError, "multiple_of must be an int, not float"),
            ({"dim": None}, TypeError, "dim must be an int, not NoneType"),
        ],
    )
    def test_options_are_checked(
        self, options: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            pad_collate([ones(1)], **options)
