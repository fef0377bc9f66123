"""Units of a `Parallel`, and reading their results."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiopar


def units(fn: Callable[[Any], Any]) -> Any:
    """An object whose `forward_backward` is `fn`."""
    return SimpleNamespace(forward_backward=fn)


def same(x: Any) -> Any:
    return x


async def fetched(parallel: aiopar.Parallel, count: int) -> list[Any]:
    return [await parallel.get() for _ in range(count)]


async def all_of(parallel: aiopar.Parallel) -> list[Any]:
    return [x async for x in parallel]


class Failure(Exception):
    """An error that can be weakly referenced; builtin errors cannot."""
