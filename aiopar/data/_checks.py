"""Arguments, checked before anything begins."""

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, TypeVar

from .._checks import check_int

F = TypeVar("F", bound=Callable[..., Any])


def check_source(source: Any) -> Any:
    """`source`, if it can be iterated.

    Raises:
        TypeError: It cannot.
    """
    if not isinstance(source, Iterable | AsyncIterable) and not hasattr(source, "__getitem__"):
        raise TypeError(f"expected an iterable or async iterable, got {type(source).__name__}")
    return source


def check_function(fn: F) -> F:
    """`fn`, if it can be called.

    Raises:
        TypeError: It cannot.
    """
    if not callable(fn):
        raise TypeError(f"expected a callable, got {fn!r}")
    return fn


def check_concurrency(concurrency: int | None) -> int | None:
    """`concurrency`, if it is None or a positive int.

    Raises:
        TypeError: It is neither None nor an int.
        ValueError: It is below 1.
    """
    return None if concurrency is None else check_int("concurrency", concurrency, at_least=1)
