"""What can be told of something callable without calling it: its kind, and a name for messages."""

import asyncio
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

F = TypeVar("F", bound=Callable[..., Any])

_FUNCTIONS = (types.FunctionType, types.MethodType)

_RETURNS_COROUTINE = "_returns_coroutine"
"""The attribute of functions marked by `returns_coroutine`, to be asked for where time counts."""

_module_call: object = nn.Module.__call__
_ASYNCHRONOUS = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


def returns_coroutine(fn: F) -> F:
    """Mark a plain function that returns a coroutine: `iscoroutinefunction` is true of it."""
    setattr(fn, _RETURNS_COROUTINE, True)
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(fn)
    fn._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return fn


# Who sees such a mark; `inspect` does since Python 3.12, and asyncio's goes with 3.16.
_is_coroutine_function: Callable[[object], bool] = (
    inspect.iscoroutinefunction if sys.version_info >= (3, 12) else asyncio.iscoroutinefunction
)


def is_async(fn: object) -> bool:
    """Whether calling `fn` gives a coroutine."""
    return _is_coroutine_function(function_of(fn))


def gives_async(fn: object) -> bool:
    """Whether calling `fn` gives a coroutine or an async generator."""
    return is_async(fn) or inspect.isasyncgenfunction(function_of(fn))


def generator_kind(fn: object) -> str | None:
    """What kind of generator function `fn` is, in words; None: it is none."""
    function = function_of(fn)
    if inspect.isasyncgenfunction(function):
        return "an async generator function"
    return "a generator function" if inspect.isgeneratorfunction(function) else None


def function_of(fn: object) -> object:
    """What Python runs when `fn` is called, as far as it says what kind of function it is."""
    fn = unwrapped(fn)
    if isinstance(fn, _FUNCTIONS) or not callable(fn):
        return fn
    call = type(fn).__call__
    # That of a module returns whatever its `forward` does, unless it has one of its own.
    return fn.forward if isinstance(fn, nn.Module) and call is nn.Module.__call__ else call


def name_of(fn: object) -> str:
    """That of a function, or of the class of what can be called."""
    fn = unwrapped(fn)
    return getattr(fn, "__name__", type(fn).__name__)


def unwrapped(fn: object) -> object:
    """What a partial, or one of a partial, calls in the end; anything else as it is."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def not_begun(made: Any) -> TypeError:
    """What to raise where a function has returned what was to be awaited, or iterated, instead."""
    kind = type(made).__name__.replace("_", " ")
    kind = f"an {kind}" if kind.startswith("async") else f"a {kind}"
    if isinstance(made, types.CoroutineType):
        made.close()  # else Python warns that nobody has awaited it
    return TypeError(
        f"the function returned {kind}, and was not seen to be {kind} function: give "
        "that function itself, or one that is defined as such"
    )


def check_callable(fn: object) -> None:
    """Raise TypeError unless `fn` is a plain callable, which workers can run."""
    # Most are plain functions: seen at a glance.
    if type(fn) is types.FunctionType and not fn.__code__.co_flags & _ASYNCHRONOUS:
        return
    function = unwrapped(fn)
    if not isinstance(function, _FUNCTIONS):
        if not callable(function):
            raise TypeError(f"expected a callable, got {fn!r}")
        # Where Python finds it, on the type. `inspect`, or the long way that a module goes to its
        # own attributes, would take longer than a whole call.
        kind = type(function)
        function = kind.__call__
        if function is _module_call:  # which returns what `forward` does
            function = getattr(kind, "forward", None)
    code = getattr(function, "__code__", None)
    asynchronous = code is not None and code.co_flags & _ASYNCHRONOUS
    if asynchronous or getattr(function, _RETURNS_COROUTINE, False):
        raise TypeError(
            f"{fn!r} is a coroutine function, and workers run plain ones: await it on the event "
            "loop, or give a worker functools.partial(anyio.run, fn)"
        )
