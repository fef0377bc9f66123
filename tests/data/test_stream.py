"""`Stream`: order, bounds, errors, cancellation, and what is left when it ends."""

import contextvars
import functools
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiopar
from aiopar.data import FailedItem
from aiopar.data._plan import Link, Map, Step
from aiopar.data._stream import Stream
from aiopar.testing import Gate
from tests.data.streams import Source, double, double_async, fetched, left_since, running, until
from tests.freeing import survivors, without_gc

FUNCTIONS = pytest.mark.parametrize("fn", [double, double_async], ids=["sync", "async"])
SOURCES = pytest.mark.parametrize("asynchronous", [False, True], ids=["iter", "aiter"])

_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


async def _read_to_the_end(stream: Stream[Any]) -> None:
    async for _ in stream:
        pass


async def _collect(stream: Stream[Any], got: list[Any]) -> None:
    async for item in stream:
        got.append(item)  # noqa: PERF401  # an error must not lose those before it


def _source(asynchronous: bool, source: Source) -> Any:
    return source.later() if asynchronous else source


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
        _source(asynchronous, source), [Map(fn, concurrency=concurrency, bound=bound)]
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
    stream: Stream[int] = Stream(_source(asynchronous, Source(0)), [Map(fn, concurrency=2)])
    assert [n async for n in stream] == []


@pytest.mark.anyio
@pytest.mark.parametrize("source", [range(7), list(range(7)), dict.fromkeys(range(7))])
async def test_containers_are_read_at_once(source: Any) -> None:
    async with Stream[int](source, [Map(double_async)]) as stream:
        assert [n async for n in stream] == [2 * n for n in range(7)]


@pytest.mark.anyio
async def test_many_stages_of_both_kinds_in_one_stream() -> None:
    before = running()
    steps: list[Step] = [
        Map(double, concurrency=2),
        Map(double_async, concurrency=3),
        Map(double_async, concurrency=2),
        Link(lambda items: (item for item in items)),
        Map(double, concurrency=2),
        Link(lambda items: (item for item in items), blocks=False),
    ]
    stream: Stream[int] = Stream(Source(200), steps)
    assert [n async for n in stream] == [16 * n for n in range(200)]
    await until(lambda: not left_since(before))


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
async def test_no_more_items_than_the_bound_whatever_the_reader_does(
    fn: Callable[[int], Any], asynchronous: bool
) -> None:
    source, bound = Source(1_000_000), 4
    steps = [Map(fn, concurrency=2, bound=bound)]
    async with Stream[int](_source(asynchronous, source), steps) as stream:
        ahead, buffered = [], []
        for n in range(20):
            assert await anext(stream) == 2 * n
            await until(lambda: _at_rest(stream))
            stages = stream.stats().stages
            ahead.append(source.taken - n - 1)
            buffered.append(stages[-1].buffered)
        assert max(buffered) == stages[-1].bound == bound
        # A source in a stage of its own has that stage's bound on top.
        assert max(ahead) <= sum(stage.bound for stage in stages)
    assert source.closed.is_set()


def _at_rest(stream: Stream[Any]) -> bool:
    """Whether nothing happens before another item is read."""
    flow = stream._flow
    return flow is not None and not any(stage._pumps for stage in flow.stages)


@pytest.mark.anyio
async def test_running_items_count_as_buffered() -> None:
    gate, source = Gate(), Source()
    stream: Stream[int] = Stream(source, [Map(gate, concurrency=3, bound=4)])
    async with anyio.create_task_group() as tasks, stream:
        with gate:
            tasks.start_soon(_read_to_the_end, stream)
            await gate.entered(3)
            assert source.taken == 3
            gate.let_on(1)
            await gate.entered(4)


@pytest.mark.anyio
async def test_in_completion_order_a_slow_item_holds_up_no_other() -> None:
    gate = Gate()

    def hold_the_first(n: int) -> int:
        return gate(n) if n == 0 else n

    steps = [Map(hold_the_first, concurrency=2, bound=3, in_order=False)]
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

    steps = [Map(hold_the_first, concurrency=2, bound=3, in_order=False)]
    async with Stream[int](range(20), steps) as stream:
        assert [await anext(stream) for _ in range(19)] == list(range(1, 20))
        event.set()
        assert [n async for n in stream] == [0]


@pytest.mark.anyio
async def test_as_many_at_once_as_were_asked_for() -> None:
    barrier = threading.Barrier(3, timeout=30)

    def meet(n: int) -> int:
        barrier.wait()
        return n

    stream: Stream[int] = Stream(range(9), [Map(meet, concurrency=3)])
    assert [n async for n in stream] == list(range(9))


# Failures.


def _fails_at(position: int) -> Callable[[int], int]:
    def fail(n: int) -> int:
        if n == position:
            raise LookupError("mine")
        return n

    return fail


