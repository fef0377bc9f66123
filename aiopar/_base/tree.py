"""Nested tensors: look into containers, and rebuild them with other contents.

A tree is a tensor or any nesting of containers around tensors and other values. What is a
container, and how one is rebuilt, is said by `children` alone; everything else follows from it.

| container                               | children            | rebuilt                         |
|-----------------------------------------|---------------------|---------------------------------|
| tuple, list, dict                       | items, values       | by its constructor              |
| namedtuple, other tuple subclass        | items               | without running its code        |
| list or dict subclass, `UserDict`       | items, values       | shallow copy, contents replaced |
| dataclass instance                      | fields that are set | without running its code        |
| dict and dataclass (a `ModelOutput`)    | fields not None     | `type(x)(**fields)`             |

"Without running its code": `__init__`, `__new__` and `__post_init__` ran when the user made the
object and may have done more than store their arguments, so they do not run again. Attributes that
are no items or fields are kept, but for those that `functools.cached_property` computed from the
old contents. All else is a leaf: numbers, strings, sets, classes, `torch.Size`, other objects.

These are plain recursive functions of the module: the closures of `torch.nn.parallel`'s are
reference cycles, which keep tensors alive until the garbage collector runs.
"""

import copy
import sys
import types
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

Rebuild: TypeAlias = Callable[[Sequence[Any]], Any]
Parts: TypeAlias = tuple[Collection[Any], Collection[Any], Rebuild]
"""Keys (indices, dict keys or field names), values, and a function of new values in that order."""

Path: TypeAlias = "str | tuple[Path, Any, Any]"
"""Where a node is: a name for the root, or (the parent's path, the parent, the key in it)."""

# The commonest leaves are told by one look-up; torch.Size is a tuple that holds numbers only.
_LEAVES = frozenset(
    [
        *(type(None), bool, int, float, complex, str, bytes),
        *(torch.Size, torch.device, torch.dtype, types.FunctionType, types.BuiltinFunctionType),
    ]
)
# How many parts of each container, and of all of an argument, the loop's thread looks at: in a
# millisecond or two.
_FEW_EACH = 1000
_FEW_IN_ALL = 4000
# Named, because `Tensor | type` in an isinstance call would be built anew each time. (A module may
# be a dataclass, too.)
_LEAF_BASES = (Tensor, type, nn.Module)
_DICTS = (dict, UserDict)
_EDITABLE = (list, *_DICTS)


def children(node: Any) -> Parts | None:
    """The parts of a container and how to rebuild it from new ones; None for a leaf.

    Raises:
        TypeError: From the rebuild function, for a container that cannot be rebuilt: its class is
            named.
    """
    kind = type(node)
    # Exact types first: they are nearly all that comes by, and this is on the way of every call.
    if kind is tuple:
        return range(len(node)), node, tuple
    if kind is dict:
        return node.keys(), node.values(), partial(_rebuild_dict, node)
    if kind is list:
        return range(len(node)), node, list
    if kind in _LEAVES or isinstance(node, _LEAF_BASES):
        return None
    return _uncommon_children(node)


def aligned(
    containers: Sequence[Parts], mismatch: Callable[[int], Exception]
) -> list[Collection[Any]]:
    """The values of each container, in the order of the first one's keys.

    Args:
        containers: What `children` says of them.
        mismatch: Makes the error for that container, by its place, which has other keys.
    """
    order = list(containers[0][0])
    rows: list[Collection[Any]] = []
    for index, (keys, values, _) in enumerate(containers):
        if list(keys) == order:
            rows.append(values)
            continue
        by_key = dict(zip(keys, values, strict=True))
        if by_key.keys() != set(order):
            raise mismatch(index)
        rows.append([by_key[key] for key in order])
    return rows


