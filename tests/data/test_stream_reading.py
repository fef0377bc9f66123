"""Reading a `Stream`: by one task, which may be cancelled or out of time, and lose nothing."""

import contextvars
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiopar
from aiopar.data._stages import MapStep
from aiopar.data._stream import Stream
from aiopar.testing import Gate
from tests.data.streams import FUNCTIONS, Source, double, double_async, fetched, left_since, running

_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


@pytest.mark.anyio
async def test_nothing_begins_before_the_first_read() -> None:
    before = running()
    source = Source()
    async with fetched(source):
        await anyio.lowlevel.checkpoint()
        assert not left_since(before)
    assert source.taken == 0


def test_it_is_read_in_an_event_loop() -> None:
    stream: Stream[int] = Stream(range(9), [MapStep(double)])
    with pytest.raises(RuntimeError, match="read by a task of an event loop, and none runs here"):
        aiopar.wait(stream.__anext__())


@pytest.mark.anyio
async def test_a_second_reader_is_told() -> None:
    gate = Gate()
    async with Stream[int](range(3), [MapStep(gate)]) as stream:
        async with anyio.create_task_group() as tasks:
            with gate:
                tasks.start_soon(anext, stream)
                await gate.entered()
                with pytest.raises(RuntimeError, match="read by another task"):
                    await anext(stream)
        assert [n async for n in stream] == [1, 2], "the first goes on"


@pytest.mark.anyio
async def test_a_reader_that_never_waits_gives_others_a_turn() -> None:
    happened = anyio.Event()

    async def other() -> None:
        happened.set()

    async with anyio.create_task_group() as tasks, fetched(itertools.count(), 1000) as stream:
        tasks.start_soon(other)
        async for _ in stream:
            if happened.is_set():
                break


@pytest.mark.anyio
async def test_a_reader_that_never_waits_is_cancelled() -> None:
    with anyio.CancelScope() as scope:
        async with fetched(itertools.count(), 1000) as stream:
            async for n in stream:
                if n == 10:
                    scope.cancel()
    assert scope.cancelled_caught


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["source", "function"])
async def test_a_cancelled_read_loses_no_item(where: str) -> None:
    gate = Gate()
    source = Source(6, gate if where == "source" else int)
    steps = [MapStep(gate if where == "function" else None, concurrency=2)]
    async with Stream[int](source, steps) as stream:
        with gate:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(anext, stream)
                    await gate.entered()
                    scope.cancel()
            assert scope.cancelled_caught
        assert [n async for n in stream] == list(range(6))


@pytest.mark.anyio
async def test_a_read_out_of_time_says_what_it_waited_for_and_loses_no_item() -> None:
    gate = Gate()
    async with Stream[int](range(3), [MapStep(gate, name="mine")], timeout=0.01) as stream:
        message = r"item 0 did not come within 0.01 s; stage 'mine' has 1 of 1 items under way"
        with gate, pytest.raises(TimeoutError, match=message):
            await anext(stream)
        stream._timeout = None
        assert [n async for n in stream] == [0, 1, 2]


@pytest.mark.anyio
@FUNCTIONS
async def test_everything_runs_under_the_state_of_who_made_the_stream(
    fn: Callable[[int], Any],
) -> None:
    def state() -> tuple[bool, bool, int]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), _VARIABLE.get()

    async def state_async(_: object) -> tuple[bool, bool, int]:
        await anyio.lowlevel.checkpoint()
        return state()

    def generate() -> Iterator[tuple[bool, bool, int]]:
        for _ in range(3):
            yield state()

    token = _VARIABLE.set(7)
    run: Any = state_async if fn is double_async else lambda _: state()
    with torch.no_grad():
        stream: Stream[Any] = Stream(
            generate(), [MapStep(lambda seen: (seen, state())), MapStep(lambda pair: pair)]
        )
        mapped: Stream[Any] = Stream(range(3), [MapStep(run)])
    _VARIABLE.reset(token)
    with torch.autocast("cpu"):
        assert [pair async for pair in stream] == [((False, False, 7),) * 2] * 3
        assert [seen async for seen in mapped] == [(False, False, 7)] * 3
        assert torch.is_grad_enabled()
