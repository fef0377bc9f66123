"""Arguments, checked before anything begins."""

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, TypeVar

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


def check_count(name: str, count: int, *, at_least: int) -> int:
    """`count`, if it is an int of at least that.

    Raises:
        TypeError: It is no int.
        ValueError: It is too low.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} must be an int, not {type(count).__name__}")
    if count < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {count}")
    return count


def check_concurrency(concurrency: int | None) -> int | None:
    """`concurrency`, if it is None or a positive int.

    Raises:
        TypeError: It is neither None nor an int.
        ValueError: It is below 1.
    """
    return None if concurrency is None else check_count("concurrency", concurrency, at_least=1)


def check_seconds(name: str, seconds: float | None) -> float | None:
    """`seconds`, if it is None or a positive number.

    Raises:
        TypeError: It is neither None nor a number.
        ValueError: It is not positive.
    """
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be a number of seconds or None, not {type(seconds).__name__}")
    if not seconds > 0:
        raise ValueError(f"{name} must be positive, got {seconds}")
    return seconds
