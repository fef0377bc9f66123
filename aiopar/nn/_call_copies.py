"""Shallow copies for one call, which another call gets if this one has not changed them.

To copy a module costs some 15 new containers, to be freed again after the call: for small models
that is a good part of the call. To see that nothing has changed takes half as long, makes no work
for the garbage collector, and nearly always that is so.
"""

import operator
import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from ._module_tree import OWN_CONTAINERS, M, ModuleTree, TensorMap, walk

_fields = operator.attrgetter("__dict__")
_values = dict.values
_NAMED = ("_parameters", "_buffers", "_modules")


class Looks:
    """What some modules look like, to see later whether they still do.

    That is: their classes, attributes, tensors, submodules and hooks, each the same object under
    the same name. What an attribute refers to may change inside: copies share it with the original.
    """

    __slots__ = (
        "_attributes",
        "_classes",
        "_dicts",
        "_empty",
        "_lengths",
        "_modules",
        "_names",
        "_sets",
        "_values",
    )

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._classes = list(map(type, modules))
        self._attributes: list[dict[str, Any]] = list(map(_fields, modules))
        containers = [fields[name] for fields in self._attributes for name in OWN_CONTAINERS]
        self._empty = [container for container in containers if not container]
        filled = [container for container in containers if container]
        # Names of buffers; the other containers are dicts.
        self._sets = [(names, names.copy()) for names in filled if isinstance(names, set)]
        self._dicts: list[dict[Any, Any]] = [
            *self._attributes,
            *(fields[name] for fields in self._attributes for name in _NAMED),
            *(container for container in filled if isinstance(container, dict)),
        ]
        self._lengths = list(map(len, self._dicts))
        self._names = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(_values, self._dicts)))

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        return (
            not any(self._empty)
            and all(names == before for names, before in self._sets)
            and list(map(type, self._modules)) == self._classes
            and all(map(operator.is_, map(_fields, self._modules), self._attributes))
            and list(map(len, self._dicts)) == self._lengths
            and list(chain.from_iterable(self._dicts)) == self._names
            # Not `==`: of tensors that would be a tensor.
            and all(map(operator.is_, chain.from_iterable(map(_values, self._dicts)), self._values))
        )


class CallCopies(list[M]):
    """The replicas of one call, and the evidence that another call may have them.

    Args:
        tree: The module.
        slots: For each replica, the tensors that it sees.
        made_from: What the modules of `tree` look like.
    """

    __slots__ = ("_modules", "_references", "_seen", "made_from")

    def __init__(self, tree: ModuleTree[M], slots: Sequence[TensorMap], made_from: Looks) -> None:
        super().__init__(tree.copies(slots))
        self.made_from = made_from
        self._modules = [module for replica in self for module in walk(replica)]
        self._seen = Looks(self._modules)
        self._references = self._count()

    def _count(self) -> list[int]:
        return list(map(sys.getrefcount, self._modules))

    def reusable(self) -> bool:
        """Whether nobody has changed them, nor refers to one of them still."""
        return self._count() == self._references and self._seen.hold()
