"""Coroutine functions that fail or are cancelled, and functions that only look like one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.serve import Batcher

from .batches import Callers, outcomes_of, until
from .coroutines import Held, called, double
from .streams import full

# As with a plain function.


@pytest.mark.anyio
@pytest.mark.parametrize("unbatch_fn", [None, list])
async def test_outputs_that_do_not_match_the_batch(unbatch_fn: Any) -> None:
    async def fn(batch: list[int]) -> list[int]:
        return batch[1:]

    async with Batcher(fn, **full(3), unbatch_fn=unbatch_fn) as batcher:
        outcomes = await called(batcher, 1, 2, 3)
    for error in outcomes.values():
        with pytest.raises(aiopar.OutputMismatch, match=r"returned 2 outputs .* of 3 items"):
            raise error


# Other parties that may end the task.


@pytest.mark.asyncio
async def test_a_batch_cancelled_by_another_party_runs_once_more() -> None:
    held = Held()
    before = asyncio.all_tasks()
    async with Batcher(held, collate_fn=list) as batcher, anyio.create_task_group() as tasks:
        callers = Callers(batcher, tasks)
        callers.call(1)
        await until(lambda: len(held.runs) == 1)
        (task,) = (task for task in asyncio.all_tasks() - before if "drive" in repr(task))
        task.cancel()
        await until(lambda: len(held.runs) == 2)
        held.let_on()
    assert callers.outcomes == {1: "1"}


@pytest.mark.asyncio
async def test_a_batch_cancelled_before_it_begins_is_begun_again() -> None:
    before = asyncio.all_tasks()
    async with Batcher(double) as batcher:
        call = asyncio.ensure_future(batcher(torch.ones(1)))
        await asyncio.sleep(0)
        (task,) = asyncio.all_tasks() - before - {call}
        task.cancel()
        assert await call == 2
        assert batcher.stats().batch_sizes == {1: 1}


@pytest.mark.asyncio
async def test_an_item_for_which_the_function_raises_a_cancellation_fails_alone() -> None:
    async def fn(batch: list[Any]) -> list[Any]:
        if "bad" in batch:
            part = asyncio.ensure_future(asyncio.sleep(0))
            part.cancel()
            await part
        return batch

    items = ["good", "bad", "fine"]
    async with Batcher(fn, **full(3)) as batcher:
        good, bad, fine = await outcomes_of(batcher, items)
    assert (good, fine) == ("good", "fine")
    assert isinstance(bad, RuntimeError)
    assert "raised a cancellation" in str(bad)
    assert isinstance(bad.__cause__, asyncio.CancelledError)


@pytest.mark.anyio
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
async def test_errors_that_only_end_threads_reach_the_callers(error: type[BaseException]) -> None:
    async def fn(batch: list[Any]) -> list[Any]:
        if batch == [1]:
            raise error
        return batch

    async with Batcher(fn, collate_fn=list) as batcher:
        with pytest.raises(error):
            await batcher(1)
        assert await batcher(2) == 2


# Functions that do not look asynchronous.


def _returns_coroutine(batch: Tensor) -> Awaitable[Tensor]:
    return double(batch)


def _generator(batch: Tensor) -> Iterator[Tensor]:
    yield batch


def _returns_generator(batch: Tensor) -> Iterator[Tensor]:
    return _generator(batch)


async def _async_generator(batch: Tensor) -> AsyncIterator[Tensor]:
    yield batch


def _returns_async_generator(batch: Tensor) -> AsyncIterator[Tensor]:
    return _async_generator(batch)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (_returns_coroutine, "a coroutine"),
        (_returns_generator, "a generator"),
        (_returns_async_generator, "an async generator"),
    ],
)
async def test_a_plain_function_that_returns_a_coroutine_fails_with_advice(
    fn: Callable[[Tensor], Any], kind: str
) -> None:
    async with Batcher(fn) as batcher:
        with pytest.raises(TypeError, match=f"returned {kind} .* pass the function"):
            await batcher(torch.ones(1))
