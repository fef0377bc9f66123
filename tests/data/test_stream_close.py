"""Every way to end a `Stream`: nothing runs on, and nothing is kept."""

import asyncio
import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiopar
from aiopar.data import AsyncDataLoader, Pipeline, Stream
from aiopar.testing import Gate
from tests.cancelling import cancel_while_held
from tests.data.streams import (
    FUNCTIONS,
    SOURCES,
    Source,
    double,
    double_async,
    iterable,
    left_since,
    mapped,
    read_to_the_end,
    running,
    stream_of,
    until,
)
from tests.freeing import without_gc
from tests.gil import GIL
from tests.lost_loops import Left, closed_under_tasks, left_on_a_closed_loop
from tests.scopes import HELD, Holding, cut_off, errors_logged


@pytest.mark.anyio
async def test_an_async_generator_that_ends_is_not_cancelled_once_more() -> None:
    ended = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in itertools.count():
                yield number
        finally:
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            ended.append(True)

    stream = stream_of(numbers())
    await anext(stream)
    await until(lambda: stream.stats().stages[0].buffered == 2)
    # There is room again: the task continues and sees the close before it is cancelled.
    await anext(stream)
    await stream.aclose()
    assert ended


@pytest.mark.anyio
async def test_an_async_source_that_fails_when_it_is_closed_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def numbers() -> AsyncIterator[int]:
        try:
            for number in itertools.count():
                yield number
        finally:
            raise LookupError("mine")

    async with stream_of(numbers(), mapped(double)) as stream:
        assert await anext(stream) == 0
    assert "an async source failed when it was closed" in caplog.text
    assert "LookupError: mine" in caplog.text


@pytest.mark.anyio
@HELD
@pytest.mark.parametrize("reads", [1, 4])
async def test_contexts_held_by_an_async_source_are_exited_in_order(
    held: Callable[[], Any], reads: int, caplog: pytest.LogCaptureFixture
) -> None:
    holding = Holding(held)
    async with stream_of(holding(), mapped(double)) as stream:
        for _ in range(reads):
            await anext(stream)
    assert holding.closed == 1
    assert errors_logged(caplog) == []


@pytest.mark.anyio
async def test_a_scope_of_an_async_source_that_is_cancelled_ends_nothing_else() -> None:
    stream = stream_of(cut_off())
    with pytest.raises(RuntimeError, match="stage 'source' was cancelled"):
        await read_to_the_end(stream)
    await anyio.wait_all_tasks_blocked()  # a leaked `Cancelled` would end the run of trio


@pytest.mark.parametrize("waits", [True, False])
def test_an_async_source_whose_loop_was_closed_is_collected(waits: bool) -> None:
    left = Left(waits)

    async def read() -> None:
        async for _ in stream_of(left()):
            await asyncio.Event().wait()

    assert left_on_a_closed_loop(read, left) == []


async def _stuck_after_the_first(n: int) -> int:
    if n:
        await anyio.sleep_forever()
    return n


async def _numbers_stuck_after_the_first() -> AsyncIterator[int]:
    for n in range(2):
        yield await _stuck_after_the_first(n)


class _StuckAfterTheFirst:
    def __len__(self) -> int:
        return 3

    async def __getitem__(self, n: int) -> int:
        return await _stuck_after_the_first(n)


LEFT_ON_A_LOOP = pytest.mark.parametrize(
    "make",
    [
        lambda: stream_of(range(9), mapped(_stuck_after_the_first, concurrency=2)),
        lambda: stream_of(Source(), mapped(double), mapped(_stuck_after_the_first)),
        lambda: stream_of(_numbers_stuck_after_the_first()),
        lambda: stream_of(_numbers_stuck_after_the_first(), mapped(double, bound=1)),
        lambda: stream_of(Source().later(), mapped(double)),  # the source waits for room
        lambda: aiopar.map(_stuck_after_the_first, Source()),
        lambda: aiopar.map(double, _numbers_stuck_after_the_first(), devices=["cpu"]),
        lambda: aiter(AsyncDataLoader(_StuckAfterTheFirst(), None)),
        lambda: aiter(AsyncDataLoader(_numbers_stuck_after_the_first(), None)),
    ],
)


@LEFT_ON_A_LOOP
@pytest.mark.parametrize("closed", [True, False])
def test_a_stream_of_a_loop_that_has_ended_is_closed_at_once(
    make: Callable[[], Any], closed: bool
) -> None:
    stream: Any = None

    async def read() -> Any:
        nonlocal stream
        stream = make()
        return await anext(stream)

    with closed_under_tasks() as loop:
        assert loop.run_until_complete(read()) == 0
        if not closed:
            asyncio.run(stream.aclose())
    asyncio.run(stream.aclose())
    assert stream.closed


