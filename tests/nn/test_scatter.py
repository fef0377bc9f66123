"""`scatter` and `scatter_kwargs`: what each device gets."""

import pickle
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.utils.rnn import pack_sequence

from aiopar import Replicated

from ..sample_trees import Frozen, Sample
from .waiting import scatter, scatter_kwargs

TWO = ("cpu", "cpu")


@given(batch=st.integers(0, 20), count=st.integers(1, 6))
def test_pieces_are_those_of_torch_chunk(batch: int, count: int) -> None:
    x = torch.arange(batch * 2).view(batch, 2)
    pieces = scatter(x, ["cpu"] * count)
    assert [p.tolist() for p in pieces] == [c.tolist() for c in x.chunk(count)]


def test_pieces_are_on_their_devices() -> None:
    pieces = scatter((torch.arange(3), torch.tensor(1)), ["meta", torch.device("cpu")])
    assert [[t.device.type for t in piece] for piece in pieces] == [["meta"] * 2, ["cpu"] * 2]
    assert [piece[0].shape[0] for piece in pieces] == [2, 1]


def test_batch_smaller_than_the_devices_uses_fewer() -> None:
    table = Replicated(torch.zeros(7))
    pieces = scatter((torch.arange(2), "shared", table), ["cpu"] * 4)
    assert [(p[0].tolist(), p[1], len(p[2])) for p in pieces] == [
        ([0], "shared", 7),
        ([1], "shared", 7),
    ]


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


def test_scalars_are_shared() -> None:
    scale = torch.tensor(2.0)
    pieces = scatter((scale, torch.zeros(2)), TWO)
    assert all(piece[0] is scale for piece in pieces)


@pytest.mark.parametrize("inputs", ["text", (), [], {}, (1, None), {"a": [2]}, torch.tensor(1)])
def test_without_a_tensor_to_split_every_device_gets_all(inputs: Any) -> None:
    assert scatter(inputs, TWO) == [inputs, inputs]
    assert scatter(inputs, TWO, chunk_sizes=[1, 2]) == [inputs, inputs]


class TestKwargs:
    def test_shapes_of_the_result(self) -> None:
        x, mask = torch.arange(3), torch.arange(3) > 0
        inputs, kwargs = scatter_kwargs((x,), {"mask": mask, "flag": True}, TWO)
        assert [args[0].tolist() for args in inputs] == [[0, 1], [2]]
        assert [named["mask"].tolist() for named in kwargs] == [[False, True], [True]]
        assert [named["flag"] for named in kwargs] == [True, True]

    def test_one_kind_of_arguments_missing(self) -> None:
        x = torch.arange(2)
        assert scatter_kwargs((x,), None, TWO)[1] == ({}, {})
        assert scatter_kwargs((), {"x": x}, TWO)[0] == ((), ())

    def test_tensors_in_one_kind_decide_the_count_for_both(self) -> None:
        inputs, kwargs = scatter_kwargs(("shared",), {"x": torch.arange(1)}, TWO)
        assert inputs == (("shared",),)
        assert len(kwargs) == 1

    def test_no_arguments(self) -> None:
        assert scatter_kwargs((), {}, TWO) == ((), ())
        assert scatter_kwargs((), None, TWO) == ((), ())

    def test_inputs_that_are_not_a_tuple(self) -> None:
        with pytest.raises(TypeError, match="tuple of arguments, not Tensor"):
            scatter_kwargs(torch.zeros(2), None, TWO)


class TestReplicated:
    def test_goes_whole_to_every_replica(self) -> None:
        mask = torch.ones(1, 5)
        tree = Sample(torch.arange(4), Replicated({"mask": mask, "name": "causal"}))
        pieces = scatter(tree, ["cpu", "meta"])
        assert pieces[0].label["mask"] is mask
        assert [p.label["mask"].shape for p in pieces] == [(1, 5), (1, 5)]
        assert [p.label["mask"].device.type for p in pieces] == ["cpu", "meta"]
        assert pieces[1].label["name"] == "causal"

    def test_is_unwrapped_if_nothing_is_split(self) -> None:
        x = torch.ones(3)
        pieces = scatter([Replicated(x), Replicated("a")], TWO)
        assert all(piece[0] is x and piece[1] == "a" for piece in pieces)

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

    def test_is_a_frozen_generic_value(self) -> None:
        mark = Replicated[str]("x")
        with pytest.raises(FrozenInstanceError):
            mark.value = "y"  # type: ignore[misc]  # the test
        assert pickle.loads(pickle.dumps(mark)).value == "x"


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

    @pytest.mark.parametrize("dim", [1, -2])
    def test_dim_out_of_range(self, dim: int) -> None:
        with pytest.raises(ValueError, match=r"inputs\[1\] of shape \(2,\): expected \[-1, 0\]"):
            scatter((torch.zeros(2, 2), torch.zeros(2)), TWO, dim)

    def test_dim_that_is_not_an_int(self) -> None:
        with pytest.raises(TypeError, match="dim must be an int, not bool"):
            scatter((torch.zeros(2, 2),), TWO, dim=True)
        with pytest.raises(TypeError, match="dim must be an int, not float"):
            scatter("no tensor", TWO, 0.0)

    @pytest.mark.parametrize("devices", [[], ["no such device"], [1_000_000]])
    def test_devices(self, devices: Sequence[Any]) -> None:
        with pytest.raises(ValueError, match="device"):
            scatter(torch.zeros(2), devices)
        with pytest.raises(ValueError, match="device"):
            scatter_kwargs((), None, devices)

    def test_device_type(self) -> None:
        with pytest.raises(TypeError, match="device"):
            scatter(torch.zeros(2), [None])

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