def _uncommon_children(node: Any) -> Parts | None:
    if hasattr(type(node), "__dataclass_fields__"):
        is_dict = isinstance(node, dict)
        return _model_output_children(node) if is_dict else _dataclass_children(node)
    if isinstance(node, PackedSequence):
        return _packed_children(node)
    if isinstance(node, tuple):
        keys = getattr(node, "_fields", range(len(node)))
        return keys, node, partial(_rebuild_tuple_like, node)
    if isinstance(node, list):
        return range(len(node)), node, partial(_rebuild_list_like, node)
    if isinstance(node, _DICTS):
        return node.keys(), node.values(), partial(_rebuild_dict_like, node)
    return None


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with `fn(tensor)` in place of each tensor; what `unzip` says of sharing holds.

    Example:
        >>> map_tensors(torch.neg, {"a": torch.ones(2), "b": [torch.zeros(1), "text"]})
        {'a': tensor([-1., -1.]), 'b': [tensor([-0.]), 'text']}
    """
    return unzip(lambda leaf: [fn(leaf)] if isinstance(leaf, Tensor) else None, tree, 1)[0]


def tensors(tree: Any, *, few: bool = False) -> Iterator[Tensor]:
    """The tensors of `tree`, depth first, found as they are asked for; of `few` parts only.

    What is in it twice, perhaps in itself, is looked into once: this is also asked of what is no
    tree, the arguments and results of any function.
    """
    seen: dict[int, Any] = {}  # with the objects themselves: the number of one that goes is reused
    ahead = [iter((tree,))]
    each, left = (_FEW_EACH, _FEW_IN_ALL) if few else (sys.maxsize, sys.maxsize)
    while ahead:
        for node in ahead[-1]:
            if type(node) in _LEAVES:
                continue
            if isinstance(node, Tensor):
                yield node
            elif id(node) not in seen and (parts := children(node)) is not None:
                seen[id(node)] = node
                inside = tuple(islice(parts[1], each))  # another thread may change it meanwhile
                left -= len(inside)
                each = min(each, left)
                ahead.append(iter(inside))
                break
        else:
            ahead.pop()


def first_tensor(tree: Any) -> Tensor | None:
    """The first tensor of `tree`, among few parts; None if there is none."""
    if isinstance(tree, Tensor):  # mostly: without a generator
        return tree
    return None if type(tree) in _LEAVES else next(tensors(tree, few=True), None)


def has_tensors(tree: Any) -> bool:
    """Whether there are tensors anywhere in `tree`, which may contain itself."""
    return next(tensors(tree), None) is not None


def unzip(split: Callable[[Any], list[Any] | None], tree: Any, count: int) -> list[Any]:
    """One tree to `count` trees of the same shape.

    `split` is called on every node from the top. Where it returns a list, of `count` values, each
    tree gets one of them and the node is not looked into. What holds no such node is shared:
    leaves, dataclasses and tuple subclasses are the same object in every tree, while lists and
    dicts are made afresh, so that one replica's edits are not another's.

    Raises:
        ValueError: What holds such a node contains itself, or is nested too deeply.
    """
    try:
        columns = _unzip(split, tree, count)
        return _share(tree, count) if columns is None else columns
    except RecursionError:
        pass
    # Something contains itself, perhaps. Where it has no tensors it need not be looked into.
    try:
        return _unzip(partial(_split_or_share, split, count), tree, count) or [tree] * count
    except RecursionError as error:
        kind = type(tree).__name__
        raise ValueError(
            f"cannot take a {kind} apart in which something with tensors contains itself, or is "
            "nested too deeply: hand that over by an object which is no container"
        ) from error


def _split_or_share(
    split: Callable[[Any], list[Any] | None], count: int, node: Any
) -> list[Any] | None:
    leaf = split(node)
    if leaf is not None or has_tensors(node):
        return leaf
    try:
        return _share(node, count)
    except RecursionError:  # it is this which contains itself
        return [node] * count


def _unzip(split: Callable[[Any], list[Any] | None], node: Any, count: int) -> list[Any] | None:
    if (leaf := split(node)) is not None:
        return leaf
    if (parts := children(node)) is None:
        return None
    _, values, rebuild = parts
    columns = [_unzip(split, value, count) for value in values]
    if not any(columns):  # no column is an empty list: `count` is at least one
        return None
    if not all(columns):
        pairs = zip(values, columns, strict=True)
        columns = [_share(value, count) if column is None else column for value, column in pairs]
    return [rebuild(row) for row in zip(*columns, strict=True)]


def _share(node: Any, count: int) -> list[Any]:
    return [node] * count if type(node) in _LEAVES else [_fresh(node) for _ in range(count)]


def _fresh(node: Any) -> Any:
    if type(node) is tuple or isinstance(node, _EDITABLE):
        parts = children(node)
        if parts is not None:
            return parts[2]([_fresh(value) for value in parts[1]])
    return node


def format_path(path: Path) -> str:
    """A path as the user would write it.

    Example:
        >>> format_path((("inputs", [{}], 0), {"mask": None}, "mask"))
        "inputs[0]['mask']"
    """
    if isinstance(path, str):
        return path
    parent, node, key = path
    if hasattr(node, "__dataclass_fields__") or hasattr(node, "_fields"):
        return f"{format_path(parent)}.{key}"
    return f"{format_path(parent)}[{key!r}]"


def _rebuild_dict(node: dict[Any, Any], values: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(node, values, strict=True))


def _rebuild_tuple_like(node: tuple[Any, ...], values: Sequence[Any]) -> Any:
    kind: Any = type(node)
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types.*: C structs, made from a sequence
        return kind(tuple(values))
    try:
        rebuilt = tuple.__new__(kind, values)
    except TypeError as error:
        raise _cannot_rebuild(kind, error) from error
    if attributes := _attributes(node):
        rebuilt.__dict__.update(attributes)
    return rebuilt


def _rebuild_list_like(node: list[Any], values: Sequence[Any]) -> Any:
    rebuilt = _shallow_copy(node)
    rebuilt[:] = values
    return rebuilt


def _rebuild_dict_like(node: Any, values: Sequence[Any]) -> Any:
    if getattr(node, "__dict__", {}) is node:
        # The `self.__dict__ = self` recipe: a copy's attributes would be the old items.
        return type(node)(zip(node, values, strict=True))
    # A copy, because only the class knows what else it holds (the factory of a defaultdict).
    rebuilt = _shallow_copy(node)
    for key, value in zip(node, values, strict=True):
        rebuilt[key] = value
    return rebuilt


def _shallow_copy(node: Any) -> Any:
    try:
        rebuilt = copy.copy(node)
    except TypeError as error:
        raise _cannot_rebuild(type(node), error) from error
    for name in getattr(node, "__dict__", {}).keys() - _attributes(node).keys():
        del rebuilt.__dict__[name]
    return rebuilt


def _model_output_children(node: Any) -> Parts:
    # As Hugging Face has it: a field that is None is not part of the output, and the constructor
    # keeps fields and items in step.
    present = {
        field.name: value
        for field in fields(node)
        if field.init and (value := getattr(node, field.name)) is not None
    }
    return present.keys(), present.values(), partial(_rebuild_model_output, node, present)


def _dataclass_children(node: Any) -> Parts:
    # A field with init=False may never have been set.
    present = {f.name: getattr(node, f.name) for f in fields(node) if hasattr(node, f.name)}
    return present.keys(), present.values(), partial(_rebuild_dataclass, node, present)


def _rebuild_model_output(node: Any, names: Collection[str], values: Sequence[Any]) -> Any:
    return type(node)(**dict(zip(names, values, strict=True)))


def _rebuild_dataclass(node: Any, names: Collection[str], values: Sequence[Any]) -> Any:
    kind = type(node)
    try:
        rebuilt = object.__new__(kind)
    except TypeError as error:
        raise _cannot_rebuild(kind, error) from error
    if attributes := _attributes(node):
        rebuilt.__dict__.update(attributes)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(rebuilt, name, value)  # past the guard of a frozen dataclass
    return rebuilt


def _packed_children(node: PackedSequence) -> Parts:
    # batch_sizes is no child: it describes the others and torch wants it on the CPU.
    names = ("data", "sorted_indices", "unsorted_indices")
    values = (node.data, node.sorted_indices, node.unsorted_indices)
    return names, values, partial(_rebuild_packed, node)


def _rebuild_packed(node: PackedSequence, values: Sequence[Any]) -> PackedSequence:
    return PackedSequence(values[0], node.batch_sizes, values[1], values[2])


def _attributes(node: Any) -> dict[str, Any]:
    """The instance's own attributes, without those a cached_property will compute again."""
    kind = type(node)
    return {
        name: value
        for name, value in getattr(node, "__dict__", {}).items()
        if not isinstance(getattr(kind, name, None), cached_property)
    }


def _cannot_rebuild(kind: type, error: TypeError) -> TypeError:
    return TypeError(
        f"cannot make a {kind.__module__}.{kind.__qualname__} with other contents ({error}): "
        "pass its tensors in a tuple, list, dict or dataclass"
    )
