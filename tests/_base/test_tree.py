"""`aiopar._base.tree`: containers are rebuilt with other tensors and keep their type."""

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from aiopar._base.tree import (
    children,
    first_tensor,
    has_tensors,
    map_tensors,
    tensors,
    unzip,
)
from tests.sample_trees import (
    CONTAINERS,
    SHARED,
    AttrDict,
    Boxes,
    Derived,
    Encoding,
    Frozen,
    NamedList,
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
def test_tensors_yields_what_map_visits_in_order(tree: Any) -> None:
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


def test_other_attributes_are_kept() -> None:
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


class Sealed(dict[str, Any]):
    """Like a frozendict: a copy is the object itself."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("immutable")

    def __copy__(self) -> "Sealed":
        return self


@pytest.mark.parametrize(
    "make",
    [
        lambda x: immutable_list([x, "a"]),
        lambda x: immutable_dict(x=x, b="a"),
        lambda x: Sealed(x=x, b="a"),
    ],
)
def test_immutable_containers_are_made_anew(make: Any) -> None:
    tree = make(torch.ones(2))
    assert equal(map_tensors(torch.neg, tree), make(-torch.ones(2)))
    assert equal(tree, make(torch.ones(2)))


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


def test_a_class_that_cannot_be_rebuilt_is_named() -> None:
    class Handle(list[Any]):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("holds a lock")

    with pytest.raises(TypeError, match=r"Handle.*holds a lock"):
        map_tensors(torch.neg, Handle([torch.ones(1)]))


@dataclasses.dataclass
class Node:
    """A node that refers to its parent, so that a tree of nodes contains itself."""

    parent: "Node | None" = None
    nodes: list["Node"] = dataclasses.field(default_factory=list)
    value: Any = None


def family(value: Any = None) -> Node:
    root = Node(value=value)
    root.nodes = [Node(root), Node(root)]
    return root


def chain(length: int) -> Any:
    link: Any = None
    for number in range(length):
        link = (number, link)
    return link


def twice(depth: int) -> Any:
    """A tree whose parts are shared: it has 2 to the power of `depth` leaves."""
    part: Any = ()
    for _ in range(depth):
        part = (part, part)
    return part


class TestCyclesAndLargeObjects:
    @pytest.mark.parametrize("make", [family, lambda: chain(100_000), lambda: twice(100)])
    def test_has_no_tensors(self, make: Any) -> None:
        assert first_tensor(make()) is None
        assert not has_tensors([make()])

    def test_a_tensor_in_it_is_found(self) -> None:
        tensor = torch.ones(1)
        assert first_tensor(family(tensor)) is tensor
        assert has_tensors(((), chain(100_000), tensor))

    def test_only_a_part_of_a_large_object_is_searched(self) -> None:
        tensor = torch.ones(1)
        assert first_tensor([tensor] * 100_000) is tensor
        assert first_tensor([*range(100_000), tensor]) is None
        assert first_tensor({"ids": [*range(100_000)], "x": {"t": tensor}}) is tensor
        assert first_tensor([[[[0] * 1000, tensor] for _ in range(10)]]) is tensor
        assert first_tensor([[[[0] * 1000] * n, [tensor]] for n in range(10)]) is tensor
        assert first_tensor([[[0] * 1000 for _ in range(10)], [tensor]]) is None
        assert has_tensors([*range(100_000), tensor])

    def test_another_thread_may_change_a_container(self) -> None:
        class Growing:
            """A value of a dict; a look at it adds another value to the dict."""

            @property  # type: ignore[misc]  # what isinstance asks for
            def __class__(self) -> type:
                tree[len(tree)] = None
                return object

        tree: dict[int, Any] = {}
        tree.update({0: Growing(), 1: Growing()})
        assert first_tensor(tree) is None
        assert len(tree) > 2

    def test_without_tensors_it_is_shared(self) -> None:
        root = family()
        first, second = unzip(_halves, [torch.arange(4), root, [{}]], 2)
        assert first[1] is second[1] is root
        assert first[2][0] is not second[2][0]
        assert (first[0].tolist(), second[0].tolist()) == ([0, 1], [2, 3])
        assert unzip(_halves, root, 2) == [root, root]

    def test_with_tensors_it_cannot_be_split(self) -> None:
        with pytest.raises(ValueError, match=r"cannot split a list that contains itself"):
            unzip(_halves, [torch.arange(4), family(torch.ones(2))], 2)


def _halves(node: Any) -> list[Any] | None:
    return list(node.chunk(2)) if isinstance(node, Tensor) else None


def test_a_module_that_is_a_dataclass_is_a_leaf() -> None:
    @dataclasses.dataclass(eq=False)
    class Scale(torch.nn.Module):
        factor: Tensor

        def __post_init__(self) -> None:
            factor = self.__dict__.pop("factor")
            super().__init__()
            self.factor = factor

    module = Scale(torch.ones(2))
    assert children(module) is None
    assert unzip(_halves, [module], 2) == [[module], [module]]
