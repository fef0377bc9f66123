"""`aiopar._collate`: items to a batch."""

import subprocess
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from aiopar._base.collate import collate, pad_collate, unbatch
from tests.sample_trees import CONTAINERS, Boxes, MaskedLMOutput, Sample, equal

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
    def test_is_what_torch_makes_of_it(self, item: Any) -> None:
        items = [item] * 3
        assert equal(collate(items), default_collate(items))

    @pytest.mark.parametrize("value", ["a", b"a", None, 1j, frozenset("a"), Colour.RED, Colour])
    def test_other_values_are_a_list_of_one_an_item(self, value: Any) -> None:
        batch = collate([{"v": value, "x": ones(1)}, {"v": None, "x": ones(1)}])
        assert batch["v"] == [value, None]

    def test_lists_without_numbers_stay_whole(self) -> None:
        items = [{"tags": ["a", "b"]}, {"tags": []}, {"tags": ["c"]}]
        assert collate(items) == {"tags": [["a", "b"], [], ["c"]]}
        assert collate([["a"], ["b", "c"]]) == [["a"], ["b", "c"]]

    def test_the_callers_list_is_not_part_of_the_batch(self) -> None:
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
            (np.ones(2), np.ones(3), r"item: .*ndarray of shape \(2,\), float64, item 2 .*\(3,\)"),
            (np.ones(2), np.ones(2, "f4"), r"item: .*float64, item 2 .*float32"),
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
    def test_no_iterable(self, join: Callable[[Any], Any]) -> None:
        with pytest.raises(TypeError, match="items must be an iterable of items, not NoneType"):
            join(None)

    def test_packed_sequences_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"item\['x'\], a PackedSequence"):
            collate([{"x": pack_sequence([ones(2)])}])

    def test_what_torch_refuses_is_raised_with_its_place(self) -> None:
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

    def test_numbers_beyond_64_bits_are_refused_with_their_place(self) -> None:
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


def test_works_where_numpy_is_not_installed() -> None:
    program = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")  # torch's, that it is not there
from aiopar._base.collate import collate, pad_collate, unbatch
import torch
assert unbatch(collate([{"x": torch.ones(2), "n": 1, "s": "a"}]), 1)[0]["s"] == "a"
assert pad_collate([torch.ones(1)])[1].tolist() == [[True]]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