def _fails_later_at(position: int) -> Callable[[int], Any]:
    async def fail(n: int) -> int:
        await anyio.lowlevel.checkpoint()
        return _fails_at(position)(n)

    return fail


@pytest.mark.anyio
@pytest.mark.parametrize("make", [_fails_at, _fails_later_at], ids=["sync", "async"])
@SOURCES
async def test_an_error_comes_after_the_items_before_it_and_ends_the_stream(
    make: Callable[[int], Callable[[int], Any]], asynchronous: bool
) -> None:
    before = running()
    source = Source()
    steps = [Map(make(5), concurrency=3, bound=8, name="mine"), Map(double), Map(double_async)]
    stream: Stream[int] = Stream(_source(asynchronous, source), steps)
    got: list[int] = []
    with pytest.raises(LookupError, match="mine") as caught:
        await _collect(stream, got)
    assert got == [4 * n for n in range(5)]
    assert caught.value.__notes__ == ["in stage 'mine' of the stream, item 5"]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()
    assert source.closed.is_set()
    await until(lambda: not left_since(before))


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
async def test_an_error_of_the_source_comes_after_its_items(
    fn: Callable[[int], Any], asynchronous: bool
) -> None:
    def generate() -> Iterator[int]:
        yield from range(5)
        raise LookupError("mine")

    async def generate_async() -> AsyncIterator[int]:
        for n in generate():
            yield n

    source = generate_async() if asynchronous else generate()
    # It cannot be left out: nothing comes after it.
    stream: Stream[int] = Stream(source, [Map(fn, concurrency=2)], max_failures=3)
    got: list[int] = []
    with pytest.raises(LookupError, match="mine") as caught:
        await _collect(stream, got)
    assert got == [0, 2, 4, 6, 8]
    assert caught.value.__notes__ == ["in stage 'source' of the stream, item 5"]


@pytest.mark.anyio
@pytest.mark.parametrize("make", [_fails_at, _fails_later_at], ids=["sync", "async"])
async def test_so_many_failures_are_left_out_and_recorded(
    make: Callable[[int], Callable[[int], Any]],
) -> None:
    steps = [Map(make(2), name="first"), Map(make(7), concurrency=2, name="second")]
    stream: Stream[int] = Stream(Source(10), steps, max_failures=2)
    assert [n async for n in stream] == [0, 1, 3, 4, 5, 6, 8, 9]
    assert [(f.stage, f.position) for f in stream.failures] == [("first", 2), ("second", 7)]
    assert all(isinstance(f.error, LookupError) for f in stream.failures)
    assert stream.stats().failures == 2

    assert isinstance(stream.failures, tuple), "nobody adds to it"
    assert {type(failed) for failed in stream.failures} == {FailedItem}
    with pytest.raises(FrozenInstanceError):
        stream.failures[0].position = 3

    one_too_many: Stream[int] = Stream(Source(10), steps, max_failures=1)
    with pytest.raises(LookupError, match="mine"):
        await _read_to_the_end(one_too_many)
    assert one_too_many.delivered == 6


@pytest.mark.anyio
@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
async def test_an_error_that_would_end_the_loop_is_told_of(error: type[Exception]) -> None:
    def fail(n: int) -> int:
        raise error

    with pytest.raises(RuntimeError, match=f"raised {error.__name__}") as caught:
        await anext(Stream(range(3), [Map(fail)]))
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.anyio
async def test_what_is_no_iterable_after_all_fails_at_the_first_read() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await anext(fetched(Broken()))


@pytest.mark.anyio
async def test_a_task_cancelled_from_outside_is_no_cancellation_of_the_reader(
    anyio_backend: tuple[str, dict[str, Any]],
) -> None:
    if anyio_backend[0] == "trio":
        pytest.skip("a task of trio cannot be cancelled by others")
    import asyncio

    async def cancel_this(n: int) -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anyio.lowlevel.checkpoint()
        return n

    stream: Stream[int] = Stream(range(3), [Map(cancel_this, name="mine")])
    with pytest.raises(RuntimeError, match="'mine' was cancelled from outside") as caught:
        await anext(stream)
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


# Reading.


@pytest.mark.anyio
async def test_nothing_begins_before_the_first_read() -> None:
    before = running()
    source = Source()
    async with fetched(source):
        await anyio.lowlevel.checkpoint()
        assert not left_since(before)
    assert source.taken == 0


