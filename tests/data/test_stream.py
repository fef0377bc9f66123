"""`Stream`: order, bounds, statistics, reading, and running on a given executor."""

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiopar
from aiopar.data import AsyncDataLoader, Pipeline
from aiopar.testing import Gate
from tests.caller_states import PLAIN, STATES, outer_pack, snapshot, unpack
from tests.data.streams import (
    FUNCTIONS,
    SOURCES,
    Executor,
    Source,
    double,
    fetched,
    iterable,
    left_since,
    mapped,
    read_to_the_end,
    running,
    stream_of,
    until,
    until_full,
)
from tests.home import AtHome

_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

# Order.


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
@pytest.mark.parametrize(("concurrency", "bound"), [(1, 1), (1, 5), (3, 3), (3, 20)])
async def test_outcomes_come_in_the_order_of_their_items(
    executor: Executor, fn: Callable[[int], Any], asynchronous: bool, concurrency: int, bound: int
) -> None:
    before = running()
    source = Source(100)
    stream = stream_of(
        iterable(asynchronous, source),
        mapped(fn, concurrency=concurrency, bound=bound),
        executor=executor,
    )
    assert [n async for n in stream] == [2 * n for n in range(100)]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert source.closed.is_set()
    await until(lambda: not left_since(before))
    assert [n async for n in stream_of(iterable(asynchronous, Source(0)), mapped(fn))] == []


@pytest.mark.anyio
async def test_in_completion_order_a_slow_item_delays_no_other(executor: Executor) -> None:
    gate = Gate()

    def hold_the_first(n: int) -> int:
        return gate(n) if n == 0 else n

    stage = mapped(AtHome(hold_the_first), concurrency=2, bound=3, in_order=False)
    async with stream_of(range(20), stage, executor=executor) as stream:
        with gate:
            assert [await anext(stream) for _ in range(19)] == list(range(1, 20))
        assert [n async for n in stream] == [0]


# Bounds.


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
@pytest.mark.parametrize(("concurrency", "bound"), [(2, 4), (5, 2)])
async def test_there_are_never_more_items_than_the_bound(
    executor: Executor, fn: Callable[[int], Any], asynchronous: bool, concurrency: int, bound: int
) -> None:
    source = Source(1_000_000)
    numbers = iterable(asynchronous, source)
    async with stream_of(
        numbers, mapped(fn, concurrency=concurrency, bound=bound), executor=executor
    ) as stream:
        ahead, buffered = [], []
        for n in range(20):
            assert await anext(stream) == 2 * n
            await until_full(stream)
            stages = stream.stats().stages
            ahead.append(source.taken - n - 1)
            buffered.append(stages[-1].buffered)
        assert max(buffered) <= stages[-1].bound == bound
        assert max(buffered) == bound or concurrency > bound
        # An async source is a stage of its own, with its own bound.
        assert max(ahead) <= sum(stage.bound for stage in stages)
    assert source.closed.is_set()


@pytest.mark.anyio
async def test_as_many_at_once_as_were_asked_for(executor: Executor) -> None:
    barrier = threading.Barrier(2, timeout=30)

    def meet(n: int) -> int:
        barrier.wait()
        return n

    stream = stream_of(range(8), mapped(AtHome(meet), concurrency=2), executor=executor)
    assert [n async for n in stream] == list(range(8))


# Statistics.


@pytest.mark.anyio
async def test_statistics_count_the_items_of_each_stage(executor: Executor) -> None:
    stream = stream_of(Source(10), mapped(double), mapped(abs), executor=executor)
    assert stream.stats().items == 0
    async with stream:
        assert [await anext(stream) for _ in range(4)] == [0, 2, 4, 6]
        await until(lambda: stream.stats().stages[-1].buffered == 3)
        stats = stream.stats()
    assert (stats.items, stats.failures) == (4, 0)
    assert [(stage.name, stage.bound) for stage in stats.stages[-2:]] == [
        ("map(double)", 3),
        ("map(abs)", 3),
    ]
    assert stats.stages[-1].items == 4
    assert "bottleneck" in stats.bottleneck


@pytest.mark.anyio
async def test_statistics_tell_the_waiting_times_of_reader_and_workers(executor: Executor) -> None:
    gate = Gate()
    async with stream_of(range(3), mapped(AtHome(gate)), executor=executor) as stream:
        async with anyio.create_task_group() as tasks:
            with gate:
                tasks.start_soon(anext, stream)
                await gate.entered()
        stats = stream.stats()
        assert 0 < stats.consumer_seconds <= stats.elapsed_seconds

    async with fetched(itertools.count()) as stream:
        await anext(stream)
        await until(lambda: stream.stats().worker_seconds > 0)


