"""Checks of arguments and of callables, and short reprs of objects."""

import asyncio
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch import nn

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=Coroutine[Any, Any, Any])

# Values. A wrong type raises TypeError, a wrong value ValueError; both name the argument.


def as_int(name: str, value: int, expected: str = "an int") -> int:
    """Return an int, or another type of index (NumPy's ints), as a plain int; refuse a bool."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be {expected}, not {type(value).__name__}")


def as_number(name: str, value: float) -> float:
    """Return a real number as a plain int or float; refuse a bool."""
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    return float(value)


def check_int(name: str, value: int, *, at_least: int) -> int:
    """As `as_int`, but at least `at_least`."""
    value = as_int(name, value)
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return value


def check_bound(name: str, value: int | None) -> int | None:
    """As `check_int`, at least 1. None means no bound, and stays None."""
    return None if value is None else check_int(name, value, at_least=1)


def check_number(name: str, value: float, *, zero: bool) -> float:
    """As `as_number`, but above 0, or with `zero` at least 0; infinity is allowed."""
    value = as_number(name, value)
    if not (value >= 0 if zero else value > 0):
        raise ValueError(f"{name} must be {'at least' if zero else 'above'} 0, got {value}")
    return value


def check_timeout(timeout: float | None, name: str = "timeout") -> float | None:
    """As `check_number`, at least 0. None means no time limit, and stays None."""
    return None if timeout is None else check_number(name, timeout, zero=True)


def as_kwargs(name: str, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a mapping as it is, and an empty dict for None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict or None, not {type(given).__name__}")
    return given


def as_list(name: str, given: Iterable[T], of: str) -> list[T]:
    """Return the items of an iterable; `of` names the right items in the message."""
    try:
        return list(given)
    except TypeError:
        if is_iterable(given):  # the error comes from the user's `__iter__` or `__next__`
            raise
    raise TypeError(f"{name} must be an iterable of {of}, not {described(given)}")


def is_iterable(given: object) -> bool:
    """Whether `iter` accepts `given`."""
    kind = type(given)  # `iter` looks at the type: a class with `__iter__` is not iterable itself
    return hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")


def items_of(given: Any) -> Iterator[Any]:
    """Return `iter(given)`; a map-style dataset ends after `len` items, without an IndexError."""
    if hasattr(type(given), "__iter__") or (length := length_of(given)) is None:
        return iter(given)
    return islice(iter(given), length)


class AsyncOnly:
    """An async iterable. A plain `for` loop over it raises an error that says `async for`."""

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers then refuse a plain `for`

        def __iter__(self) -> NoReturn:
            raise TypeError(f"{type(self).__name__} must be read with `async for`, not with `for`")


def length_of(given: object) -> int | None:
    """Return `len(given)`, or None if `given` has no length."""
    try:
        return len(given)  # type: ignore[arg-type]
    except TypeError:
        return None


def expected_length(given: object) -> int | None:
    """Return the length of `given`, or the one that it expects to have; None: not known."""
    try:
        length = operator.length_hint(given, -1)
    except Exception:  # noqa: BLE001  # a `__len__` that raises NotImplementedError, of a stream
        return None
    return None if length < 0 else length


def check_instance(name: str, given: object, kind: type) -> None:
    """Raise TypeError unless `given` is an instance of `kind`."""
    if not isinstance(given, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, not {described(given)}")


def described(given: object) -> str:
    """Name the class of `given`, or `given` itself if it is a class, for a message."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


# Callables

_FUNCTIONS = (types.FunctionType, types.MethodType)
_ASYNCHRONOUS = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR

NOT_BEGUN = frozenset[type]((types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType))
"""The types of results that a worker must not return: their code would run later, elsewhere."""

_RETURNS_COROUTINE = "_returns_coroutine"  # the attribute that `returns_coroutine` sets

# The function of `inspect` sees the mark of `returns_coroutine` since Python 3.12. The function of
# asyncio always sees the mark, but ends with Python 3.15.
_is_coroutine_function: Callable[[object], bool] = (
    inspect.iscoroutinefunction if sys.version_info >= (3, 12) else asyncio.iscoroutinefunction
)


def returns_coroutine(fn: F) -> F:
    """Mark a plain function that returns a coroutine, so that `iscoroutinefunction` is true."""
    setattr(fn, _RETURNS_COROUTINE, True)
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(fn)
    fn._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return fn


def shown_as(call: C, name: str) -> C:
    """Return the coroutine `call` with the name that Python shows if nobody awaits it."""
    call.__qualname__ = name  # type: ignore[attr-defined]  # all coroutines have one
    return call


def is_async(fn: object) -> bool:
    """Whether a call of `fn` returns a coroutine."""
    return _is_coroutine_function(function_of(fn))