@pytest.mark.anyio
async def test_a_second_reader_is_told() -> None:
    gate = Gate()
    async with Stream[int](range(3), [Map(gate)]) as stream:
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
    steps = [Map(gate if where == "function" else None, concurrency=2)]
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
    async with Stream[int](range(3), [Map(gate, name="mine")], timeout=0.01) as stream:
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
            generate(), [Map(lambda seen: (seen, state())), Map(lambda pair: pair)]
        )
        mapped: Stream[Any] = Stream(range(3), [Map(run)])
    _VARIABLE.reset(token)
    with torch.autocast("cpu"):
        assert [pair async for pair in stream] == [((False, False, 7),) * 2] * 3
        assert [seen async for seen in mapped] == [(False, False, 7)] * 3
        assert torch.is_grad_enabled()


# The end.


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

    stream: Stream[int] = Stream(numbers())
    await anext(stream)
    await until(lambda: stream.stats().stages[0].buffered == 2)
    # There is room again: its task, let on before it is cancelled, sees the end by itself.
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

    async with Stream[int](numbers(), [Map(double)]) as stream:
        assert await anext(stream) == 0
    assert "an async source failed when it was closed" in caplog.text
    assert "LookupError: mine" in caplog.text


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
async def test_leaving_async_with_leaves_nothing_behind(
    fn: Callable[[int], Any], asynchronous: bool
) -> None:
    before = running()
    source = Source()
    async with Stream[int](_source(asynchronous, source), [Map(fn, concurrency=3)]) as stream:
        assert await anext(stream) == 0
    assert source.closed.is_set()
    await until(lambda: not left_since(before))
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
async def test_a_loop_broken_off_leaves_nothing_behind(
    fn: Callable[[int], Any], asynchronous: bool
) -> None:
    before = running()
    source = Source()
    with without_gc():
        async for _ in Stream(_source(asynchronous, source), [Map(fn, concurrency=3)]):
            break
        await until(source.closed.is_set)
        await until(lambda: not left_since(before))


@pytest.mark.anyio
async def test_aclose_waits_for_the_item_that_runs_and_starts_no_other() -> None:
    before = running()
    gate, source = Gate(), Source()
    stream: Stream[int] = Stream(source, [Map(gate, concurrency=1, bound=5)])
    closed = []

    async def close() -> None:
        await stream.aclose()
        closed.append(gate.held)

    async with anyio.create_task_group() as tasks:
        with gate:
            tasks.start_soon(_read_to_the_end, stream)
            await gate.entered()
            tasks.start_soon(close)
            await until(lambda: stream._over)
            assert not closed
    assert closed == [0]
    assert (source.taken, gate.count) == (1, 1)
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
        async with Stream[None](range(9), [Map(wait_for_ever, concurrency=3)]) as stream:
            tasks.start_soon(_read_to_the_end, stream)
            await until(lambda: len(begun) == 3)
        assert sorted(ended) == [0, 1, 2]
    await until(lambda: not left_since(before))


@pytest.mark.anyio
@pytest.mark.parametrize("stage", ["source", "sync", "async", "reader"])
async def test_cancelled_in_any_stage_it_leaves_nothing_behind(stage: str) -> None:
    before = running()
    gate, reached = Gate(), anyio.Event()
    source = Source(hold=gate if stage == "source" else int)

    async def wait_for_ever(n: int) -> None:
        reached.set()
        await anyio.sleep_forever()

    async def read() -> None:
        async with Stream[Any](source, steps) as stream:
            async for n in stream:
                await wait_for_ever(n)

    middle: Any = {"sync": gate, "async": wait_for_ever}.get(stage, double)
    steps = [Map(double, concurrency=2), Map(middle, concurrency=2), Map(double_async)]
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            with gate:
                tasks.start_soon(read)
                if stage in ("source", "sync"):
                    await gate.entered()
                else:
                    await reached.wait()
                scope.cancel()
            # The gate is open: who leaves waits for its threads.
    assert scope.cancelled_caught
    assert source.closed.is_set()
    await until(lambda: not left_since(before))


@pytest.mark.anyio
async def test_an_async_generator_is_read_and_closed_by_one_task() -> None:
    async def generate() -> AsyncIterator[int]:
        # Both break where steps are taken by different tasks.
        async with anyio.create_task_group():
            with anyio.CancelScope():
                for n in itertools.count():
                    yield n

    async with Stream[int](generate(), [Map(double, bound=3)]) as stream:
        for n in range(20):
            assert await anext(stream) == 2 * n


@pytest.mark.anyio
async def test_what_was_read_and_what_was_not_is_let_go_of() -> None:
    class Item:
        pass

    references: list[weakref.ref[Item]] = []

    def generate() -> Iterator[Item]:
        while True:
            item = Item()
            references.append(weakref.ref(item))
            yield item
            del item

    def same(item: Item) -> Item:
        return item

    with without_gc():
        stream: Stream[Item] = Stream(generate(), [Map(same, concurrency=2), Map(double_same)])
        for _ in range(10):
            assert isinstance(await anext(stream), Item)
        await stream.aclose()
        assert await survivors(references) == []
        kept = weakref.ref(stream)
        del stream
        assert await survivors([kept]) == []


