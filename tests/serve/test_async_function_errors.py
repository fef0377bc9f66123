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

from .batches import Bad, Callers, outcomes_of, until
from .coroutines import Held, called, double
from .streams import full

# As with a plain function.


@pytest.mark.anyio
async def test_only_the_bad_item_fails() -> None:
    runs: list[int] = []

    async def fn(batch: list[int]) -> list[int]:
        runs.append(len(batch))
        await anyio.lowlevel.checkpoint()
        if -1 in batch:
            raise Bad
        return batch

    async with Batcher(fn, **full(8)) as batcher:
        outcomes = await called(batcher, *range(-1, 7))
    error = outcomes.pop(-1)
    assert type(error) is Bad
    assert error.__notes__ == ["raised by one item of a batch of 8"]
    assert outcomes == {n: n for n in range(7)}
    assert sorted(runs) == [1, 1, 2, 2, 4, 4, 8]


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


@pytest.mark.anyio
async def test_out_of_memory_is_learned_from() -> None:
    held, sizes = Held(), []

    async def fn(batch: list[Any]) -> list[Any]:
        if "first" in batch:
            return await held(batch)
        sizes.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError
        return batch

    async with Batcher(fn, collate_fn=list) as batcher:
        for expected in ([4, 2, 2], [2, 2]):
            sizes.clear()
            async with anyio.create_task_group() as tasks:
                callers = Callers(batcher, tasks)
                callers.call("first")
                await until(lambda: batcher.stats().in_flight == 1)
                await callers.queue(1, 2, 3, 4)
                await until(lambda: len(held.runs) > len(held.ended))
                held.let_on()
            assert sizes == expected
            assert callers.outcomes == {"first": "first", 1: 1, 2: 2, 3: 3, 4: 4}


@pytest.mark.anyio
async def test_a_device_error_is_everybodys() -> None:
    runs: list[int] = []

    async def fn(batch: list[int]) -> list[int]:
        runs.append(len(batch))
        raise torch.AcceleratorError("the device is lost")

    async with Batcher(fn, **full(4)) as batcher:
        outcomes = await called(batcher, 1, 2, 3, 4)
    assert runs == [4]
    assert {type(error) for error in outcomes.values()} == {torch.AcceleratorError}


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
