"""`gather`: how outputs of replicas are joined."""

from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import aiopar

from ..sample_trees import (
    Boxes,
    Frames,
    Graph,
    Lines,
    MaskedLMOutput,
    MovingFrames,
    Named,
    Pair,
    Sample,
    Stack,
    equal,
)
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
    assert equal(joined, OrderedDict(a=torch.tensor([0.0, 1.0]), b=[1, 1]))


@pytest.mark.parametrize(
    "values",
    [
        [1, 2],
        [1, 1],
        [1],
        [True, 1],
        ["a", "b"],
        ["a", "a"],
        [None, 1],
        [{1}, {1}],
        [b"x", range(2)],
    ],
)
def test_other_values_become_a_list(values: list[Any]) -> None:
    joined = gather(values, "cpu")
    assert [(type(v), repr(v)) for v in joined] == [(type(v), repr(v)) for v in values]
    inside = gather([Boxes(torch.zeros(1), value) for value in values], "cpu")
    assert all(a is b for a, b in zip(inside.label, values, strict=True))


def test_values_are_not_compared() -> None:
    class Stubborn:
        __hash__ = None  # type: ignore[assignment]  # as any class with __eq__

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("do not compare me")

    for values in ([np.ones(2), np.ones(2)], [Stubborn(), Stubborn()]):
        joined = gather(values, "cpu")
        assert all(a is b for a, b in zip(joined, values, strict=True))


@pytest.mark.parametrize("count", [1, 2])
def test_none_stays_none(count: int) -> None:
    assert gather([None] * count, "cpu") is None
    assert gather([(torch.zeros(1), None)] * count, "cpu")[1] is None


class TestLists:
    """A list of tensors is a container; other lists have one entry per sample."""

    @pytest.mark.parametrize(
        ("outputs", "joined"),
        [
            ([["a", "b"], ["c"]], ["a", "b", "c"]),
            ([["a"]], ["a"]),
            ([[["a"], ["b", "c"]], [[]]], [["a"], ["b", "c"], []]),
            ([[1, 2], [1, 2]], [1, 2, 1, 2]),
            ([[], []], []),
            ([[], ["a"]], ["a"]),
            ([[None], [("a", 1)]], [None, ("a", 1)]),
            ([{"x": ["a"]}, {"x": ["b"]}], {"x": ["a", "b"]}),
        ],
    )
    def test_lists_of_values_are_concatenated(self, outputs: Any, joined: Any) -> None:
        assert gather(outputs, "cpu") == joined

    def test_dicts_and_dataclasses_may_have_tensors_of_different_sizes(self) -> None:
        def detected(count: int) -> dict[str, Any]:
            return {"boxes": torch.full((count, 4), count), "labels": ["cat"] * count}

        joined = gather([[detected(3), detected(0)], [detected(1)]], "meta")
        assert [(found["boxes"].shape, found["labels"]) for found in joined] == [
            ((3, 4), ["cat"] * 3),
            ((0, 4), []),
            ((1, 4), ["cat"]),
        ]
        assert {found["boxes"].device.type for found in joined} == {"meta"}
        joined = gather([[Sample(torch.zeros(2))], [Sample(torch.zeros(3))]], "cpu")
        assert [sample.rows for sample in joined] == [2, 3]

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_lists_of_tensors_are_containers_of_any_length(self, count: int) -> None:
        x = torch.zeros(2)
        assert gather([[x] * count] * 2, "cpu")[0].shape == (4,)
        pairs = gather([[(x, x)] * count, [(x, x)] * count], "cpu")
        assert [left.shape for left, _ in pairs] == [(4,)] * count
        labelled = gather([[x, "a"], [x, "b"]], "cpu")
        assert equal(labelled, [torch.zeros(4), ["a", "b"]])

    def test_tuples_are_containers(self) -> None:
        assert gather([(1, "a"), (2, "a")], "cpu") == ([1, 2], ["a", "a"])


