"""Numbers that are given as options."""

import math
from collections.abc import Iterator
from enum import IntEnum
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
import torch

import aiopar
from aiopar._base.arguments import as_list, check_int, check_number
from aiopar.data import AsyncDataLoader, Pipeline
from aiopar.serve import Batcher


class Level(IntEnum):
    HIGH = 3


def test_numbers_in_range_are_returned() -> None:
    assert check_int("count", 3, at_least=3) == 3
    assert check_number("seconds", 0.5, zero=False) == 0.5
    assert check_number("seconds", 0, zero=True) == 0
    assert check_number("seconds", math.inf, zero=False) == math.inf


@pytest.mark.parametrize("given", [3, np.int64(3), np.uint8(3), Level.HIGH])
def test_what_counts_as_an_int_becomes_a_plain_one(given: Any) -> None:
    checked = check_int("count", given, at_least=3)
    assert (checked, type(checked)) == (3, int)


@pytest.mark.parametrize("given", [0.5, np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_what_counts_as_a_number_becomes_a_plain_one(given: Any) -> None:
    checked = check_number("seconds", given, zero=False)
    assert (checked, type(checked)) == (0.5, float)


@pytest.mark.parametrize("given", [True, np.True_, 1.0, np.float32(1), "1", None])
def test_what_is_no_int_is_named(given: Any) -> None:
    with pytest.raises(TypeError, match=f"count must be an int, not {type(given).__name__}"):
        check_int("count", given, at_least=1)


@pytest.mark.parametrize("given", [True, np.True_, "1", None, 1j])
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


TWO: Any = np.int64(2)
MINUTE: Any = np.float32(60)


def test_an_executor_takes_numpys_numbers() -> None:
    with aiopar.DeviceExecutor(["cpu"] * 2, max_pending=TWO, num_threads=TWO) as executor:
        assert executor.on(worker=TWO - 1).submit(torch.get_num_threads).result() == 2


@pytest.mark.anyio
async def test_what_runs_units_batches_and_items_takes_numpys_numbers() -> None:
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


def test_an_error_of_what_is_iterated_is_its_own() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        as_list("numbers", Broken(), "ints")
    with pytest.raises(TypeError, match="numbers must be an iterable of ints, not the class list"):
        as_list("numbers", cast(Any, list), "ints")