@LEFT_ON_A_LOOP
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_stream_of_a_loop_that_has_cancelled_its_tasks_is_closed_at_once(
    make: Callable[[], Any], backend: str
) -> None:
    async def read() -> Any:
        stream = make()
        return stream, await anext(stream)

    stream, first = anyio.run(read, backend=backend)
    assert first == 0
    anyio.run(stream.aclose)
    assert stream.closed


def test_a_stream_cannot_be_read_when_the_loop_of_its_tasks_has_ended() -> None:
    stream = stream_of(range(9), mapped(_stuck_after_the_first))
    with closed_under_tasks() as loop:
        assert loop.run_until_complete(anext(stream)) == 0
    with pytest.raises(RuntimeError, match="read each stream on one loop"):
        asyncio.run(stream.__anext__())
    asyncio.run(stream.aclose())


def test_a_loader_forgets_an_epoch_of_a_closed_loop() -> None:
    stream: Any = None

    async def read() -> Any:
        nonlocal stream
        stream = aiter(loader)
        return await anext(stream)

    loader = AsyncDataLoader(_StuckAfterTheFirst(), None)
    with closed_under_tasks() as loop:
        assert loop.run_until_complete(read()) == 0
    stream = weakref.ref(stream)
    gc.collect()
    assert stream() is None
    asyncio.run(loader.aclose())
    with closed_under_tasks() as loop:
        assert loop.run_until_complete(read()) == 0, "it can be iterated again"


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
@pytest.mark.parametrize("exits", [True, False], ids=["async with", "async for"])
async def test_a_stream_that_is_left_early_leaves_nothing_behind(
    fn: Callable[[int], Any], asynchronous: bool, exits: bool
) -> None:
    before = running()
    source = Source()
    with without_gc():
        if exits:
            async with stream_of(iterable(asynchronous, source), mapped(fn, concurrency=3)) as left:
                assert await anext(left) == 0
            assert source.closed.is_set()
            with pytest.raises(StopAsyncIteration):
                await anext(left)
            await left.aclose()
        else:
            async for _ in stream_of(iterable(asynchronous, source), mapped(fn, concurrency=3)):
                break
        await until(source.closed.is_set)
        await until(lambda: not left_since(before))


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["source", "function"])
async def test_aclose_waits_for_the_running_item_and_starts_no_other(where: str) -> None:
    before = running()
    gate, called = Gate(), list[int]()
    source = Source(hold=gate if where == "source" else int)
    fn = called.append if where == "source" else gate
    stream = stream_of(source, mapped(fn, concurrency=1, bound=5))
    closed = []

    async def close() -> None:
        await stream.aclose()
        closed.append(gate.held)

    async with anyio.create_task_group() as tasks:
        with gate:
            tasks.start_soon(read_to_the_end, stream)
            await gate.entered()
            tasks.start_soon(close)
            await until(lambda: stream.closed)
            assert not closed
    assert closed == [0]
    assert (source.taken, gate.count, called) == (1, 1, [])
    assert source.closed.is_set()
    await until(lambda: not left_since(before))


@pytest.mark.anyio
async def test_tasks_are_cancelled_and_their_ends_awaited() -> None:
    before = running()
    begun, ended = [], []

    async def wait_for_ever(n: int) -> None:
        begun.append(n)
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            ended.append(n)

    async with anyio.create_task_group() as tasks:
        async with stream_of(range(9), mapped(wait_for_ever, concurrency=3)) as stream:
            tasks.start_soon(read_to_the_end, stream)
            await until(lambda: len(begun) == 3)
        assert sorted(ended) == [0, 1, 2]
    await until(lambda: not left_since(before))


@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["source", "sync", "async", "reader"])
async def test_a_cancellation_in_any_stage_leaves_nothing_behind(stage: str) -> None:
    before = running()
    gate, reached = Gate(), anyio.Event()
    source = Source(hold=gate if stage == "source" else int)

    async def wait_for_ever(n: int) -> None:
        reached.set()
        await anyio.sleep_forever()

    async def read() -> None:
        async with stream_of(source, *verbs) as stream:
            async for n in stream:
                await wait_for_ever(n)

    middle: Any = {"sync": gate, "async": wait_for_ever}.get(stage, double)
    verbs = [mapped(double, concurrency=2), mapped(middle, concurrency=2), mapped(double_async)]
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            with gate:
                tasks.start_soon(read)
                if stage in ("source", "sync"):
                    await gate.entered()
                else:
                    await reached.wait()
                scope.cancel()
            # The gate is open: the exit waits for the threads.
    assert scope.cancelled_caught
    assert source.closed.is_set()
    await until(lambda: not left_since(before))


