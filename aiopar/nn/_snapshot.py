"""What a tree of modules was like: whether it still is, and whether a forward could change it."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ._callbacks import CALLBACK
from ._module_copy import CONTAINERS

_HOOKS = tuple(name for name in CONTAINERS if "hooks" in name)
_TORCH = "torch.nn.modules."


class Snapshot:
    """All that shallow copies of some modules depend on, as it was when this was made.

    The class of each module and what that has; the module's attributes, parameters, buffers,
    children and hooks: which they are, not what is in them.

    Attributes:
        fields: The `__dict__` of each module, the containers in it copied.
    """

    __slots__ = (
        "_bases",
        "_contents",
        "_empty",
        "_filled",
        "_methods",
        "_modules",
        "_names",
        "fields",
    )

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        kinds = [type(module) for module in modules]
        self._bases = _bases(kinds)
        self._methods = [item for base in self._bases for item in vars(base).items()]
        self.fields = [module.__dict__.copy() for module in modules]
        # `holds` compares with what is in `fields`, at whatever time that was looked at: who edits
        # the modules while this is made, and undoes it, cannot be missed.
        self._names, self._contents = _flat(self.fields)
        self._contents += kinds + [value for _, value in self._methods]
        self._empty: list[Any] = []
        self._filled: list[Any] = []
        for fields in self.fields:
            for name in CONTAINERS:
                container = fields[name]
                copied = fields[name] = container.copy()
                # Most are empty, and to see that they still are takes next to nothing.
                (self._filled if copied else self._empty).append(container)
                if copied:
                    _add(copied, self._names, self._contents)

    def holds(self) -> bool:
        """Whether all of it still is as it was."""
        if any(self._empty):
            return False
        names, contents = _flat(module.__dict__ for module in self._modules)
        contents += map(type, self._modules)
        for base in self._bases:
            contents += vars(base).values()
        for container in self._filled:
            _add(container, names, contents)
        return (
            names == self._names
            and len(contents) == len(self._contents)
            # By identity: an equal tensor is another one, and compares in its own way.
            and all(map(operator.is_, contents, self._contents))
        )

    def leaves_no_trace(self) -> bool:
        """Whether a forward could set nothing on the modules, which `all_from_torch` is true of."""
        return _run_torch_alone(self._methods) and not any(
            CALLBACK in fields or "forward" in fields or any(fields[name] for name in _HOOKS)
            for fields in self.fields
        )


def all_from_torch(modules: Iterable[nn.Module]) -> bool:
    """Whether all modules are torch's own, of those that set nothing on themselves in forward.

    Nobody knows what others do. Of torch's, RNNs and lazy modules set attributes.
    """
    return all(
        base.__module__.startswith(_TORCH)
        and not issubclass(base, nn.RNNBase | LazyModuleMixin)
        and not hasattr(base, CALLBACK)
        for base in _bases({type(module) for module in modules})
    )


def _bases(kinds: Iterable[type]) -> list[type]:
    return list(dict.fromkeys(base for kind in kinds for base in kind.__mro__[:-1]))


def _flat(dicts: Iterable[dict[str, Any]]) -> tuple[list[Any], list[object]]:
    names: list[Any] = []
    contents: list[object] = []
    for fields in dicts:
        names += fields
        names.append(len(fields))  # or what goes from one to the next would not be seen
        contents += fields.values()
    return names, contents


def _add(container: Any, names: list[Any], contents: list[object]) -> None:
    names += container
    names.append(len(container))
    if isinstance(container, dict):
        contents += container.values()


def _run_torch_alone(methods: Iterable[tuple[str, object]]) -> bool:
    """Whether torch's methods call no others: these may have been patched."""
    functions = [(name, value) for name, value in methods if isinstance(value, FunctionType)]
    # `__module__` would be what a wrapper of somebody's says.
    others = {
        name
        for name, function in functions
        if not function.__globals__.get("__name__", "").startswith("torch.")
    }
    if not others:
        return True
    # Some libraries give modules more methods, which nobody here calls.
    called = {name for _, function in functions for name in _names_in(function.__code__)}
    return not any(name in called or name.startswith("__") for name in others)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
