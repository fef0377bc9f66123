"""Arguments that are numbers, or the keyword arguments of a call, checked before any work starts.

What comes back is a plain int or float, whatever was given (NumPy's, an `IntEnum`): it is that
which is to be kept.
"""

import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any


def as_int(name: str, value: int) -> int:
    """`value` as a plain int, if it is one or can be an index.

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
    raise TypeError(f"{name} must be an int, not {type(value).__name__}")


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