# Reading: by one task, which may be cancelled or time out.


@pytest.mark.anyio
async def test_nothing_begins_before_the_first_read() -> None:
    before = running()
    source = Source()
    async with fetched(source):
        await anyio.lowlevel.checkpoint()
        assert not left_since(before)
    assert source.taken == 0


def test_reading_needs_an_event_loop() -> None:
    stream = stream_of(range(9), mapped(double))
    with pytest.raises(RuntimeError, match="needs an event loop, and none runs here"):
        aiopar.wait(stream.__anext__())


@pytest.mark.anyio
async def test_a_second_reader_gets_an_error(executor: Executor) -> None:
    gate = Gate()
    async with stream_of(range(3), mapped(AtHome(gate)), executor=executor) as stream:
        async with anyio.create_task_group() as tasks:
            with gate:
                tasks.start_soon(anext, stream)
                await gate.entered()
                with pytest.raises(RuntimeError, match="read by another task"):
                    await anext(stream)
        assert [n async for n in stream] == [1, 2], "the first reader continues"


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
async def test_a_cancelled_read_loses_no_item(executor: Executor, where: str) -> None:
    gate = Gate()
    source = Source(6, gate if where == "source" else int)
    pipeline: Pipeline[int] = Pipeline(source, executor=executor)
    if where == "function":
        pipeline = pipeline.map(AtHome(gate), concurrency=2)
    async with pipeline as stream:
        with gate:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(anext, stream)
                    await gate.entered()
                    scope.cancel()
            assert scope.cancelled_caught
        assert [n async for n in stream] == list(range(6))


@pytest.mark.anyio
async def test_a_read_that_times_out_names_the_stage_and_loses_no_item(executor: Executor) -> None:
    gate = Gate()
    got: list[int] = []
    async with stream_of(range(3), mapped(AtHome(gate)), executor=executor, timeout=0.01) as stream:
        message = (
            r"item 0 did not come within 0.01 s; stage 'map\(AtHome\)' runs 1 items and has 0 "
            "ready; a function that runs in a thread cannot be interrupted, and goes on"
        )
        with gate:
            with pytest.raises(TimeoutError):  # perhaps before the stage has begun
                await anext(stream)
            await gate.entered()
            with pytest.raises(TimeoutError, match=message):
                await anext(stream)
        while len(got) < 3:
            with contextlib.suppress(TimeoutError):
                got.append(await anext(stream))
    assert got == [0, 1, 2]


def _leave_behind(_: object) -> tuple[dict[str, Any], int]:
    """Change all of the thread's state, and return what it was."""
    seen = snapshot(), _VARIABLE.get()
    torch.set_grad_enabled(not torch.is_grad_enabled())
    torch.set_autocast_enabled("cpu", not torch.is_autocast_enabled("cpu"))
    torch.set_autocast_cache_enabled(not torch.is_autocast_cache_enabled())
    torch.set_default_device("cpu" if seen[0]["default_device"].type == "meta" else "meta")
    torch._C._autograd._push_saved_tensors_default_hooks(outer_pack, unpack)
    mode = torch.inference_mode(not torch.is_inference_mode_enabled())
    mode.__enter__()
    _ENTERED.append(mode)
    _VARIABLE.set(_VARIABLE.get() + 1)
    return seen


_ENTERED: list[torch.inference_mode] = []
"""Kept: a mode that is freed changes the state of the thread that frees it."""


async def _leave_behind_async(item: object) -> tuple[dict[str, Any], int]:
    await anyio.lowlevel.checkpoint()
    return _leave_behind(item)


class _LeavingBehind:
    def __getitem__(self, _: int) -> Any:
        return _leave_behind(None)

    def __len__(self) -> int:
        return 8


class _LeavingBehindAsync(_LeavingBehind):
    async def __getitem__(self, _: int) -> Any:
        return await _leave_behind_async(None)


def _parts(item: object) -> Iterator[Any]:
    yield _leave_behind(item)


def _collated(samples: list[Any]) -> list[Any]:
    return [*samples, _leave_behind(None)]