async def double_same(item: Any) -> Any:
    return item


@pytest.mark.anyio
@pytest.mark.parametrize("position", [0, 1], ids=["waited for", "ready"])
async def test_an_error_goes_with_who_caught_it(position: int) -> None:
    class Owner:
        def fail(self, n: int) -> int:
            if n == position:
                raise LookupError(n)
            return n

    with without_gc():
        owner = Owner()
        reference = weakref.ref(owner)
        stream: Stream[int] = Stream(range(3), [Map(owner.fail, bound=3)])
        for _ in range(position):
            await anext(stream)
            await until(functools.partial(_at_rest, stream))
        with pytest.raises(LookupError):
            await anext(stream)
        await stream.aclose()
        del owner, stream
        assert await survivors([reference]) == []


@pytest.mark.anyio
async def test_an_error_of_closing_the_source_is_raised() -> None:
    def generate() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            raise LookupError("at the end")

    before = running()
    stream = fetched(generate())
    await anext(stream)
    with pytest.raises(LookupError, match="at the end"):
        await stream.aclose()
    await until(lambda: not left_since(before))


# Executors.


@pytest.mark.anyio
async def test_a_given_executor_runs_the_functions_and_stays_open() -> None:
    def name(_: object) -> str:
        return threading.current_thread().name

    async with aiopar.DeviceExecutor(["cpu", "cpu"], thread_name_prefix="mine") as executor:
        stream: Stream[str] = Stream(range(50), [Map(name, concurrency=2)], executor=executor)
        assert {seen async for seen in stream} <= {"mine-cpu-0", "mine-cpu-1"}
        assert await executor.run_sync(double, 3) == 6


@pytest.mark.sim
@pytest.mark.anyio
async def test_on_a_view_of_cpu_workers_nothing_is_fetched_apart_from_them() -> None:
    seen: set[str] = set()

    def note(n: int) -> int:
        seen.add(threading.current_thread().name)
        return n

    devices = ["sim:0", "cpu", "cpu"]
    async with aiopar.DeviceExecutor(devices, thread_name_prefix="mine") as executor:
        steps = [Map(note, concurrency=2)]
        stream: Stream[int] = Stream(map(note, range(50)), steps, executor=executor.on("cpu"))
        assert [n async for n in stream] == list(range(50))
        assert [stage.name for stage in stream.stats().stages] == ["map"]
    assert seen <= {"mine-cpu-0", "mine-cpu-1"}


@pytest.mark.anyio
async def test_others_get_their_turn_on_a_given_executor() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        steps = [Map(lambda n: n, bound=1_000_000_000)]  # it would never be full
        async with Stream[int](itertools.count(), steps, executor=executor) as stream:
            await anext(stream)
            assert await executor.run_sync(double, 3) == 6


@pytest.mark.anyio
async def test_an_executor_that_is_shut_down_ends_the_stream_with_an_error() -> None:
    source = Source()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        stream: Stream[int] = Stream(source, [Map(double)], executor=executor)
        assert await anext(stream) == 0
    with pytest.raises(aiopar.ExecutorShutdown):
        await _read_to_the_end(stream)
    await stream.aclose()
    assert source.closed.is_set()


def test_it_is_read_in_an_event_loop() -> None:
    stream: Stream[int] = Stream(range(9), [Map(double)])
    with pytest.raises(RuntimeError, match="read by a task of an event loop, and none runs here"):
        aiopar.wait(stream.__anext__())


# Statistics.


@pytest.mark.anyio
async def test_it_counts_what_each_stage_has_done() -> None:
    stream: Stream[int] = Stream(
        Source(10), [Map(double, name="first"), Map(double, name="second")]
    )
    assert stream.stats().items == 0
    async with stream:
        assert [await anext(stream) for _ in range(4)] == [0, 4, 8, 12]
        await until(lambda: _at_rest(stream))
        stats = stream.stats()
        assert 2 <= stats.stages[1].buffered <= 3, "filled again when it is half empty"
    assert (stats.items, stats.failures) == (4, 0)
    assert [(stage.name, stage.bound) for stage in stats.stages] == [("first", 3), ("second", 3)]
    assert stats.stages[1].items == 4
    assert "bottleneck" in stats.bottleneck


@pytest.mark.anyio
async def test_it_says_who_waited() -> None:
    gate = Gate()
    async with Stream[int](range(3), [Map(gate)]) as stream:
        async with anyio.create_task_group() as tasks:
            with gate:
                tasks.start_soon(anext, stream)
                await gate.entered()
        stats = stream.stats()
        assert 0 < stats.consumer_seconds <= stats.elapsed_seconds

    async with fetched(itertools.count()) as stream:
        await anext(stream)
        await until(lambda: stream.stats().worker_seconds > 0)
