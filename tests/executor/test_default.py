"""The current executor: the default of the process, or the one set by `use_executor`."""

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar._base.devices import default_devices
from aiopar.testing import Gate
from tests.interruptions import at_every_point


@pytest.fixture
def fresh_default() -> Iterator[aiopar.DeviceExecutor]:
    """A new default executor, for one test only."""
    aiopar.get_executor().shutdown()
    yield aiopar.get_executor()
    aiopar.get_executor().shutdown()


def test_the_default_is_one_for_all_threads(fresh_default: aiopar.DeviceExecutor) -> None:
    fresh_default.shutdown()
    barrier = threading.Barrier(8)

    def find(_: int) -> aiopar.DeviceExecutor:
        barrier.wait()
        return aiopar.get_executor()

    with ThreadPoolExecutor(8) as threads:
        [found] = set(threads.map(find, range(8)))
    assert found is not fresh_default, "it was shut down"


@pytest.mark.anyio
async def test_the_default_grows_on_demand(fresh_default: aiopar.DeviceExecutor) -> None:
    assert fresh_default.devices == default_devices()
    view, single = fresh_default.on("cpu"), fresh_default.on(worker=0)
    for submits in (fresh_default, view):
        wanted = len(view.devices) + 2
        barrier = threading.Barrier(wanted)
        arrived: list[aiopar.Future[Any]] = submits.submit_all([barrier.wait] * wanted)
        assert sorted([await future for future in arrived]) == list(range(wanted))
        assert view.devices == (torch.device("cpu"),) * wanted
    assert fresh_default.on("meta").devices == (torch.device("meta"),)
    with pytest.raises(ValueError, match="the executor has 1"):
        single.submit_all([int] * 2)


def thread_name(*_: object) -> str:
    return threading.current_thread().name


async def gang() -> list[str]:
    executor = aiopar.get_executor()
    futures = executor.submit_all([thread_name] * len(executor.on("cpu").devices))
    return [future.value() for future in await aiopar.collect_all(futures)]


async def generator() -> list[str]:
    return [name async for name in aiopar.get_executor().iterate(lambda: iter([thread_name()]))]


async def batch() -> list[str]:
    async with aiopar.serve.Batcher(lambda items: [thread_name()] * len(items)) as batcher:
        return [await batcher(torch.ones(1))]


async def call() -> list[str]:
    return [await aiopar.run_sync(thread_name)]


@pytest.mark.parametrize("names", [call, gang, generator, batch])
@pytest.mark.anyio
async def test_calls_without_a_device_stay_on_the_first_devices(
    names: Callable[[], Awaitable[list[str]]], fresh_default: aiopar.DeviceExecutor
) -> None:
    """Also if only workers of other devices are idle."""
    assert await aiopar.run_sync(thread_name, device="meta") == "aiopar-meta-0"
    found: list[str] = []

    async def find() -> None:
        found.extend(await names())

    gates = [Gate() for _ in fresh_default.on("cpu").devices]
    async with anyio.create_task_group() as tasks:
        with ExitStack() as opened:
            for gate in gates:
                opened.enter_context(gate)
                fresh_default.submit(gate)
            for gate in gates:
                await gate.entered()
            tasks.start_soon(find)
            await anyio.wait_all_tasks_blocked()
    assert found
    assert not [name for name in found if "meta" in name]


@pytest.mark.anyio
async def test_an_explicit_executor_never_grows() -> None:
    async with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
        with aiopar.use_executor(executor):
            with pytest.raises(ValueError, match=r"3 calls at once .* has 2"):
                await aiopar.parallel_apply([str] * 3, [1, 2, 3], devices=["cpu"] * 3)
            with pytest.raises(ValueError, match="on meta"):
                await aiopar.run_sync(str, device="meta")
        assert executor.devices == (torch.device("cpu"),) * 2


@pytest.mark.anyio
async def test_use_executor_reaches_calls_tasks_and_workers_of_its_context() -> None:
    outside = aiopar.get_executor()
    seen: list[aiopar.DeviceExecutor] = []

    async def task() -> None:
        seen.append(aiopar.get_executor())

    async with (
        aiopar.DeviceExecutor(["cpu"]) as executor,
        aiopar.DeviceExecutor(["cpu"], thread_name_prefix="inner") as inner,
    ):
        with aiopar.use_executor(executor) as used:
            assert used is executor
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(task)
            assert seen == [executor]
            assert await aiopar.run_sync(aiopar.get_executor) is executor
            # A nested call finds it too.
            nested = aiopar.fork(lambda: aiopar.fork(aiopar.get_executor).wait())
            assert await nested is executor
            with aiopar.use_executor(inner.on("cpu")):
                name = await aiopar.run_sync(lambda: threading.current_thread().name)
                assert name == "inner-cpu-0"
            assert aiopar.get_executor() is executor
        assert aiopar.get_executor() is outside
        assert contextvars.Context().run(aiopar.get_executor) is outside


@pytest.mark.parametrize("given", [None, "cpu", aiopar.DeviceExecutor])
def test_use_executor_refuses_other_objects(given: Any) -> None:
    with pytest.raises(TypeError, match="executor must be a DeviceExecutor"):
        aiopar.use_executor(given).__enter__()


@pytest.mark.anyio
async def test_run_sync_runs_on_the_given_device(devices: tuple[torch.device, ...]) -> None:
    async with aiopar.DeviceExecutor([*devices, "cpu"], thread_name_prefix="mine") as executor:
        with aiopar.use_executor(executor):
            call = aiopar.run_sync(lambda: threading.current_thread().name, device=devices[-1])
        assert (await call).startswith(f"mine-{devices[-1]}-"), "captured when it was called"
        with pytest.raises(ValueError, match="warp"):
            _ = aiopar.run_sync(str, device="warp")
        with pytest.raises(TypeError, match="coroutine function"):
            _ = aiopar.run_sync(asyncio.sleep, 0)


def test_a_destructor_may_use_the_default_executor_while_it_is_made() -> None:
    for interruption in at_every_point():
        aiopar.get_executor().shutdown()
        used: list[int] = []
        with interruption.by(lambda: used.append(aiopar.fork(abs, -2).result(10))):  # noqa: B023
            executor = aiopar.get_executor()
        assert executor.submit(abs, -1).result(10) == 1
        assert used == [2] * interruption.came
