"""Nested containers of tensors: find the tensors, and rebuild containers with other contents.

A tree is a tensor, or any nesting of containers around tensors and other values. `children` decides
what a container is and how it is rebuilt.

| container                               | children            | rebuilt                         |
|-----------------------------------------|---------------------|---------------------------------|
| tuple, list, dict                       | items, values       | by its constructor              |
| namedtuple, other tuple subclass        | items               | without running its code        |
| list or dict subclass, `UserDict`       | items, values       | shallow copy, contents replaced |
| immutable list or dict                  | items, values       | `type(x)(items)`                |
| dataclass instance                      | fields that are set | without running its code        |
| dict and dataclass (a `ModelOutput`)    | fields not None     | `type(x)(**fields)`             |
| transformers' caches and their layers   | attributes          | without running its code        |

"Without running its code": `__init__`, `__new__` and `__post_init__` do not run again, because they
may do more than store their arguments. Other attributes of the object are kept, except values of
`functools.cached_property`, which were computed from the old contents. Everything else is a leaf:
numbers, strings, sets, classes, `torch.Size`, other objects.

Only `scatter` and `gather` search other iterables (`iterable_parts`), as torch's `gather` does: an
iterable may be a data loader.

No function here is a recursive closure, as in `torch.nn.parallel`: such closures are reference
cycles, which keep tensors alive until the garbage collector runs.
"""

import copy
import inspect
import sys
import types
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import fields
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

Rebuild: TypeAlias = Callable[[Sequence[Any]], Any]
Parts: TypeAlias = tuple[Collection[Any], Collection[Any], Rebuild]
"""Keys (indices, dict keys or field names), values, and a function that takes new values."""

Path: TypeAlias = "str | tuple[Path, Any, Any]"
"""Where a node is: a name for the root, or (the parent's path, the parent, the key in it)."""

# One look-up finds the most common leaves. torch.Size is a tuple of numbers.
_LEAVES = frozenset(
    [
        *(type(None), bool, int, float, complex, str, bytes),
        *(torch.Size, torch.device, torch.dtype, types.FunctionType, types.BuiltinFunctionType),
    ]
)
# How many items of one container, and of a whole tree, are searched on the loop's thread.
_FEW_EACH = 1000
_FEW_IN_ALL = 4000
# A module may be a dataclass.
_LEAF_BASES = (Tensor, type, nn.Module)
_DICTS = (dict, UserDict)
_EDITABLE = (list, *_DICTS)
# Iterables whose items are no tensors, or cannot be joined by position.
_NOT_SEARCHED = (str, bytes, bytearray, memoryview, Mapping, Set)


def children(node: Any) -> Parts | None:
    """Return the parts of a container and how to rebuild it from new ones; None for a leaf.

    The rebuild function raises TypeError if the class cannot be rebuilt.
    """
    kind = type(node)
    # Exact types first: they are the most common by far, and every call gets here.
    if kind is tuple:
        return range(len(node)), node, tuple
    if kind is dict:
        return node.keys(), node.values(), partial(_rebuild_dict, node)
    if kind is list:
        return range(len(node)), node, list
    if kind in _LEAVES or isinstance(node, _LEAF_BASES):
        return None
    return _uncommon_children(node)


def batch_children(node: Any) -> Parts | None:
    """As `children`, for what is split or joined: a dataclass with its own state is a value."""
    return None if has_own_state(node) else children(node)


def has_own_state(node: Any) -> bool:
    """Whether `node` is a dataclass instance with more than its fields, as a `@tensorclass`.

    The rest, a batch size for example, may describe all rows.
    """
    names = getattr(type(node), "__dataclass_fields__", None)
    if names is None or isinstance(node, (dict, *_LEAF_BASES)):
        return False
    # `__orig_class__`, which typing sets, is no state.
    return any(name not in names and name[:2] != "__" for name in _attributes(node))


