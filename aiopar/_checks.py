"""Arguments of common kinds, checked before any work starts.

What comes back of a number is a plain int or float, whatever was given (NumPy's, an `IntEnum`): it
is that which is to be kept.
"""

import operator
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, TypeVar

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


def check_instance(name: str, given: object, kind: type) -> None:
    """Raise TypeError unless `given` is an object of that class."""
    if not isinstance(given, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, not {described(given)}")


def described(given: object) -> str:
    """Its class, for messages; of a class, which may be given in the place of an object, itself."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