class _CollectedAtLine:
    """Runs the garbage collector when other threads have run `number` lines of aiopar."""

    def __init__(self, number: int) -> None:
        self._lines = number
        self.dropped = threading.Event()
        """Set when the stream is garbage: lines count from now on."""
        self.collected = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and self.dropped.is_set() and not self.collected:
            self._lines -= 1
            if self._lines <= 0:
                self.collected = True
                gc.collect()
        return self if "/aiopar/" in frame.f_code.co_filename else None


@contextlib.contextmanager
def _traced(trace: _CollectedAtLine) -> Iterator[None]:
    before = threading.gettrace()
    gc.disable()
    threading.settrace(trace)
    try:
        yield
    finally:
        threading.settrace(before)
        gc.enable()


async def _collected_at_line(number: int, make: Callable[[Any], Any]) -> bool:
    """Drop a stream, which is collected at a line of its workers; False: they ran fewer lines."""
    trace, gate = _CollectedAtLine(number), Gate()
    source = Source(hold=gate)
    with _traced(trace), gate:
        gate.let_on(3)
        stream = make(source)
        await anext(stream)
        await gate.entered()
        garbage = [stream]
        garbage.append(garbage)
        del stream, garbage
        trace.dropped.set()
        gate.open()
        await until(lambda: source.taken > 4 or trace.collected)
    collected = trace.collected
    # Again and again: it does nothing while another thread collects.
    await until(lambda: gc.collect() < 0 or source.closed.is_set())
    return collected


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "make",
    [
        lambda source: stream_of(source, mapped(double, concurrency=2), mapped(double)),
        lambda source: stream_of(source, mapped(double, bound=3), mapped(double_async)),
        lambda source: aiter(AsyncDataLoader(source, 2, num_workers=2)),
    ],
)
async def test_a_stream_may_be_collected_at_any_line_of_its_workers(
    make: Callable[[Any], Any],
) -> None:
    # Since CPython 3.12 the collector runs between any two bytecodes, also with a lock held.
    gc.collect()
    gc.freeze()  # what earlier tests have left would make each of these collections slow
    before, number = running(), 1
    while await _collected_at_line(number, make):
        number += 1 if GIL else 9  # without a GIL a collection takes many times as long
    await until(lambda: not left_since(before))
    assert number > 50


@pytest.mark.anyio
async def test_another_task_may_exit_a_pipeline_than_entered_it() -> None:
    source = Source(50)
    pipeline = Pipeline(source).map(double)
    streams: list[Stream[int]] = []

    async def enter() -> None:
        streams.append(await stack.enter_async_context(pipeline))

    async with contextlib.AsyncExitStack() as stack:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(enter)
        assert await anext(streams[0]) == 0
    assert source.closed.is_set()
    with pytest.raises(StopAsyncIteration):
        await anext(streams[0])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("steps", "may_begin"),
    [
        (lambda pipeline, fn: pipeline.map(fn).batch(1000), 0),
        (lambda pipeline, fn: pipeline.map(fn).filter(lambda n: n < 2), 0),
        (
            lambda pipeline, fn: pipeline.flat_map(lambda n: map(fn, itertools.count(n))).batch(
                1000
            ),
            0,
        ),
        (lambda pipeline, fn: pipeline.map(str).map(int).map(fn).shuffle(1000).map(fn), 0),
        (lambda pipeline, fn: pipeline.map(fn, concurrency=2).filter(lambda n: n < 0).map(fn), 1),
    ],
)
async def test_no_function_is_called_after_the_reader_has_left(
    steps: Callable[[Pipeline[int], Callable[[int], int]], Pipeline[Any]], may_begin: int
) -> None:
    # Each pipeline takes many items, or endless ones, before it hands on the next.
    gate, begun = Gate(), []

    def fn(n: int) -> int:
        begun.append(n)
        if len(begun) == 4:
            gate()
        return n

    stream = aiter(steps(Pipeline(itertools.count()), fn))
    async with anyio.create_task_group() as tasks:
        with gate:
            tasks.start_soon(read_to_the_end, stream)
            await gate.entered()
            tasks.start_soon(stream.aclose)
            await until(lambda: stream.closed)
            known = len(begun)
    assert len(begun) <= known + may_begin


@pytest.mark.asyncio
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "stream_of",
    [
        lambda source, fn: stream_of(source, mapped(fn)),
        lambda source, fn: AsyncDataLoader(source, batch_size=None, collate_fn=fn),
    ],
)
async def test_a_cancelled_exit_still_ends_the_stream(
    stream_of: Callable[..., Any], times: int
) -> None:
    gate, source = Gate(), Source()

    async def leave() -> None:
        async with stream_of(source, gate) as stream:
            reading = asyncio.create_task(read_to_the_end(stream))
            await gate.entered()
            reading.cancel()

    await cancel_while_held(leave(), gate, times)
    assert source.closed.is_set()
    assert gate.held == 0
