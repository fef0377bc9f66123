"""What may be a source, a function and a concurrency."""

from collections.abc import AsyncIterator
from enum import Enum
from functools import partial
from typing import Any

import pytest

from aiopar.data._checks import check_concurrency, check_function, check_source, is_stateful
from tests.data.stateful import CountedByItsLoader, Positioned


class Indexed:
    """Iterable in the old way: by index."""

    def __getitem__(self, index: int) -> int:
        raise IndexError


class Colour(Enum):
    RED = 1


async def later() -> AsyncIterator[int]:
    yield 0


def test_what_can_be_iterated_is_a_source() -> None:
    sources: list[Any] = [[], range(3), iter(()), Indexed(), later(), Colour]
    assert all(check_source(source) is source for source in sources)
    # A function that makes one is not, nor a class of them.
    with pytest.raises(TypeError, match="expected an iterable or async iterable, got function"):
        check_source(later)
    with pytest.raises(TypeError, match="or async iterable, got the class Indexed"):
        check_source(Indexed)


def test_what_can_be_called_is_a_function() -> None:
    functions: list[Any] = [abs, Indexed, partial(abs)]
    assert all(check_function(fn) is fn for fn in functions)
    with pytest.raises(TypeError, match="expected a callable, got 3"):
        check_function(3)  # type: ignore[type-var]


def test_concurrency_is_positive_or_none() -> None:
    assert [check_concurrency(given) for given in (None, 1, 64)] == [None, 1, 64]
    with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
        check_concurrency(0)


def test_what_tells_its_state_unasked_for_anything_is_stateful() -> None:
    assert is_stateful(Positioned())
    assert not is_stateful(range(3))
    assert not is_stateful(CountedByItsLoader())