def is_indexed(node: Any) -> bool:
    """Whether `node[a:b]` is some rows of `node`, which has its own state."""
    try:
        rows = node[:1]
        return type(rows) is type(node) and len(rows) == min(1, len(node))
    except Exception:  # noqa: BLE001  # of a user's class: it cannot be indexed
        return False


def moves_itself(node: Any) -> bool:
    """Whether `node` is an object with a method `to(device)`, and no tensor or module."""
    kind = type(node)
    method = None if kind in _LEAVES else getattr(kind, "to", None)
    if not callable(method) or isinstance(node, (*_LEAF_BASES, PackedSequence)):
        return False
    try:
        _, first, *_ = inspect.signature(method).parameters.values()
    except ValueError:  # it takes nothing, or is written in C
        return False
    if first.kind is inspect.Parameter.KEYWORD_ONLY:
        return False
    takes_device = first.name == "device" or first.kind is inspect.Parameter.VAR_POSITIONAL
    # Without tensors, `to` may convert a unit or a time zone.
    return takes_device or any(isinstance(each, Tensor) for each in _attributes(node).values())


def aligned(
    containers: Sequence[Parts], mismatch: Callable[[int], Exception]
) -> list[Collection[Any]]:
    """Return the values of each container, in the order of the first container's keys.

    `mismatch` makes the error for a container with other keys, from the container's index.
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
        if isinstance(node, dict):
            return _model_output_children(node)
        # A class with own state and a `to` may keep its fields elsewhere: it must move itself.
        return None if has_own_state(node) and moves_itself(node) else _dataclass_children(node)
    if isinstance(node, PackedSequence):
        return _packed_children(node)
    if isinstance(node, tuple):
        keys = getattr(node, "_fields", range(len(node)))
        return keys, node, partial(_rebuild_tuple_like, node)
    if isinstance(node, list):
        return range(len(node)), node, partial(_rebuild_list_like, node)
    if isinstance(node, _DICTS):
        return node.keys(), node.values(), partial(_rebuild_dict_like, node)
    if not is_cache(node):
        return None
    attributes = dict(vars(node))
    return attributes.keys(), attributes.values(), partial(_rebuild_cache, node, attributes)


def is_cache(node: Any) -> bool:
    """Whether `node` is a cache of transformers, or a layer of one: a container of attributes."""
    # Its iterator and its constructor, which torch's `gather` uses, leave some state out.
    return hasattr(type(node), "reorder_cache") and not isinstance(node, _LEAF_BASES)


def is_other_iterable(node: Any) -> bool:
    """Whether `node` is no container, but an iterable that torch's `gather` may rebuild."""
    kind = type(node)
    return (
        kind not in _LEAVES
        and hasattr(kind, "__iter__")
        and not hasattr(kind, "__next__")  # an iterator can be read once only
        and not hasattr(kind, "__array__")
        and not isinstance(node, (*_LEAF_BASES, *_NOT_SEARCHED))
        and children(node) is None
    )


def iterable_parts(node: Any) -> Parts | None:
    """Return the items of an iterable with tensors, no container, and how to rebuild it; else None.

    It must iterate over the same items when it is rebuilt. A graph of (name, value) pairs does not.
    """
    if not is_other_iterable(node):
        return None
    rebuild = partial(_rebuild_iterable, node)
    try:
        items = list(node)
        if not has_tensors(items):
            return None
        again = list(islice(rebuild(items), len(items) + 1))
    except Exception:  # noqa: BLE001  # of a user's `__iter__` or constructor
        return None
    return (range(len(items)), items, rebuild) if _is_same(items, again) else None


def _is_same(one: Any, other: Any) -> bool:
    """Whether two trees have the same objects in the same containers."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in _LEAVES:
        return bool(one == other)
    parts, others = children(one), children(other)
    if parts is None or others is None or list(parts[0]) != list(others[0]):
        return False
    return all(map(_is_same, parts[1], others[1]))


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return `tree` with `fn(tensor)` in place of each tensor. Other parts are as in `unzip`."""
    return unzip(lambda leaf: [fn(leaf)] if isinstance(leaf, Tensor) else None, tree, 1)[0]


