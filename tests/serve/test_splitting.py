"""`Batcher`: how a batch that fails is split, and what each of its callers gets."""

import asyncio
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from aiopar import DeviceExecutor
from aiopar.errors import InvalidInput, OutputMismatch

from .batches import LONG, Bad, open_batcher, outcomes_of


class Worse(Exception):
    pass


class Batch:
    """The items 0, 1, ... in one batch of a batcher whose function is `compute`."""

    def __init__(
        self,
        count: int,
        compute: Callable[[list[int]], object],
        workers: DeviceExecutor | None = None,
    ) -> None:
        self.runs: list[list[int]] = []
        self.outcomes: dict[int, Any] = {}
        self._compute = compute
        asyncio.run(self._run(count, workers))

    async def _run(self, count: int, workers: DeviceExecutor | None) -> None:
        options: dict[str, Any] = {"max_batch_size": count, "max_queue_delay": LONG}
        async with open_batcher(workers, self._function, **options) as batcher:
            self.outcomes = dict(enumerate(await outcomes_of(batcher, range(count))))

    def _function(self, items: list[int]) -> list[int]:
        self.runs.append(items)
        self._compute(items)
        return items

    @property
    def sizes(self) -> list[int]:
        return [len(items) for items in self.runs]

    @property
    def errors(self) -> dict[int, BaseException]:
        return {n: it for n, it in self.outcomes.items() if isinstance(it, BaseException)}


def failing(*bad: int, error: type[Exception] = Bad) -> Callable[[list[int]], object]:
    """A function that fails for these items."""

    def compute(items: list[int]) -> None:
        found = sorted({*bad} & {*items})
        if found:
            raise error(found)

    return compute


def test_a_batch_that_succeeds_runs_once(workers: DeviceExecutor) -> None:
    batch = Batch(5, failing(), workers)
    assert batch.runs == [[0, 1, 2, 3, 4]]
    assert batch.outcomes == dict(enumerate(range(5)))


def test_one_bad_item_stands_alone_in_the_end(workers: DeviceExecutor) -> None:
    batch = Batch(8, failing(5), workers)
    assert batch.runs == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [4, 5],
        [4],
        [5],
        [6, 7],
    ]
    assert list(batch.errors) == [5]
    assert batch.errors[5].args == ([5],)
    assert batch.errors[5].__notes__ == ["raised by one item of a batch of 8"]


@given(count=st.integers(1, 40), data=st.data())
def test_only_bad_items_fail_and_no_item_runs_too_often(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1)))
    batch = Batch(count, failing(*bad))
    assert {*batch.errors} == bad
    assert bad <= {items[0] for items in batch.runs if len(items) == 1}
    for n in range(count):
        assert sum(n in items for items in batch.runs) <= 1 + math.ceil(math.log2(count))
    assert sorted(batch.outcomes) == list(range(count))


@pytest.mark.parametrize("error", [Bad, InvalidInput, torch.OutOfMemoryError])
def test_bad_items_before_the_good_ones_fail_alone(
    workers: DeviceExecutor, error: type[Exception]
) -> None:
    batch = Batch(32, failing(*range(4), error=error), workers)
    assert [*batch.errors] == [0, 1, 2, 3]
    assert batch.sizes == [32, 16, 8, 4, 2, 1, 1, 2, 1, 1, 4, 8, 16]


@pytest.mark.parametrize("count", [32, 256])
def test_the_calls_of_a_batch_in_which_all_items_fail(workers: DeviceExecutor, count: int) -> None:
    batch = Batch(count, failing(*range(count)), workers)
    assert {item: error.args for item, error in batch.errors.items()} == {
        item: ([item],) for item in range(count)
    }
    # Halving to the end would take 2 * count - 1 runs.
    assert len(batch.sizes) <= count + 2 * math.log2(count)


def test_a_good_item_behind_many_bad_ones(workers: DeviceExecutor) -> None:
    batch = Batch(32, failing(*range(31)), workers)
    assert [*batch.errors] == [*range(31)]
    assert batch.sizes == [
        *(32, 16, 8, 4, 2, 1, 1, 2, 1, 1, 4),
        *[1] * 4,
        8,
        *[1] * 8,
        16,
        *[1] * 16,
    ]


def test_a_wrong_number_of_outputs_is_not_split(workers: DeviceExecutor) -> None:
    batch = Batch(8, failing(3, error=OutputMismatch), workers)
    assert batch.sizes == [8]
    assert {*batch.errors} == {*range(8)}


def test_a_wrong_number_of_outputs_for_a_part_is_that_parts(workers: DeviceExecutor) -> None:
    def compute(items: list[int]) -> None:
        if len(items) == 8:
            raise Bad
        if len(items) == 4 and 0 in items:
            raise OutputMismatch

    batch = Batch(8, compute, workers)
    assert batch.sizes == [8, 4, 4]
    assert {*batch.errors} == {0, 1, 2, 3}


def test_out_of_memory_is_halved_until_it_fits(workers: DeviceExecutor) -> None:
    def compute(items: list[int]) -> None:
        if len(items) > 3:
            raise torch.OutOfMemoryError

    batch = Batch(9, compute, workers)
    assert batch.errors == {}
    assert batch.sizes == [9, 5, 3, 2, 2, 2], "as many as had not fitted are not tried again"


def test_an_item_that_does_not_fit_by_itself_says_nothing_of_batches(
    workers: DeviceExecutor,
) -> None:
    def compute(items: list[int]) -> None:
        if 4 in items or len(items) > 5:
            raise torch.OutOfMemoryError

    batch = Batch(16, compute, workers)
    assert [*batch.errors] == [4]
    assert batch.sizes == [16, 8, 4, 4, 2, 1, 1, 2, 8, 4, 4]


@pytest.mark.parametrize("error", [Bad, torch.OutOfMemoryError])
def test_what_a_failed_try_had_allocated_is_let_go_of_before_the_next(
    error: type[Exception],
) -> None:
    allocated: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def inner(items: list[int]) -> None:
        activations = torch.ones(len(items))
        allocated.append(weakref.ref(activations))
        try:
            raise Worse
        except Worse as worse:
            if 0 in items:
                raise error from worse

    def compute(items: list[int]) -> None:
        hidden = torch.ones(len(items))
        alive.append(sum(one() is not None for one in allocated))
        allocated.append(weakref.ref(hidden))
        inner(items)

    batch = Batch(8, compute)
    assert batch.sizes == [8, 4, 2, 1, 1, 2, 4]
    # The caller sees what its own item's error holds.
    assert alive == [0, 0, 0, 0, *[0 if error is torch.OutOfMemoryError else 2] * 3]
