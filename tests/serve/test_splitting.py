"""`Batcher`: how a batch that fails is split, and what each of its callers gets."""

import asyncio
import math
import weakref
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from aiopar import DeviceExecutor, use_executor
from aiopar.errors import InvalidInput, OutputMismatch
from aiopar.serve import Batcher, ReplicaPool
from tests.home import AtHome

from .batches import Bad, coroutine
from .streams import full, of_kind


class Worse(Exception):
    pass


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        super().__init__()
        self._fn = AtHome(fn)

    def forward(self, batch: Any) -> Any:
        return self._fn(batch)


class Batch:
    """The items 0, 1, ... in one batch of a batcher whose function is `compute`."""

    def __init__(
        self,
        count: int,
        compute: Callable[[list[int]], object],
        workers: DeviceExecutor | None = None,
        kind: str = "function",
    ) -> None:
        self.runs: list[list[int]] = []
        self.outcomes: dict[int, Any] = {}
        self._compute = compute
        asyncio.run(self._run(count, workers, kind))

    async def _run(self, count: int, workers: DeviceExecutor | None, kind: str) -> None:
        make: dict[str, Callable[[], Any]] = {
            "function": lambda: AtHome(self._function),
            "pool": lambda: ReplicaPool(Calls(self._function), ["cpu", "cpu"]),
            "coroutine function": lambda: coroutine(self._function),
        }
        fn: Any = make[kind]() if kind in make else of_kind(kind, self._generate)
        async with AsyncExitStack() as stack:
            if workers is not None:
                stack.enter_context(use_executor(workers))
            if kind == "pool":
                await stack.enter_async_context(fn)
            batcher = await stack.enter_async_context(Batcher(fn, **full(count)))
            await asyncio.gather(*[self._call(batcher, kind, item) for item in range(count)])

    async def _call(self, batcher: Batcher[Any, Any], kind: str, item: int) -> None:
        try:
            if "generator" in kind:
                [self.outcomes[item]] = [part async for part in batcher.stream(item)]
            else:
                self.outcomes[item] = await batcher(item)
        except Exception as error:  # noqa: BLE001  # to be looked at
            self.outcomes[item] = error

    def _generate(self, items: list[int]) -> Generator[list[int]]:
        yield self._function(items)

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


def mismatch_in_a_half(items: list[int]) -> None:
    if len(items) == 8:
        raise Bad
    if len(items) == 4 and 0 in items:
        raise OutputMismatch


def too_large(most: int, *bad: int) -> Callable[[list[int]], object]:
    """A function that runs out of memory for more than `most` items, or for these items."""

    def compute(items: list[int]) -> None:
        if len(items) > most or {*bad} & {*items}:
            raise torch.OutOfMemoryError

    return compute


AFTER_FOUR = [32, 16, 8, 4, 2, 1, 1, 2, 1, 1, 4]
"""The parts of 32 items of which the first four are bad, until the second four run."""

SPLITS: dict[str, tuple[int, Callable[[list[int]], object], set[int], list[int]]] = {
    "no bad item": (5, failing(), set(), [5]),
    "one": (8, failing(5), {5}, [8, 4, 4, 2, 1, 1, 2]),
    **{
        f"four, {error.__name__}": (
            32,
            failing(*range(4), error=error),
            {*range(4)},
            [*AFTER_FOUR, 8, 16],
        )
        for error in (Bad, InvalidInput, torch.OutOfMemoryError)
    },
    "a good one behind many": (
        32,
        failing(*range(31)),
        {*range(31)},
        [*AFTER_FOUR, *[1] * 4, 8, *[1] * 8, 16, *[1] * 16],
    ),
    "a wrong number of outputs": (8, failing(3, error=OutputMismatch), {*range(8)}, [8]),
    "that of a half": (8, mismatch_in_a_half, {0, 1, 2, 3}, [8, 4, 4]),
    # As many as had not fitted are not tried again.
    "out of memory": (9, too_large(3), set(), [9, 5, 3, 2, 2, 2]),
    # An item that does not fit by itself says nothing of batches.
    "one too large": (16, too_large(5, 4), {4}, [16, 8, 4, 4, 2, 1, 1, 2, 8, 4, 4]),
}


@pytest.mark.parametrize(("count", "compute", "bad", "sizes"), SPLITS.values(), ids=SPLITS)
def test_the_parts_of_a_batch(
    workers: DeviceExecutor,
    count: int,
    compute: Callable[[list[int]], object],
    bad: set[int],
    sizes: list[int],
) -> None:
    batch = Batch(count, compute, workers)
    assert {*batch.errors} == bad
    assert batch.outcomes.items() >= {n: n for n in range(count) if n not in bad}.items()
    assert batch.sizes == sizes


KINDS = ["function", "coroutine function", "generator", "async generator", "pool"]


@pytest.mark.parametrize("kind", KINDS)
@given(count=st.integers(1, 40), data=st.data())
def test_only_bad_items_fail_and_no_item_runs_too_often(
    kind: str, count: int, data: st.DataObject
) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1)))
    batch = Batch(count, failing(*bad), kind=kind)
    assert {*batch.errors} == bad
    assert bad <= {items[0] for items in batch.runs if len(items) == 1}
    for n in range(count):
        assert sum(n in items for items in batch.runs) <= 1 + math.ceil(math.log2(count))
    assert sorted(batch.outcomes) == list(range(count))


@pytest.mark.parametrize("count", [32, 256])
def test_the_calls_of_a_batch_in_which_all_items_fail(workers: DeviceExecutor, count: int) -> None:
    batch = Batch(count, failing(*range(count)), workers)
    assert {item: error.args for item, error in batch.errors.items()} == {
        item: ([item],) for item in range(count)
    }
    # Halving to the end would take 2 * count - 1 runs.
    assert len(batch.sizes) <= count + 2 * math.log2(count)


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
