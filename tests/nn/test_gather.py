"""`gather`: how outputs of replicas are joined."""

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from ..sample_trees import Boxes, MaskedLMOutput, Sample, equal
from .waiting import gather


def test_tensors_are_concatenated_along_dim() -> None:
    outputs = [torch.zeros(2, 1), torch.ones(2, 2)]
    assert gather(outputs, "cpu", 1).tolist() == [[0, 1, 1]] * 2
    assert gather(outputs, "cpu", -1).tolist() == [[0, 1, 1]] * 2


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), -1])
def test_output_device(device: Any) -> None:
    assert gather([torch.zeros(1)] * 2, device).device == torch.device("cpu")
    assert gather([torch.zeros(1), torch.zeros(2)], "meta").device.type == "meta"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_scalars_become_a_vector(count: int, dim: int) -> None:
    assert gather([torch.tensor(1.0)] * count, "cpu", dim).tolist() == [1.0] * count


def test_one_replica_is_not_copied() -> None:
    x = torch.zeros(2)
    assert gather([[x]], "cpu")[0] is x


def test_dicts_of_another_order_are_matched_by_key() -> None:
    joined = gather([OrderedDict(a=torch.zeros(1), b=1), OrderedDict(b=1, a=torch.ones(1))], "cpu")
    assert equal(joined, OrderedDict(a=torch.tensor([0.0, 1.0]), b=1))


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.5, "text", b"x", frozenset("a"), np.float64(2.0), math.inf, object()]
)
def test_equal_values_become_one(value: Any) -> None:
    assert gather([value, value, value], "cpu") is value
    joined = gather([Boxes(torch.zeros(1), value)] * 2, "cpu")
    assert joined.label is value


def test_equal_but_distinct_values_become_one() -> None:
    assert gather([{1, 2}, {2, 1}], "cpu") == {1, 2}
    assert gather([np.float32(2), np.float32(2)], "cpu") == 2
    assert math.isnan(gather([float("nan"), float("nan")], "cpu"))


@pytest.mark.parametrize(
    "values", [[1, 2], [1, 1, 2], [True, 1], [1, 1.0], ["a", "b"], [None, 1], [0.0, float("nan")]]
)
def test_other_values_become_a_list(values: list[Any]) -> None:
    joined = gather(values, "cpu")
    assert [(type(v), repr(v)) for v in joined] == [(type(v), repr(v)) for v in values]


def test_values_that_cannot_be_compared_become_a_list() -> None:
    class Stubborn:
        __hash__ = None  # type: ignore[assignment]  # as any class with __eq__

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("do not compare me")

    for values in ([np.ones(2), np.ones(2)], [np.ones(1), np.ones(1)], [Stubborn(), Stubborn()]):
        joined = gather(values, "cpu")
        assert all(a is b for a, b in zip(joined, values, strict=True))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "outputs is empty"),
        (
            [{"a": 1}, {"b": 1}],
            r"at output: replica 0 returned a dict of \['a'\], replica 1 returned",
        ),
        ([{"a": 1}, {"a": 1, "b": 2}], r"replica 1 returned a dict of \['a', 'b'\]"),
        ([([1],), ([1, 2],)], r"output\[0\]: .* a list of 1, replica 1 .* a list of 2"),
        ([MaskedLMOutput(logits=1), MaskedLMOutput(loss=1)], r"\['logits'\].*\['loss'\]"),
        ([Sample(torch.zeros(1)), Sample(None)], r"output\.image: .* a Tensor .* a NoneType"),
        ([[1], (1,)], r"at output: .* a list of 1, replica 1 .* a tuple of 1"),
        ([3, torch.zeros(1)], r"at output: .* an int, replica 1 .* a Tensor"),
        ([3, [3]], r"at output: .* an int, replica 1 .* a list of 1"),
        ([{"x": torch.zeros(2)}] * 2, r"dim 1 is out of range for output\['x'\] of shape \(2,\)"),
    ],
)
def test_outputs_that_disagree(outputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather(outputs, "cpu", 1)


def test_an_output_that_contains_itself_is_refused() -> None:
    output: list[Any] = []
    output.append(output)
    with pytest.raises(ValueError, match="contains itself"):
        gather([output, output], "cpu")


def test_shapes_that_disagree_raise_torchs_error_with_a_note() -> None:
    outputs = [{"x": torch.zeros(1, 2)}, {"x": torch.zeros(1, 3)}]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match") as caught:
        gather(outputs, "cpu")
    assert caught.value.__notes__ == [
        "while gathering output['x'] of the replicas: (1, 2) torch.float32, (1, 3) torch.float32"
    ]


def test_dtypes_are_promoted_as_by_cat() -> None:
    assert gather([torch.zeros(1), torch.zeros(1).double()], "cpu").dtype == torch.float64


def test_bad_types() -> None:
    with pytest.raises(TypeError, match="one entry per replica, not Tensor"):
        gather(torch.zeros(2), "cpu")
    with pytest.raises(TypeError, match="dim must be an int"):
        gather([1], "cpu", "0")
    with pytest.raises(TypeError, match="device"):
        gather([1], None)
    with pytest.raises(ValueError, match="device"):
        gather([1], "no such device")
    packed = pack_sequence([torch.ones(1)])
    with pytest.raises(TypeError, match=r"cannot gather output\[0\], a PackedSequence"):
        gather([(packed,), (packed,)], "cpu")
