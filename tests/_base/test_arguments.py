"""`aiopar._base.arguments`: checks of arguments, and what kind of function a callable is."""

import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from enum import IntEnum
from fractions import Fraction
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import aiopar
from aiopar._base.arguments import (
    as_list,
    check_int,
    check_number,
    gives_async,
    is_async,
    name_of,
    returns_coroutine,
)
from aiopar.data import AsyncDataLoader, Pipeline
from aiopar.serve import Batcher

# Values


class Level(IntEnum):
    HIGH = 3


def test_numbers_in_range_are_returned() -> None:
    assert check_int("count", 3, at_least=3) == 3
    assert check_number("seconds", 0.5, zero=False) == 0.5
    assert check_number("seconds", 0, zero=True) == 0
    assert check_number("seconds", math.inf, zero=False) == math.inf


def test_integral_and_real_values_become_plain_numbers() -> None:
    for whole in 3, np.int64(3), np.uint8(3), Level.HIGH:
        count = check_int("count", cast(int, whole), at_least=3)
        assert (count, type(count)) == (3, int)
    for half in 0.5, np.float32(0.5), np.float64(0.5), Fraction(1, 2):
        seconds = check_number("seconds", cast(float, half), zero=False)
        assert (seconds, type(seconds)) == (0.5, float)


NO_NUMBERS = [True, np.True_, "1", None, 1j]


@pytest.mark.parametrize("given", [1.0, np.float32(1), *NO_NUMBERS])
def test_other_types_than_ints_are_named(given: Any) -> None:
    with pytest.raises(TypeError, match=f"count must be an int, not {type(given).__name__}"):
        check_int("count", given, at_least=1)


@pytest.mark.parametrize("given", NO_NUMBERS)
def test_other_types_than_numbers_are_named(given: Any) -> None:
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


TWO: Any = np.int64(2)
MINUTE: Any = np.float32(60)


def test_an_executor_accepts_numpys_numbers() -> None:
    with aiopar.DeviceExecutor(["cpu"] * 2, max_pending=TWO, num_threads=TWO) as executor:
        assert executor.on(worker=TWO - 1).submit(torch.get_num_threads).result() == 2


@pytest.mark.anyio
async def test_other_classes_accept_numpys_numbers() -> None:
    async with aiopar.Parallel(TWO, _Unit(), max_pending=TWO) as parallel:
        await parallel.put(3)
        assert await parallel.get() == -3
    async with Batcher(list, max_batch_size=TWO, timeout=MINUTE, collate_fn=list) as batcher:
        assert await batcher(3, timeout=MINUTE, priority=TWO) == 3
    pipeline = Pipeline(range(4), timeout=MINUTE, max_failures=TWO).map(abs, concurrency=TWO)
    batches = pipeline.shuffle(TWO).flat_map(lambda n: [n], concurrency=TWO).batch(TWO)
    assert sorted(map(len, [batch async for batch in batches.prefetch(TWO)])) == [2, 2]
    assert [n async for n in aiopar.map(abs, range(4), concurrency=TWO)] == [0, 1, 2, 3]
    async with AsyncDataLoader(
        range(4), num_workers=TWO, prefetch_factor=TWO, timeout=MINUTE, max_failures=TWO
    ) as stream:
        assert [int(n) async for n in stream] == [0, 1, 2, 3]


class _Unit(aiopar.Parallelizable):
    def forward_backward(self, x: int) -> int:
        return -x


def test_an_error_of_an_iterable_is_raised_unchanged() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        as_list("numbers", Broken(), "ints")
    with pytest.raises(TypeError, match="numbers must be an iterable of ints, not the class list"):
        as_list("numbers", cast(Any, list), "ints")


# Callables


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
def test_functions_callable_objects_and_partials(
    wraps: int, fn: Callable[[int], object], coroutine: bool, asynchronous: bool, name: str
) -> None:
    for _ in range(wraps):
        fn = partial(fn)
    assert (is_async(fn), gives_async(fn)) == (coroutine, asynchronous)
    assert name_of(fn) == name