def tensors(tree: Any, *, few: bool = False) -> Iterator[Tensor]:
    """Yield the tensors of `tree`, which may be any object and may contain itself, depth first.

    With `few` only a few thousand items are searched: the loop's thread must not search for long.
    """
    seen: dict[int, Any] = {}  # keeps the objects: the `id` of a freed one may be used again
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
                inside = tuple(islice(parts[1], each))  # a copy: another thread may change it
                left -= len(inside)
                each = min(each, left)
                ahead.append(iter(inside))
                break
        else:
            ahead.pop()


def first_tensor(tree: Any) -> Tensor | None:
    """Return the first tensor among the first few thousand items of `tree`, or None."""
    if isinstance(tree, Tensor):
        return tree
    return None if type(tree) in _LEAVES else next(tensors(tree, few=True), None)


def has_tensors(tree: Any) -> bool:
    """Whether `tree` contains a tensor. `tree` may contain itself."""
    return next(tensors(tree), None) is not None


def unzip(split: Callable[[Any], list[Any] | None], tree: Any, count: int) -> list[Any]:
    """Turn one tree into `count` trees of the same structure.

    `split` is called on every node from the top. If it returns a list of `count` values, each tree
    gets one value in place of the node. In a part without such a node, only lists, dicts and caches
    are copied, so that replicas do not see each other's edits. A container with such a node that
    contains itself, or is nested too deeply, raises ValueError.
    """
    try:
        return _unzip(split, tree, count) or _share(tree, count)
    except RecursionError:
        pass
    # Perhaps an object contains itself. If it has no tensors, it is shared.
    try:
        return _unzip(partial(_split_or_share, split, count), tree, count) or [tree] * count
    except RecursionError as error:
        kind = type(tree).__name__
        raise ValueError(
            f"cannot split a {kind} that contains itself or is nested too deeply: pass it inside "
            "an object that is no container"
        ) from error


def _split_or_share(
    split: Callable[[Any], list[Any] | None], count: int, node: Any
) -> list[Any] | None:
    leaf = split(node)
    if leaf is not None or has_tensors(node):
        return leaf
    try:
        return _share(node, count)
    except RecursionError:  # the node contains itself
        return [node] * count


def _unzip(split: Callable[[Any], list[Any] | None], node: Any, count: int) -> list[Any] | None:
    if (leaf := split(node)) is not None:
        return leaf
    if (parts := children(node)) is None:
        return None
    _, values, rebuild = parts
    columns = [_unzip(split, value, count) for value in values]
    if not any(columns):  # no column is an empty list, because `count` is at least 1
        return None
    if not all(columns):
        pairs = zip(values, columns, strict=True)
        columns = [_share(value, count) if column is None else column for value, column in pairs]
    return [rebuild(row) for row in zip(*columns, strict=True)]


def _share(node: Any, count: int) -> list[Any]:
    return [node] * count if type(node) in _LEAVES else [_fresh(node) for _ in range(count)]


def _fresh(node: Any) -> Any:
    is_copied = type(node) is tuple or isinstance(node, _EDITABLE) or is_cache(node)
    if is_copied and (parts := children(node)) is not None:
        return parts[2]([_fresh(value) for value in parts[1]])
    return node


def format_path(path: Path) -> str:
    """Write a path as Python code, as `inputs[0]['mask']`."""
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
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types.*, made from one sequence
        return kind(tuple(values))
    return _with_attributes(node, partial(tuple.__new__, kind, values))


def _with_attributes(node: Any, make: Callable[[], Any]) -> Any:
    """Make an object of the class of `node`, with the other attributes of `node`."""
    rebuilt = _made(type(node), make)
    if attributes := _attributes(node):
        rebuilt.__dict__.update(attributes)
    return rebuilt


