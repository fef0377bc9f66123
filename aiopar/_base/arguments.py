"""What a REPL or a debugger shows of an object: `<Class and how it is>`, briefly."""

import asyncio
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from numbers import Real
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


def as_int(name: str, value: int, expected: str = "an int") -> int:
    """`value` as a plain int, if it is one or can be an index.

    Args:
        name: What the argument is called.
        value: It.
        expected: What it must be, for the message: where an int is one of several things.

    Raises:
        TypeError: It cannot; a bool, though it can, is none.
    """
    if type(value) is int:  # the commonest by far, and some are checked in each call
        return value
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be {expected}, not {type(value).__name__}")


def as_number(name: str, value: float) -> float:
    """`value` as a plain int or float, if it is a real number.

    Raises:
        TypeError: It is none; a bool is none either.
    """
    if type(value) is float or type(value) is int:  # as above
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    return float(value)


def check_int(name: str, value: int, *, at_least: int) -> int:
    """`value` as a plain int, if it is one of at least that.

    Raises:
        TypeError: It is no int; a bool is none either.
        ValueError: It is too low.
    """
    value = as_int(name, value)
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return value


def check_number(name: str, value: float, *, zero: bool) -> float:
    """`value` as a plain number, if it is one above 0 (or, with `zero`, 0); infinite ones are.

    Raises:
        TypeError: It is no number.
        ValueError: It is too low, or not a number (NaN).
    """
    value = as_number(name, value)
    if not (value >= 0 if zero else value > 0):
        raise ValueError(f"{name} must be {'at least' if zero else 'above'} 0, got {value}")
    return value


def as_kwargs(name: str, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """`given`, or an empty dict for None.

    Raises:
        TypeError: It is no mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict or None, not {type(given).__name__}")
    return given


def as_list(name: str, given: Iterable[T], of: str) -> list[T]:
    """What `given` holds.

    Args:
        name: What the argument is called.
        given: It.
        of: What it should be an iterable of, for the message.

    Raises:
        TypeError: It is no iterable.
    """
    try:
        return list(given)
    except TypeError:
        if is_iterable(given):  # and its own `__iter__` or `__next__` has raised that
            raise
    raise TypeError(f"{name} must be an iterable of {of}, not {described(given)}")


def is_iterable(given: object) -> bool:
    """Whether `iter` takes it."""
    kind = type(given)  # where `iter` looks: a class that has `__iter__` cannot be iterated itself
    return hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")


def length_of(given: object) -> int | None:
    """`len(given)`, or None if it has no length."""
    try:
        return len(given)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_instance(name: str, given: object, kind: type) -> None:
    """Raise TypeError unless `given` is an object of that class."""
    if not isinstance(given, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, not {described(given)}")


def described(given: object) -> str:
    """Its class, for messages; of a class, which may be given in the place of an object, itself."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


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


S = TypeVar("S")

_MOST_LISTED = 8


def short_repr(describe: Callable[[S], str]) -> Callable[[S], str]:
    """Make a `__repr__` of `describe`, which says what follows the name of the class.

    That may only read what is there: no lock is taken, for who asks may be a debugger that has
    stopped a thread which holds it. What it fails with (of an object that is half made, say) is
    shown as such: a `repr` that raises hides the error in whose report it is.
    """

    @functools.wraps(describe)
    def shown(self: S) -> str:
        # A private subclass is to its user what it is derived from.
        kind = next(one for one in type(self).__mro__ if not one.__name__.startswith("_"))
        try:
            said = describe(self)
        except Exception:  # noqa: BLE001  # whatever it is
            said = "half made"
        return f"<{kind.__name__} {said}>"

    return shown


def listed(items: Collection[object]) -> str:
    """The first few of them, and how many there are if these are not all."""
    shown = [str(item) for item in islice(items, _MOST_LISTED)]
    if len(items) > _MOST_LISTED:
        shown.append(f"... ({len(items)})")
    return ", ".join(shown)
