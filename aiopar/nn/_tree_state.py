"""What a tree of modules is like: whether it still is, and whether a forward could change it."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

# Asked of torch, not listed: the dicts and sets that every module has in this version.
_CONTAINERS = tuple(
    name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)
)
_HOOKS = tuple(name for name in _CONTAINERS if "hooks" in name)
_TORCH = "torch.nn.modules."


class TreeState:
    """All that shallow copies of some modules depend on, as it was when this was made.

    The class of each module, its attributes, its parameters, buffers, children and hooks: which
    they are, not what is in them.
    """

    __slots__ = ("_contents", "_empty", "_filled", "_modules", "_names")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        containers = [module.__dict__[name] for module in modules for name in _CONTAINERS]
        # Most are empty, and to see that they still are takes next to nothing.
        self._empty = [container for container in containers if not container]
        self._filled = [container for container in containers if container]
        self._names, self._contents = self._look()

    def holds(self) -> bool:
        """Whether all of it still is as it was."""
        if any(self._empty):
            return False
        names, contents = self._look()
        return (
            names == self._names
            and len(contents) == len(self._contents)
            # By identity: an equal tensor is another one, and compares in its own way.
            and all(map(operator.is_, contents, self._contents))
        )

    def _look(self) -> tuple[list[Any], list[object]]:
        names: list[Any] = []
        kinds = [type(module) for module in self._modules]
        contents: list[object] = [*kinds]
        for kind in dict.fromkeys(kinds):
            contents += (kind.forward, kind.__call__)
        for module in self._modules:
            names += module.__dict__
            contents += module.__dict__.values()
        for container in self._filled:
            names += container
            if isinstance(container, dict):
                contents += container.values()
        return names, contents


def leaves_no_trace(modules: Sequence[nn.Module]) -> bool:
    """Whether a forward cannot set anything on these modules: all are torch's own, without hooks.

    Nobody knows what others do. Of torch's own, RNNs and lazy modules set attributes.
    """
    return all(map(_is_torch_s_own, {type(module) for module in modules})) and not any(
        module.__dict__[name] for module in modules for name in _HOOKS
    )


def _is_torch_s_own(kind: type[nn.Module]) -> bool:
    return (
        kind.__module__.startswith(_TORCH)
        and not issubclass(kind, nn.RNNBase | LazyModuleMixin)
        and _is_written_there(kind.forward)
        and _is_written_there(kind.__call__)
    )


def _is_written_there(method: Callable[..., Any]) -> bool:
    # `__module__` would be what a wrapper of somebody's says.
    written_in: str = getattr(method, "__globals__", {}).get("__name__", "")
    return written_in.startswith(_TORCH)