@pytest.mark.anyio
@pytest.mark.parametrize("state", [None, "no-grad", "inference-mode", "autocast", "everything"])
@pytest.mark.parametrize(
    "stream_of",
    [
        lambda: Pipeline(range(8)).map(_leave_behind, concurrency=1),
        lambda: Pipeline(range(8)).map(_leave_behind, concurrency=2, in_order=False),
        lambda: Pipeline(range(8)).map(_leave_behind),
        lambda: Pipeline(range(8)).map(_leave_behind).map(lambda seen: [seen, _leave_behind(0)]),
        lambda: Pipeline(range(8)).filter(_leave_behind).map(_leave_behind),
        lambda: Pipeline(range(8)).flat_map(_parts),
        lambda: Pipeline(range(8)).flat_map(_parts, concurrency=1),
        lambda: Pipeline(range(8)).map(_leave_behind_async),
        lambda: Pipeline(range(8)).map(_leave_behind_async, concurrency=2),
        lambda: Pipeline(range(8)).map(_leave_behind_async).map(_leave_behind),
        lambda: aiopar.map(_leave_behind, range(8), concurrency=1),
        lambda: aiopar.map(_leave_behind, range(8), devices=["cpu"]),
        lambda: AsyncDataLoader(_LeavingBehind(), 2, collate_fn=_collated),
        lambda: AsyncDataLoader(
            _LeavingBehind(), 2, collate_fn=_collated, worker_init_fn=_leave_behind
        ),
        lambda: AsyncDataLoader(_LeavingBehindAsync(), 2, collate_fn=_collated),
        lambda: AsyncDataLoader(Source(8), 2, collate_fn=_collated, worker_init_fn=_leave_behind),
    ],
)
async def test_an_item_sees_nothing_that_another_item_has_left_behind(
    stream_of: Callable[[], Any], state: str | None
) -> None:
    with contextlib.nullcontext() if state is None else STATES[state]():
        expected = snapshot(), 0
        stream = aiter(stream_of())
    seen = [one for item in [item async for item in stream] for one in _snapshots(item)]
    assert len(seen) >= 4
    assert seen == [expected] * len(seen)
    assert (snapshot(), _VARIABLE.get()) == (PLAIN, 0), "nor does the reader"


def _snapshots(item: Any) -> list[Any]:
    if isinstance(item, list):
        return [one for part in item for one in _snapshots(part)]
    return [item] if isinstance(item, tuple) else []


# On an executor of the user, which the stream shares and does not close.


@pytest.mark.anyio
async def test_a_given_executor_runs_the_functions_and_stays_open() -> None:
    def name(_: object) -> str:
        return threading.current_thread().name

    async with aiopar.DeviceExecutor(["cpu", "cpu"], thread_name_prefix="mine") as executor:
        stream = stream_of(range(50), mapped(name, concurrency=2), executor=executor)
        assert {seen async for seen in stream} <= {"mine-cpu-0", "mine-cpu-1"}
        assert await executor.run_sync(double, 3) == 6


@pytest.mark.sim
@pytest.mark.anyio
async def test_a_view_of_cpu_workers_also_fetches() -> None:
    seen: set[str] = set()

    def note(n: int) -> int:
        seen.add(threading.current_thread().name)
        return n

    devices = ["sim:0", "cpu", "cpu"]
    async with aiopar.DeviceExecutor(devices, thread_name_prefix="mine") as executor:
        view = executor.on("cpu")
        stream = stream_of(map(note, range(50)), mapped(note, concurrency=2), executor=view)
        assert [n async for n in stream] == list(range(50))
        assert [stage.name for stage in stream.stats().stages] == ["map(note)"]
    assert seen <= {"mine-cpu-0", "mine-cpu-1"}


@pytest.mark.anyio
async def test_others_get_their_turn_on_a_given_executor() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        never_full = mapped(lambda n: n, bound=1_000_000_000)
        async with stream_of(itertools.count(), never_full, executor=executor) as stream:
            await anext(stream)
            assert await executor.run_sync(double, 3) == 6


@pytest.mark.anyio
async def test_an_executor_that_is_shut_down_ends_the_stream_with_an_error() -> None:
    source = Source()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        stream = stream_of(source, mapped(double), executor=executor)
        assert await anext(stream) == 0
    with pytest.raises(aiopar.ExecutorShutdown):
        await read_to_the_end(stream)
    await stream.aclose()
    assert source.closed.is_set()
