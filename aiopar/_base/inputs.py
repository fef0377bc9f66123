"""The input of a user's module or function: how a module gets it, and how an error describes it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import Parameter, Signature, signature
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import ScriptMethod, Tensor, nn

from .arguments import is_async, returns_coroutine
from .collate import is_rows
from .tracebacks import add_note_once
from .tree import children

T = TypeVar("T")

NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


def call_module(
    module: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] = NO_KWARGS,
    place: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Call a module with one input, which may be a mapping of keyword arguments.

    A mapping becomes keyword arguments if `forward` can be called with them. Else it is the only
    argument, for modules that take a dict. Everything that calls a module with one batch calls it
    here. Calls that mirror torch do not: `dp(x)`, `parallel_apply`.

    Args:
        module: The module.
        inputs: The positional arguments.
        kwargs: The keyword arguments.
        place: Called on each argument: moves it to the device of the module.
    """
    refused = ""
    if len(inputs) == 1 and not kwargs and isinstance(inputs[0], Mapping):
        try:
            _bind(module, inputs[0])
        except TypeError as error:
            # The error names a key.
            why = _cut(str(error)) if all(map(is_name, inputs[0])) else "a key is no name"
            refused = f" (no keyword arguments: {why})"
        else:
            kwargs, inputs = inputs[0], ()
    try:
        moved = [place(value) for value in inputs]
        named = {name: place(value) for name, value in kwargs.items()}
        return module(*moved, **named)
    except Exception as error:
        given = [outline(value) for value in inputs]
        given += [f"{name}={outline(value)}" for name, value in kwargs.items()]
        add_note_once(error, _CALLED_WITH, (_cut(", ".join(given)) or "no arguments") + refused)
        raise


def call_function(fn: Callable[[Any], T], batch: Any) -> T:
    """Call a function with a batch; its error gets a note."""
    try:
        return fn(batch)
    except Exception as error:
        note_batch(error, batch)
        raise
    finally:
        del batch  # an error's traceback holds this frame


def note_batch(error: BaseException, batch: Any) -> None:
    """Add a note with the types and shapes in `batch`, unless the called module has added it."""
    add_note_once(error, _CALLED_WITH, outline(batch))


def function_of_batch(fn: Callable[..., Any]) -> Callable[[Any], Any]:
    """A function of one batch: `fn` itself, or for a module one that calls it by `call_module`."""
    if not isinstance(fn, nn.Module):
        return fn
    if not is_async(fn):
        return partial(_call_with_batch, fn)
    return returns_coroutine(lambda batch: call_module(fn, (batch,)))


def _call_with_batch(module: nn.Module, batch: Any) -> Any:
    return call_module(module, (batch,))


def _bind(module: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if the module cannot be called with these keyword arguments."""
    with suppress(ValueError):  # a method that was written in C may have no signature
        _signature(module).bind(**kwargs)


_PASSES_ALL = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


def _signature(module: Any) -> Signature:
    """The signature with names: of the module's own `__call__`, of `forward`, or further inside."""
    if type(module).__call__ is not nn.Module.__call__ and _has_names(own := _read(module)):
        return own
    found = _read(module.forward)
    wrapped = getattr(module, "_orig_mod", getattr(module, "module", None))  # compiled, or DDP
    return found if _has_names(found) or not isinstance(wrapped, nn.Module) else _signature(wrapped)


def _has_names(found: Signature) -> bool:
    return {one.kind for one in found.parameters.values()} != _PASSES_ALL


_signatures: WeakKeyDictionary[Any, Signature] = WeakKeyDictionary()
"""Those of methods, because `signature` takes as long as a small layer."""


def _read(called: Any) -> Signature:
    if isinstance(called, ScriptMethod):
        return _signature_of_script(called)
    function = getattr(called, "__func__", None)
    found = _signatures.get(function) if function is not None else None
    if found is None:
        found = signature(called)
        if function is not None:
            _signatures[function] = found
    return found


def _signature_of_script(method: Any) -> Signature:
    """The names of a traced or scripted method, for which Python has no signature."""
    required, kind = Parameter.empty, Parameter.KEYWORD_ONLY
    _, *arguments = method.schema.arguments  # without `self`
    return Signature(
        [
            Parameter(one.name, kind, default=None if one.has_default_value() else required)
            for one in arguments
        ]
    )


# Descriptions of inputs. They never have a value, because inputs may be private.

_CALLED_WITH = "called with "
_MOST_NODES = 1000  # that are looked at
_MOST_LEVELS = 4
_MOST_CHARACTERS = 400


def outline(value: Any) -> str:
    """The types and shapes in `value`: `dict {ids: Tensor int64 [1, 7], mask: ...}`; bounded."""
    return _cut(_outline(value, iter(range(_MOST_NODES)), _MOST_LEVELS))


def outlines(items: Sequence[Any]) -> str:
    """The types and shapes of items: `3 x Tensor float32 [4], Tensor float32 [5]`; bounded."""
    return _cut(_counted(items, iter(range(_MOST_NODES)), _MOST_LEVELS))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def _outline(node: Any, left: Iterator[int], levels: int) -> str:
    try:
        return _inside(node, left, levels)
    except Exception:  # noqa: BLE001  # of a user's class, while an error is described
        return type(node).__name__


def _inside(node: Any, left: Iterator[int], levels: int) -> str:
    name = type(node).__name__
    if is_rows(node):
        return _tensor(name, node)
    parts = None if isinstance(node, type) else children(node)
    if parts is None:
        return name
    keys, values, _ = parts
    if isinstance(keys, range):
        inside = _counted(values, left, levels - 1) if keys and levels else ""
        return f"{name} of {len(keys)}: {inside}" if inside else f"{name} of {len(keys)}"
    if not levels:
        return f"{name} of {len(keys)}"
    named = [
        f"{_key(key)}: {_outline(value, left, levels - 1)}"
        for key, value, _ in zip(keys, values, left, strict=False)
    ]
    more = ["..."] if len(named) < len(keys) else []
    return f"{name} {{{', '.join(named + more)}}}"


def _counted(values: Collection[Any], left: Iterator[int], levels: int) -> str:
    """The outlines of values, each kind once."""
    kinds = Counter(_outline(one, left, levels) for one, _ in zip(values, left, strict=False))
    more = ["..."] if kinds.total() < len(values) else []
    counts = [kind if count == 1 else f"{count} x {kind}" for kind, count in kinds.items()]
    return ", ".join(counts + more)


def _tensor(name: str, rows: Any) -> str:
    dtype = str(rows.dtype).removeprefix("torch.")
    if not isinstance(rows, Tensor):
        return f"{name} {dtype} {list(rows.shape)}"
    shape = "nested" if rows.is_nested else str(list(rows.shape))
    return f"{name} {dtype} {shape}" + (f" on {rows.device}" if rows.device.type != "cpu" else "")


def is_name(key: Any) -> bool:
    """Whether a key is a name. Any other key may be private data, and is not shown."""
    return isinstance(key, str) and key.isidentifier()


def _key(key: Any) -> str:
    return key if is_name(key) else f"a {type(key).__name__}"