def _rebuild_list_like(node: list[Any], values: Sequence[Any]) -> Any:
    rebuilt = _shallow_copy(node)
    try:
        rebuilt[:] = values
    except (TypeError, NotImplementedError):
        return _rebuild_by_constructor(node, values)
    return rebuilt


def _rebuild_dict_like(node: Any, values: Sequence[Any]) -> Any:
    if getattr(node, "__dict__", {}) is node:
        # A class with `self.__dict__ = self`: the attributes of a copy would be the old items.
        return type(node)(zip(node, values, strict=True))
    # A copy, because the object may hold more, as the factory of a defaultdict.
    rebuilt = _shallow_copy(node)
    try:
        for key, value in zip(node, values, strict=True):
            rebuilt[key] = value
    except (TypeError, NotImplementedError):
        return _rebuild_by_constructor(node, dict(zip(node, values, strict=True)))
    return rebuilt


def _rebuild_by_constructor(node: Any, contents: Any) -> Any:
    kind: Any = type(node)
    return _made(kind, lambda: kind(contents))


def _shallow_copy(node: Any) -> Any:
    rebuilt = _made(type(node), partial(copy.copy, node))
    for name in getattr(node, "__dict__", {}).keys() - _attributes(node).keys():
        del rebuilt.__dict__[name]
    return rebuilt


def _model_output_children(node: Any) -> Parts:
    # As in Hugging Face's code: a field that is None is no item of the output.
    present = {
        field.name: value
        for field in fields(node)
        if field.init and (value := getattr(node, field.name)) is not None
    }
    names = present.keys()
    # The constructor keeps fields and items equal.
    return names, present.values(), lambda new: type(node)(**dict(zip(names, new, strict=True)))


def _dataclass_children(node: Any) -> Parts:
    # A field with init=False may not be set.
    present = {f.name: getattr(node, f.name) for f in fields(node) if hasattr(node, f.name)}
    return present.keys(), present.values(), partial(_rebuild_object, node, present)


def _rebuild_object(node: Any, names: Collection[str], values: Sequence[Any]) -> Any:
    rebuilt = _with_attributes(node, partial(object.__new__, type(node)))
    for name, value in zip(names, values, strict=True):
        object.__setattr__(rebuilt, name, value)  # past the guard of a frozen dataclass
    return rebuilt


def _rebuild_cache(node: Any, names: Collection[str], values: Sequence[Any]) -> Any:
    rebuilt = _rebuild_object(node, names, values)
    first = next((tensor for tensor in tensors(values) if tensor.ndim), None)
    if first is not None:
        # A layer may store the device and the batch size of its tensors.
        facts = {"device": first.device, "batch_size": first.shape[0]}
        vars(rebuilt).update((name, facts[name]) for name in facts.keys() & names)
    return rebuilt


def _rebuild_iterable(node: Any, values: Sequence[Any]) -> Any:
    if isinstance(node, deque):  # keeps `maxlen`
        rebuilt = copy.copy(node)
        rebuilt.clear()
        rebuilt.extend(values)
        return rebuilt
    # A list, where torch passes an iterator: the object may keep what it gets.
    return _rebuild_by_constructor(node, list(values))


def _packed_children(node: PackedSequence) -> Parts:
    # `batch_sizes` is no child: it describes the data, and torch needs it on the CPU.
    names = ("data", "sorted_indices", "unsorted_indices")
    values = (node.data, node.sorted_indices, node.unsorted_indices)
    return names, values, lambda new: PackedSequence(new[0], node.batch_sizes, new[1], new[2])


def _attributes(node: Any) -> dict[str, Any]:
    """The attributes of the instance, without the values of `cached_property`."""
    kind = type(node)
    return {
        name: value
        for name, value in getattr(node, "__dict__", {}).items()
        if not isinstance(getattr(kind, name, None), cached_property)
    }


def _made(kind: type, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except TypeError as error:
        raise TypeError(
            f"cannot rebuild a {kind.__module__}.{kind.__qualname__} with other contents "
            f"({error}): pass its tensors in a tuple, list, dict or dataclass"
        ) from error
