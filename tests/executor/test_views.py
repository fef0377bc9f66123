"""Views of an executor, and gangs on its workers."""

import asyncio
import threading
from typing import Any

import pytest
import torch

import aiopar
from tests import simdevice
from tests.home import AtHome, place
from tests.workers import MakeWorkers, Workers


def _thread_name() -> str:
    return threading.current_thread().name


@pytest.mark.anyio
async def test_closing_a_view_closes_nothing(make_workers: MakeWorkers) -> None:
    async with make_workers(2) as executor:
        async with executor.on("cpu") as view:
            assert await view.run_sync(int) == 0
        view.shutdown()
        await view.aclose()
        with executor.on(worker=1) as view:
            future = view.submit(int)
        assert await future == 0
        assert await executor.run_sync(int) == 0
        assert await view.run_sync(int) == 0
    with pytest.raises(aiopar.ExecutorShutdown):
        await view.run_sync(int)


@pytest.mark.asyncio
async def test_asyncio_runs_its_executor_calls_on_a_view(workers: Workers) -> None:
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(workers.on("cpu"), pow, 2, 5) == 32
    second = workers.on(worker=1)
    assert await loop.run_in_executor(second, place) == await second.run_sync(place)


@pytest.mark.anyio
async def test_views_of_views(workers: Workers) -> None:
    view = workers.on("cpu").on(worker=1)
    assert await view.on("cpu").run_sync(place) == await workers.on(worker=1).run_sync(place)
    assert await view.run_sync(place) != await workers.on(worker=0).run_sync(place)
    assert view.devices == (torch.device("cpu"),)
    with pytest.raises(ValueError, match=r"worker 1 is out of range.*\[0, 1\)"):
        view.on(worker=1)


@pytest.mark.anyio
async def test_a_view_on_all_workers_grows_with_them() -> None:
    async with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
        view = executor.on(synchronize=False)
        assert view.devices == executor.devices
        assert await view.run_sync(_thread_name) in {"aiopar-cpu-0", "aiopar-cpu-1"}
    view = aiopar.get_executor().on(synchronize=False)
    layers = [abs] * (len(view.devices) + 1)
    with aiopar.use_executor(view):
        assert await aiopar.parallel_apply(layers, [-1] * len(layers)) == [1] * len(layers)
    assert len(view.devices) >= len(layers)


@pytest.mark.sim
@pytest.mark.parametrize("options", [{}, {"device": "sim:0"}, {"worker": 0}], ids=str)
def test_a_view_without_synchronize(options: dict[str, Any]) -> None:
    def double() -> torch.Tensor:
        return torch.ones(2, device="sim:0") * 2

    with aiopar.DeviceExecutor(["sim:0"]) as executor:
        view = executor.on(**options, synchronize=False)
        with simdevice.paused():
            launched = view.submit(double).result(10)
            synchronized = view.on(synchronize=True).submit(double)
            waited_for = executor.submit(double)
            assert view.submit(double).result(10).device == launched.device, "the worker is free"
            assert not synchronized.done(), "its kernels have not run"
            assert not waited_for.done()
        for future in (synchronized, waited_for):
            assert future.result(10).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "expected a device or a worker"),
        ({"device": "cpu", "worker": 0}, ValueError, "expected a device or a worker"),
        ({"worker": 2}, ValueError, r"worker 2 is out of range.*\[0, 2\)"),
        ({"worker": -1}, ValueError, "worker -1 is out of range"),
        ({"worker": "0"}, TypeError, "worker must be an int, not str"),
        ({"device": "cpu", "worker": 0, "synchronize": False}, ValueError, "expected a device"),
        ({"device": "meta"}, ValueError, "has no worker on meta: its workers are on cpu, cpu"),
        ({"device": "warp"}, ValueError, "warp"),
    ],
)
def test_a_view_without_workers_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with (
        aiopar.DeviceExecutor(["cpu"] * 2) as executor,
        pytest.raises(error, match=message),
    ):
        executor.on(**arguments)


@pytest.mark.anyio
async def test_a_gang_has_a_worker_for_each_call(make_workers: MakeWorkers) -> None:
    async with make_workers(3) as executor:
        meet = AtHome(threading.Barrier(3).wait)
        arrived: list[aiopar.Future[int]] = executor.submit_all([meet, (meet, 10), meet])
        assert sorted([await future for future in arrived]) == [0, 1, 2]
        assert executor.submit_all([]) == []


def test_a_gang_larger_than_the_executor_is_refused_before_any_work(workers: Workers) -> None:
    ran: list[int] = []
    note = AtHome(ran.append)
    with pytest.raises(ValueError, match=r"3 calls .* has 2"):
        workers.submit_all([(note, n) for n in range(3)])
    with pytest.raises(ValueError, match=r"2 calls .* has 1"):
        workers.on(worker=0).submit_all([(note, n) for n in range(2)])
    assert workers.devices == (torch.device("cpu"),) * 2, "it did not grow"
    assert ran == []


def test_a_view_on_a_device_grows_with_the_default_executor() -> None:
    default = aiopar.get_executor()
    view = default.on("cpu")
    wanted = len(view.devices) + 1
    assert [future.result(10) for future in view.submit_all([int] * wanted)] == [0] * wanted
    assert view.devices == (torch.device("cpu"),) * wanted
    assert default.devices.count(torch.device("cpu")) == wanted
    single = default.on(worker=0)
    with pytest.raises(ValueError, match="the executor has 1"):
        single.submit_all([int] * 2)
