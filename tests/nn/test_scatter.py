"""`scatter` and `scatter_kwargs`: what each device gets."""

import pickle
from collections import UserList
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from pydantic import BaseModel
from torch.nn.utils.rnn import pack_sequence

from aiopar import Replicated, Split

from ..sample_trees import (
    Frames,
    Frozen,
    Graph,
    Lines,
    MovingFrames,
    Named,
    Pair,
    Sample,
    Stack,
    equal,
)
from .waiting import scatter, scatter_kwargs

TWO = ("cpu", "cpu")
T = TypeVar("T")


@given(batch=st.integers(0, 20), count=st.integers(1, 6))
def test_pieces_are_those_of_torch_chunk(batch: int, count: int) -> None:
    x = torch.arange(batch * 2).view(batch, 2)
    pieces = scatter(x, ["cpu"] * count)
    assert [p.tolist() for p in pieces] == [c.tolist() for c in x.chunk(count)]


def test_on_the_same_device_only_the_first_piece_is_a_view_in_grad_mode() -> None:
    x = torch.zeros(4)
    with torch.no_grad():
        scatter(x, TWO)[1].add_(1)
    assert x.tolist() == [0, 0, 1, 1]
    first, second = scatter(x, TWO)
    first.add_(2)
    second.add_(2)
    assert x.tolist() == [2, 2, 1, 1]
    assert second._version == 1
    assert scatter(x, ["cpu"])[0] is x


def test_pieces_can_be_edited_in_place_under_autograd() -> None:
    x = torch.ones(4, requires_grad=True)
    first, second = scatter(x * 1, TWO)
    first.mul_(3)
    (first.sum() + second.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3, 1, 1]


def test_tensors_may_differ_in_number_of_dimensions() -> None:
    pieces = scatter((torch.zeros(3, 4), torch.zeros(4)), TWO, dim=-1)
    assert [[tuple(t.shape) for t in piece] for piece in pieces] == [[(3, 2), (2,)]] * 2


def test_values_are_shared_but_lists_and_dicts_are_copied() -> None:
    leaf, config = object(), Frozen(value=["a"])
    first, second = scatter((torch.zeros(2), leaf, config, {"options": []}), TWO)
    assert first[1] is second[1] is leaf
    assert first[2] is second[2] is config
    first[3]["options"].append(1)
    assert second[3] == {"options": []}


class TestNothingToSplit:
    @pytest.mark.parametrize(
        ("inputs", "found"),
        [
            ("text", "inputs is a str"),
            (torch.tensor(1), r"inputs is a Tensor of shape \(\)"),
            ((1, None), r"inputs\[0\] is an int"),
            ({"a": ["b"]}, r"inputs\['a'\]\[0\] is a str"),
            ((None,), r"inputs\[0\] is a NoneType"),
            (([],), r"inputs\[0\] is a list of 0"),
            ((np.zeros(4),), r"inputs\[0\] is a ndarray of shape \(4,\)"),
            ([SimpleNamespace(x=torch.zeros(4))], r"inputs\[0\] is a SimpleNamespace"),
            ((Replicated(torch.zeros(4)), ["a"]), r"inputs\[1\]\[0\] is a str"),
            (Stack(["a"]), "inputs is a Stack"),
        ],
    )
    def test_several_devices_raise(self, inputs: Any, found: str) -> None:
        message = rf"nothing can be split over 2 replicas: .*{found}.*Split.*Replicated"
        with pytest.raises(ValueError, match=message + ".*parallel_apply"):
            scatter(inputs, TWO)
        with pytest.raises(ValueError, match=message):
            scatter(inputs, TWO, chunk_sizes=[1, 2])
        assert len(scatter(inputs, ["cpu"])) == 1

    @pytest.mark.parametrize("inputs", [(), [], {}])
    def test_without_inputs_every_device_gets_all(self, inputs: Any) -> None:
        assert scatter(inputs, TWO) == [inputs, inputs]


