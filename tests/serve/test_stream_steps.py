"""The steps of a stream: the state, the worker and the task of each."""

import contextvars
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar.serve import Batcher
from aiopar.testing import Gate

from .batches import until
from .streams import ENDLESS, Counting, one_worker, settled

pytestmark = pytest.mark.anyio


def _thread_state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.empty(0).device.type,
        _VARIABLE.get(),
    )


_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


async def test_a_generators_state_is_its_own_and_that_of_who_made_the_batcher() -> None:
    seen: list[tuple[Any, ...]] = []

    def generate(batch: list[Any]) -> Iterator[list[Any]]:
        seen.append(_thread_state())
        with torch.device("meta"):
            _VARIABLE.set(2)
            yield batch
            seen.append(_thread_state())
            yield batch

    async with one_worker() as executor:
        _VARIABLE.set(1)
        with torch.no_grad():
            batcher = Batcher(generate, collate_fn=list)
        _VARIABLE.set(0)
        async with batcher, batcher.stream("a") as stream:
            async for _ in stream:
                assert await executor.run_sync(_thread_state) == (True, False, "cpu", 0)
    assert seen == [(False, False, "cpu", 1), (False, False, "meta", 2)]


@asynccontextmanager
async def occupied(worker: aiopar.DeviceExecutor) -> AsyncIterator[None]:
    """Hold a worker."""
    with Gate() as gate:
        held_up = worker.submit(gate)
        await gate.entered()
        yield
    await held_up


async def test_each_step_is_a_call_of_its_own_on_one_worker() -> None:
    counting = Counting(ENDLESS)
    async with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
        with aiopar.use_executor(executor):
            batcher = Batcher(counting.generate, collate_fn=list)
            async with batcher, batcher.stream("a", buffer=1) as stream:
                await anext(stream)
                [thread] = set(counting.steps)
                own, other = (executor.on(worker=n ^ int(thread[-1])) for n in (0, 1))
                async with occupied(other):
                    for n in range(20):  # the worker is free between steps
                        assert await executor.run_sync(str, n) == str(n)
                        await anext(stream)
                async with occupied(own):
                    made = len(counting.steps)
                    await anext(stream)
                    await settled(executor)
                    assert len(counting.steps) == made, "no other worker makes them"
                await until(lambda: len(counting.steps) == made + 1)
                async with occupied(own):
                    await stream.aclose()
                    await settled(executor)
                    assert counting.closed == [], "nor closes the generator"
    assert set(counting.steps) == set(counting.closed) == {thread}


async def test_an_async_generator_runs_in_one_task_from_its_first_step_to_its_end() -> None:
    async def generate(batch: list[str]) -> AsyncIterator[list[str]]:
        # A cancel scope raises if it is left in another task than it was entered in.
        with anyio.CancelScope():
            async with anyio.create_task_group():
                yield batch
                yield batch

    async with Batcher(generate, collate_fn=list) as batcher:
        assert [part async for part in batcher.stream("a")] == ["a", "a"]
        async with batcher.stream("b") as stream:
            assert await anext(stream) == "b"
