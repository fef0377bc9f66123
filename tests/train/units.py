"""Units of a `Parallel`, and reading their results."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiopar


def units(fn: Callable[[Any], Any]) -> Any:
    """Something that computes a unit by `fn(x)`."""
    return SimpleNamespace(forward_backward=fn)


def same(x: Any) -> Any:
    return x


async def fetched(parallel: aiopar.Parallel, count: int) -> list[Any]:
    return [await parallel.get() for _ in range(count)]


async def all_of(parallel: aiopar.Parallel) -> list[Any]:
    return [x async for x in parallel]


class Failure(Exception):
    """Can be weakly referenced, as builtin exceptions cannot."""
