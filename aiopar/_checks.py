"""Arguments that are numbers, checked before any work starts."""


def check_int(name: str, value: int, *, at_least: int) -> int:
    """`value`, if it is an int of at least that.

    Raises:
        TypeError: It is no int; a bool is none either.
        ValueError: It is too low.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return value


def check_number(name: str, value: float, *, zero: bool) -> float:
    """`value`, if it is a number above 0 (or, with `zero`, 0); infinite ones are.

    Raises:
        TypeError: It is no number.
        ValueError: It is too low, or not a number (NaN).
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not (value >= 0 if zero else value > 0):
        raise ValueError(f"{name} must be {'at least' if zero else 'above'} 0, got {value}")
    return value
