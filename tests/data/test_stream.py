"""`Stream`: the order of its items, how many are ahead and at once, and its statistics."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from aiopar.data._flow import Step
from aiopar.data._inline_steps import InlineStep
from aiopar.data._stages import MapStep
from aiopar.data._stream import Stream
from aiopar.testing import Gate
from tests.data.streams import (
    FUNCTIONS,
    SOURCES,
    Source,
    at_rest,
    double,
    double_async,
    fetched,
    iterable,
    left_since,
    read_to_the_end,
    running,
    until,
)

# Order.


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
@pytest.mark.parametrize(("concurrency", "bound"), [(1, 1), (1, 5), (3, 3), (3, 20)])
async def test_outcomes_come_in_the_order_of_their_items(
    fn: Callable[[int], Any], asynchronous: bool, concurrency: int, bound: int
) -> None:
    before = running()
    source = Source(100)
    stream: Stream[int] = Stream(
        iterable(asynchronous, source), [MapStep(fn, concurrency=concurrency, bound=bound)]
    )
    assert [n async for n in stream] == [2 * n for n in range(100)]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert source.closed.is_set()
    await until(lambda: not left_since(before))


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
async def test_an_empty_source_has_no_items(fn: Callable[[int], Any], asynchronous: bool) -> None:
    stream: Stream[int] = Stream(iterable(asynchronous, Source(0)), [MapStep(fn, concurrency=2)])
    assert [n async for n in stream] == []


@pytest.mark.anyio
@pytest.mark.parametrize("source", [range(7), list(range(7)), dict.fromkeys(range(7))])
async def test_containers_are_read_at_once(source: Any) -> None:
    async with Stream[int](source, [MapStep(double_async)]) as stream:
        assert [n async for n in stream] == [2 * n for n in range(7)]


@pytest.mark.anyio
async def test_many_stages_of_both_kinds_in_one_stream() -> None:
    before = running()
    steps: list[Step] = [
        MapStep(double, concurrency=2),
        MapStep(double_async, concurrency=3),
        MapStep(double_async, concurrency=2),
        InlineStep(lambda items: (item for item in items)),
        MapStep(double, concurrency=2),
        InlineStep(lambda items: (item for item in items), blocks=False),
    ]
    stream: Stream[int] = Stream(Source(200), steps)
    assert [n async for n in stream] == [16 * n for n in range(200)]
    await until(lambda: not left_since(before))


@pytest.mark.anyio
async def test_in_completion_order_a_slow_item_holds_up_no_other() -> None:
    gate = Gate()

    def hold_the_first(n: int) -> int:
        return gate(n) if n == 0 else n

    steps = [MapStep(hold_the_first, concurrency=2, bound=3, in_order=False)]
    async with Stream[int](range(20), steps) as stream:
        with gate:
            assert [await anext(stream) for _ in range(19)] == list(range(1, 20))
        assert [n async for n in stream] == [0]


@pytest.mark.anyio
async def test_in_completion_order_a_slow_task_holds_up_no_other() -> None:
    event = anyio.Event()

    async def hold_the_first(n: int) -> int:
        if n == 0:
            await event.wait()
        return n

    steps = [MapStep(hold_the_first, concurrency=2, bound=3, in_order=False)]
    async with Stream[int](range(20), steps) as stream:
        assert [await anext(stream) for _ in range(19)] == list(range(1, 20))
        event.set()
        assert [n async for n in stream] == [0]


# Bounds.


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
async def test_no_more_items_than_the_bound_whatever_the_reader_does(
    fn: Callable[[int], Any], asynchronous: bool
) -> None:
    source, bound = Source(1_000_000), 4
    steps = [MapStep(fn, concurrency=2, bound=bound)]
    async with Stream[int](iterable(asynchronous, source), steps) as stream:
        ahead, buffered = [], []
        for n in range(20):
            assert await anext(stream) == 2 * n
            await until(lambda: at_rest(stream))
            stages = stream.stats().stages
            ahead.append(source.taken - n - 1)
            buffered.append(stages[-1].buffered)
        assert max(buffered) == stages[-1].bound == bound
        # A source in a stage of its own has that stage's bound on top.
        assert max(ahead) <= sum(stage.bound for stage in stages)
    assert source.closed.is_set()


@pytest.mark.anyio
async def test_running_items_count_as_buffered() -> None:
    gate, source = Gate(), Source()
    stream: Stream[int] = Stream(source, [MapStep(gate, concurrency=3, bound=4)])
    async with anyio.create_task_group() as tasks, stream:
        with gate:
            tasks.start_soon(read_to_the_end, stream)
            await gate.entered(3)
            assert source.taken == 3
            gate.let_on(1)
            await gate.entered(4)


@pytest.mark.anyio
async def test_as_many_at_once_as_were_asked_for() -> None:
    barrier = threading.Barrier(3, timeout=30)

    def meet(n: int) -> int:
        barrier.wait()
        return n

    stream: Stream[int] = Stream(range(9), [MapStep(meet, concurrency=3)])
    assert [n async for n in stream] == list(range(9))


# Statistics.


@pytest.mark.anyio
async def test_it_counts_what_each_stage_has_done() -> None:
    stream: Stream[int] = Stream(
        Source(10), [MapStep(double, name="first"), MapStep(double, name="second")]
    )
    assert stream.stats().items == 0
    async with stream:
        assert [await anext(stream) for _ in range(4)] == [0, 4, 8, 12]
        await until(lambda: at_rest(stream))
        stats = stream.stats()
        assert 2 <= stats.stages[1].buffered <= 3, "filled again when it is half empty"
    assert (stats.items, stats.failures) == (4, 0)
    assert [(stage.name, stage.bound) for stage in stats.stages] == [("first", 3), ("second", 3)]
    assert stats.stages[1].items == 4
    assert "bottleneck" in stats.bottleneck


@pytest.mark.anyio
async def test_it_says_who_waited() -> None:
    gate = Gate()
    async with Stream[int](range(3), [MapStep(gate)]) as stream:
        async with anyio.create_task_group() as tasks:
            with gate:
                tasks.start_soon(anext, stream)
                await gate.entered()
        stats = stream.stats()
        assert 0 < stats.consumer_seconds <= stats.elapsed_seconds

    async with fetched(itertools.count()) as stream:
        await anext(stream)
        await until(lambda: stream.stats().worker_seconds > 0)