class TestOutputDims:
    def test_an_int_is_for_all(self) -> None:
        outputs = [{"x": torch.zeros(2, 1), "y": (torch.zeros(3, 1), torch.tensor(1.0))}] * 2
        joined = gather(outputs, "cpu", output_dims=1)
        assert joined["x"].shape == (2, 2)
        assert joined["y"][0].shape == (3, 2)
        assert joined["y"][1].shape == (2,)

    @pytest.mark.parametrize(
        ("wrap", "dims"),
        [
            (lambda a, b: (a, (b, b)), (0, (1, 1))),
            (lambda a, b: (a, (b, b)), [0, 1]),
            (lambda a, b: [a, (b, b)], (0, (1, 1))),
            (lambda a, b: Pair(a, [b, b]), (0, 1)),
            (lambda a, b: Pair(a, [b, b]), Pair(0, -1)),
            (lambda a, b: {"a": a, "b": (b, b)}, {"b": 1, "a": 0}),
            (lambda a, b: {"a": a, "b": (b, b)}, {"b": 1}),  # other parts: along `dim`
            (lambda a, b: Sample(a, (b, b)), {"label": (1, 1)}),
            (lambda a, b: Sample(a, (b, b)), Sample(0, 1)),
            (lambda a, b: MaskedLMOutput(logits=a, hidden_states=(b, b)), {"hidden_states": 1}),
            (lambda a, b: Stack([a, (b, b)]), (0, 1)),
            (lambda a, b: ([a], (b, b)), (0, 1)),
        ],
    )
    def test_nested_as_the_output(self, wrap: Any, dims: Any) -> None:
        outputs = [wrap(torch.zeros(n, 1), torch.zeros(2, n)) for n in (2, 3)]
        joined = gather(outputs, "cpu", output_dims=dims)
        assert type(joined) is type(outputs[0])
        whole = wrap(torch.zeros(5, 1), torch.zeros(2, 5))
        assert repr(joined) == repr(whole) or equal([*joined], [*whole])

    def test_an_absent_optional_field(self) -> None:
        outputs = [MaskedLMOutput(logits=torch.zeros(1, 2))] * 2
        assert gather(outputs, "cpu", output_dims={"hidden_states": 1}).logits.shape == (2, 2)

    def test_a_list_of_dicts_as_a_container(self) -> None:
        states = [[{"k": torch.zeros(2, n)}, {"k": torch.ones(2, n)}] for n in (1, 2)]
        joined = gather(states, "cpu", output_dims=[1, {"k": 1}])
        assert [state["k"].shape for state in joined] == [(2, 3), (2, 3)]

    @pytest.mark.parametrize(
        ("output", "dims", "message"),
        [
            (torch.zeros(1), (0, 1), r"output is a Tensor .*, output_dims has a tuple of 2 there"),
            ((torch.zeros(1),), (0, 1), r"output is a tuple of 1, output_dims has a tuple of 2"),
            (
                {"x": torch.zeros(1)},
                {"y": 0},
                r"a dict of \['x'\], output_dims has a dict of \['y'",
            ),
            ((torch.zeros(1), "a"), (0, (0,)), r"output\[1\] is a str, output_dims has a tuple"),
            ([torch.zeros(1)], 1, r"dim 1 is out of range for output\[0\]"),
        ],
    )
    def test_dims_that_do_not_fit(self, output: Any, dims: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            gather([output, output], "cpu", output_dims=dims)

    @pytest.mark.parametrize("dims", ["0", True, 0.5, (0, ("1",)), {"a": 1.0}, {0, 1}])
    def test_dims_that_are_not_ints(self, dims: Any) -> None:
        with pytest.raises(TypeError, match="output_dims must be an int, or ints that are nested"):
            _ = aiopar.gather([1], "cpu", output_dims=dims)
        with pytest.raises(TypeError, match="output_dims must be an int"):
            aiopar.DataParallel(torch.nn.Identity(), ["cpu"], output_dims=dims)


class TestIterables:
    """torch rebuilds an iterable by `type(x)(map(...))`."""

    def test_is_rebuilt_from_joined_items(self) -> None:
        outputs = [Stack([(torch.zeros(n, 1), None), torch.ones(n)]) for n in (2, 1)]
        joined = gather(outputs, "cpu")
        assert type(joined) is Stack
        assert joined.depth == 2
        assert equal([*joined], [(torch.zeros(3, 1), None), torch.ones(3)])
        assert equal([*gather([deque([torch.zeros(1)])] * 2, "cpu")], [torch.zeros(2)])

    @pytest.mark.parametrize(
        "make", [lambda: Stack([]), lambda: Stack(["a"]), lambda: deque([1]), lambda: {"a"}]
    )
    def test_without_tensors_it_is_a_value(self, make: Any) -> None:
        values = [make(), make()]
        assert gather(values, "cpu") == values

    def test_iterables_that_differ(self) -> None:
        for other in Stack([]), Stack([torch.zeros(1)] * 2), torch.zeros(1), ["a"]:
            with pytest.raises(ValueError, match="outputs differ at output"):
                gather([Stack([torch.zeros(1)]), other], "cpu")

    def test_a_class_that_cannot_be_rebuilt_is_a_value(self) -> None:
        class Two(Stack):
            def __init__(self, left: Any, right: Any) -> None:
                super().__init__([left, right])

        for value in Two(torch.zeros(1), torch.zeros(1)), Graph(torch.zeros(1)), Lines(1):
            assert gather([value, value], "cpu") == [value, value]

    def test_the_length_of_a_deque_stays_bounded(self) -> None:
        joined = gather([deque([torch.zeros(1)], maxlen=3)] * 2, "cpu")
        assert (joined.maxlen, joined[0].shape) == (3, (2,))

    def test_a_class_that_keeps_what_it_gets(self) -> None:
        class Kept(Stack):
            def __init__(self, items: Any) -> None:
                self._items = items

        joined = gather([Kept([torch.zeros(1)])] * 2, "cpu")
        assert [len([*joined]) for _ in range(2)] == [1, 1]

    def test_a_class_that_refuses_to_be_iterated(self) -> None:
        class Opaque:
            def __iter__(self) -> Any:
                raise NotImplementedError("not iterable")

        values = [Opaque(), Opaque()]
        assert gather(values, "cpu") == values


@pytest.mark.parametrize("make", [Frames, MovingFrames, Named])
def test_a_dataclass_with_its_own_state_is_a_value(make: Any) -> None:
    outputs = [make(torch.zeros(2)), make(torch.zeros(1))]
    assert [*map(id, gather(outputs, "cpu"))] == [*map(id, outputs)]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "outputs is empty"),
        (
            [{"a": 1}, {"b": 1}],
            r"at output: replica 0 returned a dict of \['a'\], replica 1 returned",
        ),
        ([{"a": 1}, {"a": 1, "b": 2}], r"replica 1 returned a dict of \['a', 'b'\]"),
        ([((1,),), ((1, 2),)], r"output\[0\]: .* a tuple of 1, replica 1 .* a tuple of 2"),
        ([[torch.zeros(1)], []], r"at output: .* a list of 1, .* a list of 0; .* into a dict"),
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


def test_packed_sequences_are_refused() -> None:
    packed = pack_sequence([torch.ones(1)])
    with pytest.raises(TypeError, match=r"cannot gather output\[0\], a PackedSequence"):
        gather([(packed,), (packed,)], "cpu")
