"""A generator as a source keeps its own state from step to step, and no other code sees it."""

import contextvars
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import aiopar
from aiopar.data import Pipeline, Stream
from tests.data.streams import mapped, stream_of, until
from tests.generators import torch_state

_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

MODES = pytest.mark.parametrize(
    "enter",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.device("meta"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "device"],
)
CALLERS = pytest.mark.parametrize(
    "callers",
    [torch.enable_grad, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")],
    ids=["fresh", "no_grad", "inference_mode", "autocast"],
)


def _with_state(seen: tuple[Any, ...]) -> tuple[Any, ...]:
    return seen, torch_state()


@pytest.mark.asyncio
@MODES
@CALLERS
async def test_state_that_a_source_enters_persists_inside_it_only(
    enter: Callable[[], AbstractContextManager[object]],
    callers: Callable[[], AbstractContextManager[object]],
) -> None:
    def generate() -> Iterator[tuple[Any, ...]]:
        yield torch_state()
        with enter():
            for _ in range(4):
                yield torch_state()
        yield torch_state()

    with callers():
        outside = torch_state()
        stream: Stream[Any] = stream_of(generate(), mapped(_with_state, concurrency=2, bound=2))
        with enter():
            inside = torch_state()
        seen = [pair async for pair in stream]
        assert torch_state() == outside
    # The autocast nesting, in the last place, is one more in a worker, for the caller's state.
    assert [state[:-1] for _, state in seen] == [outside[:-1]] * 6
    assert len({state for _, state in seen}) == 1, "nothing adds up in a worker"
    assert [state[:-1] for state, _ in seen[1:5]] == [inside[:-1]] * 4
    assert [state[:-1] for state, _ in (seen[0], seen[5])] == [outside[:-1]] * 2


@pytest.mark.asyncio
@MODES
async def test_a_generator_is_closed_under_its_own_state(
    enter: Callable[[], AbstractContextManager[object]],
) -> None:
    closed: list[tuple[Any, ...]] = []

    def generate() -> Iterator[int]:
        with enter():
            try:
                yield from range(100)
            finally:
                closed.append(torch_state())

    with enter():
        inside = torch_state()
    before = torch_state()
    async with Pipeline(generate()) as stream:
        assert await anext(stream) == 0
    assert [state[:-1] for state in closed] == [inside[:-1]]
    assert torch_state() == before

    async for _ in Pipeline(generate()):
        break
    gc.collect()
    await until(lambda: len(closed) == 2)
    assert torch_state() == before


@pytest.mark.asyncio
@CALLERS
async def test_closing_a_generator_leaves_the_workers_state_unchanged(
    callers: Callable[[], AbstractContextManager[object]],
) -> None:
    def generate() -> Iterator[int]:
        with torch.autocast("cpu"):
            yield from range(100)

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        before = await executor.run_sync(torch_state)
        with callers():
            stream: Stream[int] = aiter(Pipeline(generate(), executor=executor))
        async with stream:
            assert await anext(stream) == 0
        # The nesting too: if it were too low, no block would drop the casts of weights any more.
        assert await executor.run_sync(torch_state) == before


@pytest.mark.asyncio
async def test_context_variables_are_the_generators_own() -> None:
    def generate() -> Iterator[int]:
        for n in range(1, 20):
            _VARIABLE.set(n)
            yield n
            assert _VARIABLE.get() == n

    def read(n: int) -> tuple[int, int]:
        return n, _VARIABLE.get()

    stream: Stream[Any] = stream_of(generate(), mapped(read, concurrency=2))
    assert [pair async for pair in stream] == [(n, 0) for n in range(1, 20)]
    assert _VARIABLE.get() == 0
