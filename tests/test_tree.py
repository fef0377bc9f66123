"""`aiopar._tree`: every container comes back as what it was, with other tensors."""

import dataclasses
import gc
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from aiopar._tree import children, first_tensor, format_path, map_tensors, tensors, unzip

from .sample_trees import (
    CONTAINERS,
    EMPTY,
    SHARED,
    AttrDict,
    Boxes,
    Derived,
    Encoding,
    Frozen,
    MaskedLMOutput,
    NamedList,
    Pair,
    Sample,
    batches,
    equal,
    trees,
)


@pytest.mark.parametrize("name", CONTAINERS)
def test_map_rebuilds_the_same_type_with_new_tensors(name: str) -> None:
    make = CONTAINERS[name]
    tree = make(torch.ones(2), [torch.zeros(1), "text"])
    assert equal(
        map_tensors(lambda t: t + 1, tree), make(torch.full((2,), 2.0), [torch.ones(1), "text"])
    )
    assert equal(tree, make(torch.ones(2), [torch.zeros(1), "text"])), "the original is untouched"


@given(trees(batches(batch=2, dim=0)))
def test_map_with_identity_gives_an_equal_tree(tree: Any) -> None:
    assert equal(map_tensors(lambda t: t, tree), tree)


@given(trees(batches(batch=2, dim=0)))
def test_tensors_are_those_that_map_visits_in_order(tree: Any) -> None:
    visited: list[Tensor] = []
    map_tensors(visited.append, tree)
    found = list(tensors(tree))
    assert [id(t) for t in found] == [id(t) for t in visited]
    assert first_tensor(tree) is (found[0] if found else None)


@pytest.mark.parametrize(
    "leaf", [*SHARED, object(), {1, 2}, Sample, Boxes, torch.float32, range(3)]
)
def test_everything_else_is_a_leaf(leaf: Any) -> None:
    assert children(leaf) is None
    assert map_tensors(torch.neg, leaf) is leaf
    assert list(tensors(leaf)) == []


@pytest.mark.parametrize("empty", EMPTY, ids=lambda empty: type(empty).__name__)
def test_empty_containers(empty: Any) -> None:
    assert equal(map_tensors(torch.neg, empty), empty)
    assert first_tensor(empty) is None


def test_tensor_subclasses_are_tensors() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    assert first_tensor([weight]) is weight


def test_tensors_and_first_tensor_look_no_further_than_asked() -> None:
    class Forbidden(dict[str, Any]):
        def values(self) -> Any:
            raise AssertionError("looked past the first tensor")

    tree = [{"a": torch.ones(1)}, Forbidden()]
    assert first_tensor(tree) is tree[0]["a"]
    assert next(tensors(tree)) is tree[0]["a"]


def test_attributes_beyond_the_items_are_kept() -> None:
    named = map_tensors(torch.neg, NamedList("name", torch.ones(1)))
    assert (type(named), named.name) == (NamedList, "name")
    encoding = map_tensors(torch.neg, Encoding({"ids": torch.ones(1)}, n_sequences=2))
    assert (type(encoding), encoding.n_sequences) == (Encoding, 2)


def test_attribute_dict_has_new_items_as_attributes() -> None:
    mapped = map_tensors(torch.neg, AttrDict(a=torch.ones(1)))
    assert mapped.a is mapped["a"]
    assert mapped.a.item() == -1


def test_ordered_dict_keeps_order_and_defaultdict_its_factory() -> None:
    mapped = map_tensors(torch.neg, OrderedDict(z=torch.ones(1), a=torch.ones(1)))
    assert list(mapped) == ["z", "a"]
    counts = map_tensors(torch.neg, defaultdict(list, x=torch.ones(1)))
    assert counts["missing"] == []


def test_structseq_of_torch() -> None:
    result = torch.max(torch.tensor([[1.0, 2.0]]), dim=1)
    mapped = map_tensors(torch.neg, result)
    assert type(mapped) is type(result)
    assert (mapped.values.item(), mapped.indices.item()) == (-2, -1)


def test_packed_sequence_keeps_its_batch_sizes() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    mapped = map_tensors(lambda t: t.double(), packed)
    assert type(mapped) is PackedSequence
    assert mapped.data.dtype == torch.float64
    assert torch.equal(mapped.batch_sizes, packed.batch_sizes)


class TestDataclass:
    def test_constructor_does_not_run_again(self) -> None:
        derived = Derived(torch.ones(1))
        mapped = map_tensors(lambda t: t, derived)
        assert mapped is not derived
        assert (mapped.value.item(), mapped.total.item()) == (2, 2)
        assert not hasattr(mapped, "unset")

    def test_frozen_and_slotted(self) -> None:
        mapped = map_tensors(torch.neg, Frozen(value=torch.ones(1)))
        assert mapped.value.item() == -1
        with pytest.raises(dataclasses.FrozenInstanceError):
            mapped.value = 0

    def test_cached_property_is_computed_anew(self) -> None:
        sample = Sample(torch.ones(4))
        assert sample.rows == 4
        sample.note = "kept"  # type: ignore[attr-defined]
        mapped = map_tensors(lambda t: t[:1], sample)
        assert (mapped.rows, mapped.note) == (1, "kept")

    def test_without_tensors_is_the_same_object(self) -> None:
        config = Sample(image=Frozen(value="path"))
        assert map_tensors(torch.neg, [config])[0] is config

    def test_model_output_has_only_fields_that_are_not_none(self) -> None:
        output = map_tensors(torch.neg, MaskedLMOutput(logits=torch.ones(1)))
        assert type(output) is MaskedLMOutput
        assert list(output) == ["logits"]
        assert output.logits is output["logits"]
        assert (output.logits.item(), output.loss) == (-1, None)


def test_a_class_that_cannot_be_rebuilt_is_named() -> None:
    class Handle(list[Any]):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("holds a lock")

    with pytest.raises(TypeError, match=r"Handle.*holds a lock"):
        map_tensors(torch.neg, Handle([torch.ones(1)]))


def test_unzip_shares_leaves_and_makes_lists_and_dicts_afresh() -> None:
    leaf, options = object(), {"flags": ["a"]}
    first, second = unzip(lambda _: None, (leaf, options), 2)
    assert first[0] is second[0] is leaf
    first[1]["flags"].append("b")
    assert second[1] == options == {"flags": ["a"]}


def test_unzip_gives_each_tree_its_value() -> None:
    def split(node: Any) -> list[Any] | None:
        return [node * 10, node * 100] if isinstance(node, int) else None

    assert unzip(split, {"a": [1, "x"], "b": ()}, 2) == [
        {"a": [10, "x"], "b": ()},
        {"a": [100, "x"], "b": ()},
    ]


def test_format_path() -> None:
    pair = Pair([{}], None)
    assert (
        format_path(((("inputs", (pair,), 0), pair, "left"), pair.left, 0)) == "inputs[0].left[0]"
    )
    assert format_path(("kwargs", {"mask": 1}, "mask")) == "kwargs['mask']"
    assert format_path(("x", Sample(1), "image")) == "x.image"


def test_no_reference_cycle_is_left() -> None:
    tensor = torch.ones(1)
    alive = weakref.ref(tensor)
    gc.disable()
    try:
        map_tensors(torch.neg, (Sample([tensor]), {"a": tensor}))
        first_tensor([tensor])
        del tensor
        assert alive() is None
    finally:
        gc.enable()
