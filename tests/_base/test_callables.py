"""What can be told of a function without calling it."""

from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from torch import nn

import aiopar
from aiopar._base.arguments import gives_async, is_async, name_of, returns_coroutine


def plain(n: int) -> int:
    return n


async def later(n: int) -> int:
    return n


async def several(n: int) -> AsyncIterator[int]:
    yield n


class Plain:
    def __call__(self, n: int) -> int:
        return n


class Later:
    async def __call__(self, n: int) -> int:
        return n


class Several:
    async def __call__(self, n: int) -> AsyncIterator[int]:
        yield n


class Module(nn.Module):
    def forward(self, n: int) -> int:
        return n


class LaterModule(nn.Module):
    async def forward(self, n: int) -> int:
        return n


@returns_coroutine
def marked(n: int) -> Coroutine[Any, Any, int]:
    return later(n)


@pytest.mark.parametrize("wraps", [0, 1, 2])
@pytest.mark.parametrize(
    ("fn", "coroutine", "asynchronous", "name"),
    [
        (plain, False, False, "plain"),
        (later, True, True, "later"),
        (several, False, True, "several"),
        (Plain(), False, False, "Plain"),
        (Later(), True, True, "Later"),
        (Several(), False, True, "Several"),
        (abs, False, False, "abs"),
        (Module(), False, False, "Module"),
        (LaterModule(), True, True, "LaterModule"),
        (marked, True, True, "marked"),
        (aiopar.DataParallel(Module(), ["cpu"]), True, True, "DataParallel"),
        (aiopar.ReplicaPool(Module(), ["cpu"]), True, True, "ReplicaPool"),
        (aiopar.ReplicaPool(Module(), ["cpu"]).__call__, True, True, "__call__"),
        (aiopar.Batcher(plain), True, True, "Batcher"),
    ],
)
def test_functions_objects_and_partials_of_them(
    wraps: int, fn: Callable[[int], object], coroutine: bool, asynchronous: bool, name: str
) -> None:
    for _ in range(wraps):
        fn = partial(fn)
    assert (is_async(fn), gives_async(fn)) == (coroutine, asynchronous)
    assert name_of(fn) == name
