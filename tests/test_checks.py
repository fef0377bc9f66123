"""Numbers that are given as options."""

import math
from typing import Any

import pytest

from aiopar._checks import check_int, check_number


def test_numbers_in_range_are_returned() -> None:
    assert check_int("count", 3, at_least=3) == 3
    assert check_number("seconds", 0.5, zero=False) == 0.5
    assert check_number("seconds", 0, zero=True) == 0
    assert check_number("seconds", math.inf, zero=False) == math.inf


@pytest.mark.parametrize("given", [True, 1.0, "1", None])
def test_what_is_no_int_is_named(given: Any) -> None:
    with pytest.raises(TypeError, match=f"count must be an int, not {type(given).__name__}"):
        check_int("count", given, at_least=1)


@pytest.mark.parametrize("given", [True, "1", None, 1j])
def test_what_is_no_number_is_named(given: Any) -> None:
    with pytest.raises(TypeError, match=f"seconds must be a number, not {type(given).__name__}"):
        check_number("seconds", given, zero=True)


def test_numbers_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="count must be at least 2, got 1"):
        check_int("count", 1, at_least=2)
    with pytest.raises(ValueError, match="seconds must be above 0, got 0"):
        check_number("seconds", 0, zero=False)
    with pytest.raises(ValueError, match="seconds must be at least 0, got -1"):
        check_number("seconds", -1, zero=True)
    with pytest.raises(ValueError, match="seconds must be above 0, got nan"):
        check_number("seconds", math.nan, zero=False)
