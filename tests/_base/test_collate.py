"""`collate`, `pad_collate` and `unbatch`: items to a batch, and a batch to outputs."""

import subprocess
import sys
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from aiopar._base.collate import becomes_tensor, check_batched, collate, holds, pad_collate, unbatch
from aiopar._base.tree import children, map_tensors, unzip
from aiopar.errors import OutputMismatch
from tests.sample_trees import (
    CONTAINERS,
    Boxes,
    Cache,
    Frames,
    Frozen,
    MaskedLMOutput,
    Named,
    Pair,
    Sample,
    batches,
    equal,
    trees,
)

ones, zeros = torch.ones, torch.zeros


class Colour(IntEnum):
    RED = 1


class TestCollate:
    @pytest.mark.parametrize("name", CONTAINERS)
    def test_every_container_is_rebuilt_around_stacked_tensors(self, name: str) -> None:
        make = CONTAINERS[name]
        batch = collate([make(zeros(3), [ones(1), "a"]), make(ones(3), [zeros(1), "b"])])
        stacked = torch.tensor([[0.0] * 3, [1.0] * 3])
        assert equal(batch, make(stacked, [torch.tensor([[1.0], [0.0]]), ["a", "b"]]))

    @pytest.mark.parametrize(
        "item",
        [
            ones(2, 3),
            torch.tensor(7),
            {"x": ones(2), "y": {"n": 1, "name": "a"}},
            Boxes(ones(2), 3),
            [ones(2), 0.5],
            np.ones((2, 3), np.float32),
            np.int32(4),
            True,
            3,
            0.1,
        ],
        ids=str,
    )
    def test_the_result_is_that_of_default_collate(self, item: Any) -> None:
        items = [item] * 3
        assert equal(collate(items), default_collate(items))

    @pytest.mark.parametrize("value", ["a", b"a", None, 1j, frozenset("a"), Colour.RED, Colour])
    def test_other_values_become_a_list(self, value: Any) -> None:
        batch = collate([{"v": value, "x": ones(1)}, {"v": None, "x": ones(1)}])
        assert batch["v"] == [value, None]

    def test_lists_without_numbers_stay_whole(self) -> None:
        items = [{"tags": ["a", "b"]}, {"tags": []}, {"tags": ["c"]}]
        assert collate(items) == {"tags": [["a", "b"], [], ["c"]]}
        assert collate([["a"], ["b", "c"]]) == [["a"], ["b", "c"]]

    def test_the_batch_is_not_the_list_of_items(self) -> None:
        items = ["a", "b"]
        assert collate(items) is not items

    def test_dicts_are_matched_by_key(self) -> None:
        batch = collate([{"a": 1, "b": 2.0}, {"b": 3.0, "a": 4}])
        assert equal(batch, {"a": torch.tensor([1, 4]), "b": torch.tensor([2.0, 3.0]).double()})

    def test_arrays_of_any_layout_are_copied(self) -> None:
        array = np.arange(4, dtype=">f4")
        read_only = np.frombuffer(array.tobytes(), dtype=">f4")
        for join in (collate, lambda items: pad_collate(items)[0]):
            batch = join([array[::-1], read_only])
            assert batch.tolist() == [[3, 2, 1, 0], [0, 1, 2, 3]]
            batch.zero_()
        assert array.tolist() == [0, 1, 2, 3]

    def test_arrays_of_strings_stay_arrays(self) -> None:
        words = np.array(["a", "b"])
        assert collate([words, words])[1] is words

    @pytest.mark.parametrize(
        ("first", "second", "message"),
        [
            (ones(2), ones(3), r"item: .*shape \(2,\).*, item 2 .*shape \(3,\)"),
            (ones(2), ones(2).double(), r"item: .*torch.float32 .*, item 2 .*torch.float64"),
            (ones(2), ones(2).long(), r"item: .*torch.float32 .*, item 2 .*torch.int64"),
            (ones(2), ones(2, device="meta"), r"item: .* on cpu, item 2 .* on meta"),
            (ones(2), [1.0, 1.0], r"item: .*Tensor .*, item 2 is a list of 2"),
            (ones(2), None, r"item: .*Tensor .*, item 2 is a NoneType"),
            (None, ones(2), r"item: .*NoneType, item 2 is a Tensor"),
            ("a", 1, r"item: .*a str, item 2 is an int"),
            ("a", {}, r"item: .*a str, item 2 is a dict of 0"),
            (1, 1.5, r"item: .*an int, item 2 is a float"),
            (True, 1, r"item: .*a bool, item 2 is an int"),
            (np.ones(2), np.ones(3), r"item: .*of shape \(2,\), torch.float64 .*, item 2 .*\(3,\)"),
            (np.ones(2), np.ones(2, "f4"), r"item: .*float64 .*, item 2 .*float32"),
            (np.ones(2), ones(2), r"item: .*ndarray .*, item 2 is a Tensor"),
            ((1, 2), (1, 2, 3), r"item: item 0 is a tuple of 2, item 2 is a tuple of 3"),
            ([1], (1,), r"item: item 0 is a list of 1, item 2 is a tuple of 1"),
            ({"a": 1}, {"b": 1}, r"item: .*dict of \['a'\], item 2 is a dict of \['b'\]"),
            ({"a": 1}, {"a": 1, "b": 1}, r"item: .*\['a'\], item 2 is a dict of \['a', 'b'\]"),
            ({"a": [ones(2)]}, {"a": [ones(3)]}, r"item\['a'\]\[0\]: .*\(2,\).*\(3,\)"),
            (Sample(ones(2)), Sample(ones(3)), r"item\.image: .*\(2,\).*\(3,\)"),
            (
                MaskedLMOutput(logits=1),
                MaskedLMOutput(loss=1),
                r"item: .*\['logits'\], item 2 is a MaskedLMOutput of \['loss'\]",
            ),
        ],
    )
    def test_items_that_differ_are_refused(self, first: Any, second: Any, message: str) -> None:
        with pytest.raises(ValueError, match=f"items differ at {message}"):
            collate([first, first, second])

    @pytest.mark.parametrize("join", [collate, pad_collate])
    def test_no_items(self, join: Callable[[Any], Any]) -> None:
        with pytest.raises(ValueError, match="items is empty"):
            join([])

    @pytest.mark.parametrize("join", [collate, pad_collate])
    def test_items_must_be_iterable(self, join: Callable[[Any], Any]) -> None:
        with pytest.raises(TypeError, match="items must be an iterable of items, not NoneType"):
            join(None)

    def test_packed_sequences_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"item\['x'\], a PackedSequence"):
            collate([{"x": pack_sequence([ones(2)])}])

    def test_an_error_of_torch_gets_a_note_with_the_place(self) -> None:
        class Full(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func is torch.stack:
                    raise torch.OutOfMemoryError("no room")
                return func(*args, **(kwargs or {}))

        with Full(), pytest.raises(torch.OutOfMemoryError, match="no room") as caught:
            collate([{"x": ones(2)}] * 2)
        assert caught.value.__notes__ == ["while stacking item['x'] of 2 items"]

    def test_ints_beyond_64_bits_are_refused_with_the_place(self) -> None:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            collate([{"n": 1}, {"n": 2**64}])
        assert caught.value.__notes__ == ["while collating item['n'] of 2 items"]

    def test_gradients_flow_through_both(self) -> None:
        items = [ones(2, requires_grad=True), ones(2, requires_grad=True)]
        unbatch(collate(items) * 3, 2)[1].sum().backward()
        assert items[1].grad is not None
        assert items[1].grad.tolist() == [3, 3]


def test_batches_stay_on_their_device(devices: tuple[torch.device, ...]) -> None:
    device = devices[-1]
    items = [torch.arange(2, device=device), torch.arange(3, device=device)]
    padded, mask = pad_collate(items, pad_value=5, multiple_of=4)
    assert (padded.device, mask.device) == (device, device)
    assert padded.tolist() == [[0, 1, 5, 5], [0, 1, 2, 5]]
    assert mask.sum(1).tolist() == [2, 3]
    first, second = unbatch(collate([(item[:2], "x") for item in items]), 2)
    assert (first[0].device, first[0].tolist(), second[1]) == (device, [0, 1], "x")


def test_numpy_is_not_needed() -> None:
    program = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")  # torch warns that NumPy is missing
from aiopar._base.collate import collate, pad_collate, unbatch
import torch
assert unbatch(collate([{"x": torch.ones(2), "n": 1, "s": "a"}]), 1)[0]["s"] == "a"
assert pad_collate([torch.ones(1)])[1].tolist() == [[True]]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@st.composite
def _variable_length(draw: st.DrawFn) -> tuple[list[Tensor], int]:
    """Draw items that differ in size along one dimension, and this dimension."""
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
    def test_the_batch_contains_each_item_and_else_the_pad_value(
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
    def test_items_that_cannot_be_padded_are_refused(
        self, items: list[Any], dim: int, message: str
    ) -> None:
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
    # Not for a list of tensors: as an output it has one entry per item.
    assume(not (isinstance(template, list) and holds(becomes_tensor, template)))
    check_batched(batch, count)
    assert equal(unbatch(batch, count), [_numbers_as_tensors(item) for item in items])


class TestUnbatch:
    def test_outputs_are_views(self) -> None:
        batch = zeros(3, 2)
        for piece in unbatch({"a": batch}, 3):
            piece["a"] += 1
        assert batch.tolist() == [[1, 1]] * 3

    def test_how_each_type_is_read(self) -> None:
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
    def test_sequences_with_one_output_per_item(self, outputs: Any) -> None:
        check_batched(outputs, 2)
        assert all(a is b for a, b in zip(unbatch(outputs, 2), outputs, strict=True))

    def test_a_cache_goes_to_every_item(self) -> None:
        caches = [Cache(), Cache()]
        caches[0].layers[0].update(ones(2, 1))
        assert collate(caches) == caches
        assert unbatch((zeros(2), caches[0]), 2)[1][1] is caches[0]

    def test_a_dataclass_with_its_own_state(self) -> None:
        first, second = unbatch({"frames": Frames(torch.arange(4).view(2, 2))}, 2)
        assert (second["frames"].x.tolist(), second["frames"].batch_size) == ([2, 3], 2)
        named = Named(torch.zeros(2))
        assert unbatch((torch.zeros(2), named), 2)[1][1] is named
        with pytest.raises(OutputMismatch, match=r"3 outputs for a batch of 2.*a Frames"):
            unbatch({"frames": Frames(torch.zeros(3))}, 2)
        assert collate([first, second]) == {"frames": [first["frames"], second["frames"]]}

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_nested_tensors_are_split(self, layout: torch.layout) -> None:
        rows = [torch.ones(2), torch.ones(3)]
        nested = torch.nested.nested_tensor(rows, layout=layout)
        assert [*map(len, unbatch(nested, 2))] == [2, 3]
        assert [len(output["x"]) for output in unbatch({"x": nested}, 2)] == [2, 3]
        with pytest.raises(OutputMismatch, match="2 outputs for a batch of 3"):
            unbatch(nested, 3)

    def test_arrays_are_split(self) -> None:
        scores, labels = np.arange(4).reshape(2, 2), np.array(["cat", "dog"])
        first, second = unbatch((scores, labels), 2)
        assert (first[0].tolist(), first[1], second[0].tolist(), second[1]) == (
            [0, 1],
            "cat",
            [2, 3],
            "dog",
        )

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
    def test_outputs_that_do_not_match_are_refused(
        self, outputs: Any, count: int, message: str
    ) -> None:
        for function in (unbatch, check_batched):
            with pytest.raises(OutputMismatch, match=f"the function returned {message}"):
                function(outputs, count)
