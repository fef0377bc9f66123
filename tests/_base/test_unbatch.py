"""`unbatch`: the outputs of a batch, back to one an item."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from aiopar._base.collate import becomes_tensor, check_batched, collate, holds, unbatch
from aiopar._base.tree import children, map_tensors, unzip
from aiopar.errors import OutputMismatch
from tests.sample_trees import Frozen, MaskedLMOutput, Pair, batches, equal, trees

ones, zeros = torch.ones, torch.zeros


def _has_leaf(node: Any) -> bool:
    parts = children(node)
    return True if parts is None else any(map(_has_leaf, parts[1]))


def _changed(number: int, tensor: Tensor) -> Tensor:
    return tensor + number


def _numbers_as_tensors(tree: Any) -> Any:
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64}

    def convert(node: Any) -> list[Any] | None:
        if isinstance(node, Tensor):
            return [node]
        dtype = dtypes.get(type(node))
        return None if dtype is None else [torch.tensor(node, dtype=dtype)]

    return unzip(convert, tree, 1)[0]


@given(trees(batches(batch=2, dim=0)), st.integers(1, 4))
def test_unbatch_is_the_inverse_of_collate(template: Any, count: int) -> None:
    items = [map_tensors(partial(_changed, number), template) for number in range(count)]
    assume(_has_leaf(template))
    batch = collate(items)
    # A list of tensors is where the two cannot agree: as an output it has one entry an item.
    assume(not (isinstance(template, list) and holds(becomes_tensor, template)))
    check_batched(batch, count)
    assert equal(unbatch(batch, count), [_numbers_as_tensors(item) for item in items])


class TestUnbatch:
    def test_pieces_are_views(self) -> None:
        batch = zeros(3, 2)
        for piece in unbatch({"a": batch}, 3):
            piece["a"] += 1
        assert batch.tolist() == [[1, 1]] * 3

    def test_what_is_read_how(self) -> None:
        logits, hidden = torch.arange(2), torch.arange(4).view(2, 2)
        assert equal(unbatch((logits, hidden), 2), [(logits[0], hidden[0]), (logits[1], hidden[1])])
        assert equal(unbatch([logits, hidden], 2), [logits, hidden])
        assert equal(
            unbatch({"levels": [logits, hidden], "name": ["a", "b"], "model": "m"}, 2),
            [
                {"levels": [logits[0], hidden[0]], "name": "a", "model": "m"},
                {"levels": [logits[1], hidden[1]], "name": "b", "model": "m"},
            ],
        )
        assert unbatch({"label": ["a", "b"], "tags": [["x"], []]}, 2) == [
            {"label": "a", "tags": ["x"]},
            {"label": "b", "tags": []},
        ]

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_sizes_never_change_the_meaning(self, count: int) -> None:
        square = torch.arange(count * count).view(count, count)
        rows = [{"boxes": square + i} for i in range(count)]
        assert equal(unbatch(rows, count), rows)
        columns = unbatch(tuple(rows), count)
        assert equal(columns[0], tuple({"boxes": row["boxes"][0]} for row in rows))

    @pytest.mark.parametrize(
        "outputs",
        [
            ["a", "b"],
            ("a", "b"),
            [None, 1],
            (0.5, None),
            [[], [1]],
            ({}, {}),
            [np.ones(3), np.ones(2)],
        ],
        ids=str,
    )
    def test_one_output_an_item(self, outputs: Any) -> None:
        check_batched(outputs, 2)
        assert all(a is b for a, b in zip(unbatch(outputs, 2), outputs, strict=True))

    def test_arrays_are_taken_apart(self) -> None:
        scores, labels = np.arange(4).reshape(2, 2), np.array(["cat", "dog"])
        first, second = unbatch((scores, labels), 2)
        assert (first[0].tolist(), first[1], second[0].tolist(), second[1]) == (
            [0, 1],
            "cat",
            [2, 3],
            "dog",
        )

    def test_results_of_torch_keep_their_type(self) -> None:
        found = unbatch(torch.max(torch.tensor([[1, 2], [4, 3]]), dim=1), 2)
        assert [(each.values.item(), each.indices.item()) for each in found] == [(2, 1), (4, 0)]

    @pytest.mark.parametrize(
        ("outputs", "count", "message"),
        [
            (ones(3, 2), 4, r"3 outputs for a batch of 4 items: output is a Tensor .*\(3, 2\)"),
            (ones(1), 4, "1 output for a batch of 4 items: "),
            (ones(2), 1, "2 outputs for a batch of 1 item: "),
            (torch.tensor(1.0), 1, r"no batch for a batch of 1 item: output is .*shape \(\)"),
            (["a"] * 3, 4, "3 outputs for a batch of 4 items: output is a list of 3"),
            ([ones(4), ones(4)], 4, "2 outputs for a batch of 4 items: output is a list of 2"),
            (("a", "b", "c"), 4, "3 outputs for a batch of 4 items: output is a tuple of 3"),
            ((ones(4), ones(5)), 4, r"5 outputs for a batch of 4 items: output\[1\] is a Tensor"),
            ((ones(4), np.ones(5)), 4, r"5 outputs .*: output\[1\] is a ndarray"),
            (np.array(4), 4, r"no batch .*: output is a ndarray of shape \(\)"),
            ({"x": ones(4), "tags": ["a"]}, 4, r"1 output for .*: output\['tags'\] is a list of 1"),
            (
                MaskedLMOutput(torch.tensor(1.0), ones(4)),
                4,
                r"no batch .*: output\.loss is a Tensor",
            ),
            (
                Frozen(value=Pair(ones(4), [ones(3)])),
                4,
                r"3 outputs .*: output\.value\.right\[0\] is",
            ),
            (pack_sequence([ones(4)]), 4, "no batch for .*: output is a PackedSequence"),
            ("abcd", 4, "no batch for a batch of 4 items: output is a str"),
            (None, 4, "no batch for a batch of 4 items: output is a NoneType"),
            ({"status": "ok"}, 4, r"no batch for .*: output is a dict of \['status'\]"),
            (collate([{}, {}]), 2, "no batch for a batch of 2 items: output is a dict of 0"),
            (frozenset("abcd"), 4, "no batch for .*: output is a frozenset"),
        ],
    )
    def test_outputs_that_do_not_match(self, outputs: Any, count: int, message: str) -> None:
        for function in (unbatch, check_batched):
            with pytest.raises(OutputMismatch, match=f"the function returned {message}"):
                function(outputs, count)