def gives_async(fn: object) -> bool:
    """Whether a call of `fn` returns a coroutine or an async generator."""
    return is_async(fn) or inspect.isasyncgenfunction(function_of(fn))


def generator_kind(fn: object) -> str | None:
    """Return in words which kind of generator function `fn` is; None if it is none."""
    function = function_of(fn)
    if inspect.isasyncgenfunction(function):
        return "an async generator function"
    return "a generator function" if inspect.isgeneratorfunction(function) else None


def function_of(fn: object) -> object:
    """Return the function that Python runs when `fn` is called."""
    fn = unwrapped(fn)
    if isinstance(fn, _FUNCTIONS) or not callable(fn):
        return fn
    call = type(fn).__call__
    # A module's own `__call__` returns what its `forward` returns.
    return fn.forward if isinstance(fn, nn.Module) and call is nn.Module.__call__ else call


def name_of(fn: object) -> str:
    """Return the name of a function, or of the class of another callable."""
    fn = unwrapped(fn)
    return getattr(fn, "__name__", type(fn).__name__)


def unwrapped(fn: object) -> object:
    """Return the callable inside nested `functools.partial` objects."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


_INSTEAD: dict[str, str] = {
    "a coroutine": "await it on the event loop, as in `await dp(x)`",
    "a generator": "run it step by step on a worker, with `iterate` of an executor",
    "an async generator": "read it with `async for` on the event loop",
}
"""What to do with each kind of result in `NOT_BEGUN`."""


def not_begun(made: Any, *, on_worker: bool = False) -> TypeError:
    """Make the error for a function that returned `made`, whose type is in `NOT_BEGUN`."""
    kind = type(made).__name__.replace("_", " ")
    kind = f"an {kind}" if kind.startswith("async") else f"a {kind}"
    if isinstance(made, types.CoroutineType):
        made.close()  # else Python warns that it was never awaited
    return TypeError(
        f"the function returned {kind} ({made.__qualname__}), whose code would run after the call: "
        + (_INSTEAD[kind] if on_worker else "pass the function that makes it")
    )


def check_callable(fn: object, *, generators: bool = False) -> None:
    """Raise TypeError unless workers can run `fn`: a callable, and no coroutine function.

    With `generators`, `fn` may be a generator function.
    """
    function = function_of(fn)
    if not callable(function):
        raise _not_callable(fn)
    # Each call comes here, and `inspect` is slow.
    code = getattr(function, "__code__", None)
    refused = _ASYNCHRONOUS if generators else _ASYNCHRONOUS | inspect.CO_GENERATOR
    marked = getattr(function, _RETURNS_COROUTINE, False)
    if marked or (code is not None and code.co_flags & refused):
        raise _not_plain(fn, marked)


def _not_callable(given: object) -> TypeError:
    what = repr(given) if isinstance(given, int | str | None) else described(given)
    if isinstance(given, types.CoroutineType):
        given.close()  # as in `not_begun`
        what = f"a coroutine ({given.__qualname__}), which must be awaited"
    return TypeError(
        f"expected a callable, got {what}: pass the function and its arguments separately, "
        "as in `run_sync(fn, x)`, not `run_sync(fn(x))`"
    )


def _not_plain(fn: object, marked: bool) -> TypeError:
    kind = (generator_kind(fn) or "a coroutine function").removesuffix(" function")
    instead, fn = _INSTEAD[kind], unwrapped(fn)
    name = getattr(fn, "__qualname__", type(fn).__name__)
    if kind == "a coroutine" and not marked:
        instead = "await it on the event loop, or give a worker functools.partial(anyio.run, fn)"
    elif marked and not isinstance(fn, nn.Module):
        called = f"{fn.__name__}(...)" if isinstance(fn, _FUNCTIONS) else f"{name.lower()}(x)"
        instead = f"await it on the event loop, as in `await {called}`"
    return TypeError(f"{name} is {kind} function, and workers run plain ones: {instead}")


# Reprs

_MOST_LISTED = 8


def short_repr(describe: Callable[[T], str]) -> Callable[[T], str]:
    """Make a `__repr__` from `describe`, which returns the text after the class name.

    `describe` must take no lock: a debugger may have stopped the thread that holds the lock.
    """

    @functools.wraps(describe)
    def shown(self: T) -> str:
        # A user knows the public base class of a private one.
        kind = next(one for one in type(self).__mro__ if not one.__name__.startswith("_"))
        try:
            said = describe(self)
        except Exception:  # noqa: BLE001  # it lacks attributes, and an error is reported
            said = "half made"
        return f"<{kind.__name__} {said}>"

    return shown


def listed(items: Collection[object]) -> str:
    """List the first items, and how many there are if some are left out."""
    shown = [str(item) for item in islice(items, _MOST_LISTED)]
    if len(items) > _MOST_LISTED:
        shown.append(f"... ({len(items)})")
    return ", ".join(shown)
