"""What can be told of a function without calling it: its kind, and a name for messages."""

import functools
import inspect


def is_async(fn: object) -> bool:
    """Whether calling `fn` gives a coroutine."""
    return any(map(inspect.iscoroutinefunction, _callables(fn)))


def gives_async(fn: object) -> bool:
    """Whether calling `fn` gives a coroutine or an async generator."""
    return is_async(fn) or any(map(inspect.isasyncgenfunction, _callables(fn)))


def name_of(fn: object) -> str:
    """That of a function, or of the class of what can be called."""
    fn = _unwrapped(fn)
    return getattr(fn, "__name__", type(fn).__name__)


def _unwrapped(fn: object) -> object:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _callables(fn: object) -> tuple[object, object]:
    fn = _unwrapped(fn)
    return fn, getattr(fn, "__call__", None)  # noqa: B004  # an object's may be asynchronous
