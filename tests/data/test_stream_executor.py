"""A `Stream` on a given executor, which it shares with others and does not close."""

import itertools
import threading

import pytest
from torch import nn

import aiopar
from aiopar.data import Pipeline
from aiopar.data._stages import MapStep
from aiopar.data._stream import Stream
from tests.data.streams import Source, double, read_to_the_end
from tests.executor.hosts import HostExecutor


@pytest.mark.anyio
async def test_a_given_executor_runs_the_functions_and_stays_open() -> None:
    def name(_: object) -> str:
        return threading.current_thread().name

    async with aiopar.DeviceExecutor(["cpu", "cpu"], thread_name_prefix="mine") as executor:
        stream: Stream[str] = Stream(range(50), [MapStep(name, concurrency=2)], executor=executor)
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
        steps = [MapStep(note, concurrency=2)]
        stream: Stream[int] = Stream(map(note, range(50)), steps, executor=executor.on("cpu"))
        assert [n async for n in stream] == list(range(50))
        assert [stage.name for stage in stream.stats().stages] == ["map"]
    assert seen <= {"mine-cpu-0", "mine-cpu-1"}


@pytest.mark.anyio
async def test_others_get_their_turn_on_a_given_executor() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        steps = [MapStep(lambda n: n, bound=1_000_000_000)]  # it would never be full
        async with Stream[int](itertools.count(), steps, executor=executor) as stream:
            await anext(stream)
            assert await executor.run_sync(double, 3) == 6


@pytest.mark.anyio
async def test_an_executor_that_is_shut_down_ends_the_stream_with_an_error() -> None:
    source = Source()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        stream: Stream[int] = Stream(source, [MapStep(double)], executor=executor)
        assert await anext(stream) == 0
    with pytest.raises(aiopar.ExecutorShutdown):
        await read_to_the_end(stream)
    await stream.aclose()
    assert source.closed.is_set()


def host(_: int) -> str:
    return threading.current_thread().name


def is_odd(n: int) -> bool:
    return n % 2 == 1


def twice(n: int) -> list[int]:
    return [n, n]


@pytest.mark.asyncio
async def test_functions_are_sent_to_workers_elsewhere() -> None:
    async with HostExecutor(["cpu", "cpu"]) as executor:
        pipeline = Pipeline(Source(6), executor=executor)
        numbers = pipeline.filter(is_odd, concurrency=2).flat_map(twice, concurrency=2)
        assert [n async for n in numbers] == [1, 1, 3, 3, 5, 5]
        names = {name async for name in pipeline.map(host, concurrency=2)}
        with aiopar.use_executor(executor):
            outputs = aiopar.map(host, range(6), devices=["cpu", "cpu"])
            with pytest.raises(NotImplementedError, match="shared_parameters"):
                aiopar.map(nn.Identity(), [])
        names |= {name async for name in outputs}
        assert names == {"hosted-cpu-0-host", "hosted-cpu-1-host"}
