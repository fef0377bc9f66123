"""Which part of an object cannot be pickled, and what its user can do instead."""

import inspect
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from types import FunctionType, GeneratorType, MethodType
from typing import Any

from torch import Tensor, nn

from .._base.arguments import name_of, unwrapped
from .._base.inputs import is_name
from ._wire import Encoder

_CANNOT = " cannot be pickled"
# The search pickles a part once for each level above it, so it stays linear in the size of a call.
_MOST_LEVELS = 20
_MOST_PARTS = 10_000
_LONGEST_PATH = 200


def notes_on(
    error: BaseException, parts: Iterable[tuple[str, Any]], make: Callable[[], Encoder]
) -> Iterator[str]:
    """A note for `error` on each of the named `parts` that cannot be pickled.

    There are none if `error` has such a note already: that of a kept value.
    """
    if any(_CANNOT in note for note in getattr(error, "__notes__", ())):
        return
    for name, part in parts:
        if can(make().encode, part):
            continue
        if RecursionError in (type(error), type(error.__cause__)):  # cloudpickle replaces it
            yield f"{name} ({type(part).__name__}){_CANNOT}: it is nested too deeply"
        else:
            path, innermost = _innermost(part, make)
            yield f"{name}{path} ({type(innermost).__name__}){_CANNOT}{_instead(innermost)}"


def can(step: Callable[..., object], *args: Any) -> bool:
    """Whether a step does not raise."""
    try:
        step(*args)
    except BaseException:  # noqa: BLE001  # raised by the class of an object
        return False
    return True


def title(fn: Any) -> str:
    """How notes name a module, a function, or another object."""
    if isinstance(fn, nn.Module):
        return f"the module {type(fn).__name__}"
    return f"the {'function ' * hasattr(unwrapped(fn), '__name__')}{name_of(fn)}"


def _innermost(obj: Any, make: Callable[[], Encoder]) -> tuple[str, Any]:
    """The innermost part of `obj` that cannot be pickled, and the path to it."""
    path, seen, left = "", {id(obj)}, iter(range(_MOST_PARTS))
    with suppress(Exception):  # of a user's class: what has been found is named
        for _ in range(_MOST_LEVELS):
            found = (
                one
                for one, _ in zip(_parts(obj), left, strict=False)
                if id(one[1]) not in seen and not can(make().encode, one[1])
            )
            name, part = next(found, ("", obj))
            if part is obj:
                break
            seen.add(id(part))
            path, obj = path + name, part
    return path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]} ...", obj


def _parts(obj: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(obj, dict):
        return ((_item(key), value) for key, value in obj.items())
    if isinstance(obj, list | tuple | set | frozenset):
        return ((f"[{index}]", value) for index, value in enumerate(obj))
    if isinstance(obj, FunctionType):
        return [(f", variable {name}", value) for name, value in _variables(obj).items()]
    if isinstance(obj, MethodType):
        return [(".__self__", obj.__self__)]
    if isinstance(obj, partial):
        parts = {"func": obj.func, "args": obj.args, "keywords": obj.keywords}
    else:
        parts = _attributes(obj)
    return [
        (f"[{name}]" if name.isdigit() else f".{name}", part)  # of a Sequential: `[1]`
        for name, part in parts.items()
    ]


def _item(key: Any) -> str:
    return f"[{key!r}]" if is_name(key) else f"[a {type(key).__name__}]"  # may be private


def _variables(fn: FunctionType) -> dict[str, Any]:
    """The variables from outside that a function uses: they go with a function that has no name."""
    code = fn.__code__
    used = {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        if can(lambda cell: cell.cell_contents, cell):  # else it has no value yet
            used[name] = cell.cell_contents
    return used


def _attributes(obj: Any) -> dict[str, Any]:
    """The attributes that pickle takes, those of a class or of its instance."""
    if isinstance(obj, type):
        return {name: value for name, value in vars(obj).items() if not name.startswith("__")}
    for own in ("__reduce__", "__reduce_ex__"):
        if getattr(type(obj), own) is not getattr(object, own):
            return {}  # pickle takes what this method returns
    try:
        state = obj.__getstate__()
    except Exception:  # noqa: BLE001  # raised by the class of the object
        return {}
    if isinstance(state, tuple) and len(state) == 2:  # with slots
        state = {**(state[0] or {}), **(state[1] or {})}
    if not isinstance(state, dict):
        return {}
    modules = state.get("_modules", {}) if isinstance(obj, nn.Module) else {}
    return {**modules, **state}  # a submodule by its own name


def _instead(obj: Any) -> str:
    if isinstance(obj, Tensor):
        return ""  # the error says it
    if isinstance(obj, Connection) or type(obj).__module__.startswith("multiprocessing."):
        instead = "use the Lock, Event or Queue of a multiprocessing.Manager()"
    elif isinstance(obj, io.IOBase):
        instead = "give the name of the file, and open the file in the worker"
    elif isinstance(obj, GeneratorType):
        instead = "give a list of its items"
    elif inspect.isawaitable(obj):
        instead = "await it, and give the result"
    else:
        instead = "make it in the worker, when it is first used"
    return f": {instead}; or run the call on a thread (asyncio.to_thread, DeviceExecutor)"