class TestSplit:
    def test_another_dimension(self) -> None:
        x, h = torch.arange(5), torch.arange(10).view(2, 5)
        pieces = scatter((x, Split(h, dim=1), {"h": [Split(h, -1)]}), TWO)
        assert [piece[1].tolist() for piece in pieces] == [[[0, 1, 2], [5, 6, 7]], [[3, 4], [8, 9]]]
        assert torch.equal(pieces[1][2]["h"][0], pieces[1][1])

    def test_the_dim_is_that_of_the_marked_value_only(self) -> None:
        x, h = torch.zeros(2, 5), torch.zeros(4, 2)
        assert [piece[0].shape for piece in scatter((Split(x, 1), torch.zeros(5)), TWO)] == [
            (2, 3),
            (2, 2),
        ]
        assert scatter((Split(h), torch.zeros(3, 4)), TWO, dim=1)[0][0].shape == (2, 2)

    @pytest.mark.parametrize("wrap", [tuple, list, lambda both: dict(zip("hc", both, strict=True))])
    def test_each_tensor_of_a_container(self, wrap: Any) -> None:
        h, c = torch.zeros(2, 4, 3), torch.zeros(1, 4, 5)
        expected = wrap((h[:, :2], c[:, :2]))
        assert all(equal(piece, expected) for piece in scatter(Split(wrap((h, c)), dim=1), TWO))
        pair = scatter((Split(Pair(h[0], c[0])), torch.zeros(4)), TWO)[1][0]
        assert (type(pair), pair.left.shape, pair.right.shape) == (Pair, (2, 3), (2, 5))

    @pytest.mark.parametrize(
        "value",
        [["a", "b", "c"], ("a", "b", "c"), range(3), [["a"], [], ["b", "c"]], UserList("abc")],
    )
    def test_a_sequence_by_its_length(self, value: Any) -> None:
        pieces = scatter((Split(value), torch.zeros(3)), TWO)
        assert [piece[0] for piece in pieces] == [value[:2], value[2:]]
        assert [type(piece[0]) for piece in pieces] == [type(value)] * 2
        args, kwargs = scatter_kwargs((Split(value),), {"names": Split(value)}, TWO)
        assert [named["names"] for named in kwargs] == [piece for (piece,) in args]
        assert scatter(Split(value), ["cpu"]) == [value]

    def test_entries_may_have_tensors_of_different_sizes(self) -> None:
        images = [{"image": torch.zeros(n), "of": Replicated(torch.ones(7))} for n in (1, 2, 3)]
        first, second = scatter(Split(images), ["cpu", "meta"])
        assert [image["image"].shape for image in first] == [(1,), (2,)]
        assert second[0]["image"].device.type == second[0]["of"].device.type == "meta"
        pieces = scatter((Split([torch.zeros(1), torch.zeros(2)]), torch.zeros(2)), TWO)
        assert [piece[0][0].shape for piece in pieces] == [(1,), (2,)]

    def test_arrays(self) -> None:
        array = np.arange(6).reshape(2, 3)
        rows = scatter(Split(array), TWO)
        assert [piece.tolist() for piece in rows] == [[[0, 1, 2]], [[3, 4, 5]]]
        columns = scatter((Split(array, -1), torch.zeros(3)), TWO)
        assert [piece[0].tolist() for piece in columns] == [[[0, 1], [3, 4]], [[2], [5]]]
        assert all(np.shares_memory(array, piece) for piece in rows)

    def test_chunk_sizes(self) -> None:
        assert scatter(Split(["a", "b", "c"]), TWO, chunk_sizes=[0, 3]) == [[], ["a", "b", "c"]]
        with pytest.raises(ValueError, match="add up to 2, expected 3: the size of inputs along"):
            scatter(Split([1, 2, 3]), TWO, chunk_sizes=[1, 1])

    def test_inside_a_replicated_value_it_goes_whole(self) -> None:
        pieces = scatter((torch.zeros(2), Replicated([Split(["a", "b", "c"])])), TWO)
        assert [piece[1] for piece in pieces] == [[["a", "b", "c"]]] * 2

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ((torch.zeros(2), Split(["a"])), r"dim 0: inputs\[0\] has 2, inputs\[1\] has 1; mark"),
            (
                (torch.zeros(2), Split(torch.zeros(2, 3), 1)),
                r"dim 0: inputs\[0\] has 2, inputs\[1\] has 3 along dim 1; .*Replicated.*Split",
            ),
            ((torch.zeros(2), torch.zeros(3, 2)), r"another batch dimension as aiopar\.Split"),
            (Split(torch.zeros(2), 1), r"dim 1 is out of range for inputs of shape \(2,\)"),
            (Split(np.zeros(2), 1), r"dim 1 is out of range for inputs of shape \(2,\)"),
            (Split(np.array(1)), r"dim 0 is out of range for inputs of shape \(\)"),
            (
                [Split(torch.tensor(1))],
                r"inputs\[0\], a Tensor of shape \(\).*no tensor with a dim",
            ),
            ([Split({"a": ["b"]})], r"inputs\[0\], a dict of \['a'\].*no tensor with a dim"),
            ([Split(("a", "b"), 1)], r"inputs\[0\], a tuple of 2.*no tensor with a dim"),
        ],
    )
    def test_values_that_do_not_fit(self, inputs: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            scatter(inputs, TWO)

    @pytest.mark.parametrize("value", ["text", b"x", 1, None, object(), {"a"}])
    def test_values_that_cannot_be_split(self, value: Any) -> None:
        with pytest.raises(TypeError, match="Split takes a tensor, an array, or a sequence"):
            Split(value)

    @pytest.mark.parametrize("mark", [Split[list[str]](["x"]), Replicated[list[str]](["x"])])
    def test_marks_are_frozen_generic_values(self, mark: Any) -> None:
        with pytest.raises(FrozenInstanceError):
            mark.value = ["y"]
        assert pickle.loads(pickle.dumps(mark)).value == ["x"]
        with pytest.raises(TypeError, match="dim must be an int, not float"):
            Split([1], 0.5)  # type: ignore[arg-type]  # the test


def test_iterables_that_torch_can_rebuild_are_split() -> None:
    pieces = scatter({"stack": Stack([torch.arange(3), (torch.arange(3), "a")])}, TWO)
    (first, (second, name)) = pieces[1]["stack"]
    assert (first.tolist(), second.tolist(), name) == ([2], [2], "a")
    with pytest.raises(
        ValueError, match=r"differ in size along dim 0: inputs\[0\] has 3, inputs\[1\]"
    ):
        scatter(Stack([torch.arange(3), torch.arange(2)]), TWO)


class Model(BaseModel, arbitrary_types_allowed=True):
    x: torch.Tensor


@pytest.mark.parametrize("value", [Graph(torch.arange(4)), Lines(3), Model(x=torch.arange(4))])
def test_other_iterables_go_whole(value: Any) -> None:
    for inputs in [value], Replicated(value), {"of": value}:
        pieces = scatter((torch.arange(4), inputs), TWO)
        assert all(next(_leaves(whole)) is value for _, whole in pieces)
        assert next(_leaves(scatter((torch.arange(4), inputs), ["cpu"])[0][1])) is value
    with pytest.raises(ValueError, match=r"nothing can be split .*inputs is a"):
        scatter(value, TWO)
    with pytest.raises(ValueError, match=r"cannot split inputs\[1\], a .*marked as a Split"):
        scatter((torch.arange(4), Split(value)), TWO)


def _leaves(tree: Any) -> Iterator[Any]:
    return iter(tree.values() if isinstance(tree, dict) else tree if type(tree) is list else [tree])


@pytest.mark.parametrize("make", [Frames, MovingFrames])
def test_a_dataclass_with_its_own_state_is_indexed(make: Any) -> None:
    frames = make(torch.arange(3), ("a", "b"))
    for inputs in (frames, torch.arange(3)), (Split(frames), torch.arange(3)), (frames,):
        pieces = [piece[0] for piece in scatter(inputs, TWO)]
        assert [(type(p), p.x.tolist(), p.batch_size) for p in pieces] == [
            (make, [0, 1], 2),
            (make, [2], 1),
        ]
    assert scatter((torch.zeros(2, 5), frames), TWO, dim=1)[1][1].batch_size == 3
    assert scatter((torch.arange(2), Replicated(frames)), TWO)[1][1].batch_size == 3
    [(piece,)] = scatter((frames,), ["meta"])
    assert (piece.x.device.type, piece.batch_size, frames.x.device.type) == ("meta", 3, "cpu")
    with pytest.raises(ValueError, match=r"inputs\[0\] has 3, inputs\[1\] has 4"):
        scatter((frames, torch.arange(4)), TWO)


@dataclass
class Of(Generic[T]):
    x: T


def test_the_type_of_a_generic_dataclass_is_no_state() -> None:
    pieces = scatter(Of[torch.Tensor](torch.arange(3)), TWO)
    assert [piece.x.tolist() for piece in pieces] == [[0, 1], [2]]


def test_a_dataclass_with_its_own_state_that_cannot_be_indexed_goes_whole() -> None:
    named = Named(torch.arange(4))
    assert [piece[1] is named for piece in scatter((torch.arange(2), named), TWO)] == [True, True]
    with pytest.raises(ValueError, match="nothing can be split"):
        scatter(named, TWO)
    with pytest.raises(ValueError, match="cannot split"):
        scatter((torch.arange(2), Split(named)), TWO)


class TestKwargs:
    def test_one_kind_of_arguments_missing(self) -> None:
        x = torch.arange(2)
        assert scatter_kwargs((x,), None, TWO)[1] == ({}, {})
        assert scatter_kwargs((), {"x": x}, TWO)[0] == ((), ())
        assert scatter_kwargs((), None, TWO) == ((), ())

    def test_tensors_in_one_kind_decide_the_count_for_both(self) -> None:
        inputs, kwargs = scatter_kwargs(("shared",), {"x": torch.arange(1)}, TWO)
        assert inputs == (("shared",),)
        assert len(kwargs) == 1


class TestReplicated:
    def test_goes_whole_to_every_replica(self) -> None:
        mask = torch.ones(1, 5)
        tree = Sample(torch.arange(4), Replicated({"mask": mask, "name": "causal"}))
        pieces = scatter(tree, ["cpu", "meta"])
        assert pieces[0].label["mask"] is mask
        assert [p.label["mask"].shape for p in pieces] == [(1, 5), (1, 5)]
        assert [p.label["mask"].device.type for p in pieces] == ["cpu", "meta"]
        assert pieces[1].label["name"] == "causal"

    def test_values_that_cannot_be_split(self) -> None:
        packed = pack_sequence([torch.ones(2), torch.ones(1)])
        sparse = torch.eye(3).to_sparse()
        pieces = scatter((torch.zeros(2), Replicated((packed, sparse))), TWO)
        assert torch.equal(pieces[1][1][0].batch_sizes, packed.batch_sizes)
        assert pieces[1][1][1] is sparse

    def test_gradients_add_up(self) -> None:
        table = torch.ones(2, requires_grad=True)
        pieces = scatter((torch.tensor([3.0, 4.0]), Replicated(table)), TWO)
        sum((x * whole).sum() for x, whole in pieces).backward()
        assert table.grad is not None
        assert table.grad.tolist() == [7, 7]


class TestBadArguments:
    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            (
                (torch.zeros(4), [torch.zeros(3)]),
                r"dim 0: inputs\[0\] has 4, inputs\[1\]\[0\] has 3",
            ),
            ({"x": torch.zeros(2), "mask": torch.zeros(1)}, r"inputs\['mask'\] has 1.*Replicated"),
            (Sample(torch.zeros(2), torch.zeros(4)), r"inputs\.image has 2, inputs\.label has 4"),
        ],
    )
    def test_sizes_that_disagree(self, inputs: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            scatter(inputs, TWO)

    def test_sizes_that_disagree_between_inputs_and_kwargs(self) -> None:
        with pytest.raises(ValueError, match=r"inputs\[0\] has 2, kwargs\['y'\]\['z'\] has 3"):
            scatter_kwargs((torch.zeros(2),), {"y": {"z": torch.zeros(3)}}, TWO)

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ([4], "1 chunk_sizes were given for 2 devices"),
            ([5, -1], "must not be negative"),
            ([1, 2], r"add up to 3, expected 4: the size of inputs"),
        ],
    )
    def test_chunk_sizes(self, sizes: list[int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            scatter(torch.zeros(4), TWO, chunk_sizes=sizes)

    @pytest.mark.parametrize("sizes", [[2.0, 2.0], 4])
    def test_chunk_sizes_that_are_not_ints(self, sizes: Any) -> None:
        with pytest.raises(TypeError, match="chunk_sizes must be a sequence of ints"):
            scatter(torch.zeros(4), TWO, chunk_sizes=sizes)

    def test_tensors_that_cannot_be_split(self) -> None:
        ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
        for inputs, kind in (
            ([torch.eye(2).to_sparse()], "sparse_coo"),
            ([ragged], "nested"),
            ([pack_sequence([torch.ones(1)])], "PackedSequence"),
        ):
            with pytest.raises(TypeError, match=rf"cannot split inputs\[0\], a .*{kind}"):
                scatter(inputs, TWO)


def test_chunk_sizes_decide_and_zero_is_an_empty_piece() -> None:
    pieces = scatter(torch.arange(4), ["cpu"] * 3, chunk_sizes=[1, 0, 3])
    assert [piece.tolist() for piece in pieces] == [[0], [], [1, 2, 3]]
