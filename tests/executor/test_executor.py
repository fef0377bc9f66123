"""`aiopar.DeviceExecutor`: which worker runs a call, views, refused arguments, statistics."""

import asyncio
import concurrent.futures
import copy
import dataclasses
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any, assert_type

import numpy as np
import pytest
import torch

import aiopar
from aiopar.testing import Gate
from tests import simdevice
from tests.home import AtHome, place
from tests.no_threads import NO_THREAD, no_more_threads
from tests.workers import MakeWorkers, Workers, worker_device


async def _coroutine_function() -> None:
    raise AssertionError("never called")


class _AsyncCallable:
    async def __call__(self) -> None:
        raise AssertionError("never called")


class _AsyncModule(torch.nn.Module):
    async def forward(self) -> None:
        raise AssertionError("never called")


def _thread_name(_: object = None) -> str:
    return threading.current_thread().name


def test_concurrent_futures_accepts_every_kind_of_executor(workers: Workers) -> None:
    assert isinstance(workers, concurrent.futures.Executor)
    futures = [workers.submit(pow, 2, exp=n) for n in range(5)]
    done, pending = concurrent.futures.wait(futures, timeout=10)
    assert (done, pending) == (set(futures), set())
    assert [future.result() for future in futures] == [1, 2, 4, 8, 16]
    assert list(workers.map(pow, [2, 3], [3, 2])) == [8, 9]


@pytest.mark.anyio
async def test_a_worker_has_a_device_and_a_named_thread() -> None:
    async with aiopar.DeviceExecutor(["cpu", "cpu:0"], thread_name_prefix="mine") as executor:
        assert executor.devices == (torch.device("cpu"),) * 2
        assert repr(executor) == "<DeviceExecutor on cpu, cpu>"
        names = [await executor.on(worker=k).submit(_thread_name) for k in range(2)]
        assert names == ["mine-cpu-0", "mine-cpu-1"]


def test_a_thread_starts_with_the_first_call() -> None:
    # Not the number of threads: threads of earlier tests may be about to end.
    before = set(threading.enumerate())
    with aiopar.DeviceExecutor(["cpu"] * 4) as executor:
        assert set(threading.enumerate()) <= before
        thread = executor.submit(threading.current_thread).result()
        assert set(threading.enumerate()) - before == {thread}


@pytest.mark.anyio
async def test_a_call_goes_to_the_least_loaded_worker(make_workers: MakeWorkers) -> None:
    async with make_workers(3) as executor:
        with Gate() as gate:
            for worker in (0, 0, 2):
                executor.on(worker=worker).submit(AtHome(gate))
            await gate.entered(2)
            elsewhere = await executor.run_sync(place)
            assert elsewhere == await executor.on(worker=1).run_sync(place)


@pytest.mark.anyio
async def test_an_idle_worker_takes_queued_calls(workers: Workers) -> None:
    with Gate() as first, Gate() as second:
        workers.on(worker=0).submit(AtHome(first))
        workers.on(worker=1).submit(AtHome(second))
        await first.entered()
        await second.entered()
        queued = [workers.submit(place) for _ in range(4)]
        pinned = workers.on(worker=0).submit(place)
        assert [worker.queued for worker in workers.stats().workers] == [3, 2]
        second.open()
        other = await workers.on(worker=1).submit(place)
        assert [await future for future in queued] == [other] * 4
        assert [worker.queued for worker in workers.stats().workers] == [1, 0]
    assert await pinned != other


@pytest.mark.anyio
async def test_stats_count_queued_running_and_ended_calls(make_workers: MakeWorkers) -> None:
    async with make_workers(2) as executor:
        first, second = executor.on(worker=0), executor.on(worker=1)
        with Gate() as gate:
            running = first.submit(AtHome(gate))
            await gate.entered()
            queued = first.submit(str)
            await second.run_sync(str)
            with pytest.raises(ZeroDivisionError):
                await second.run_sync(divmod, 1, 0)
            stats = executor.stats().workers[0]
            # The start of a process takes time too.
            assert dataclasses.replace(stats, host=None, busy_seconds=0.0) == aiopar.WorkerStats(
                torch.device("cpu"), queued=1, running=1, completed=0, failed=0, busy_seconds=0.0
            )
        await running
        await queued
        ahead, behind = executor.stats().workers
        assert (ahead.queued, ahead.running, ahead.completed, ahead.failed) == (0, 0, 2, 0)
        assert (behind.queued, behind.running, behind.completed, behind.failed) == (0, 0, 1, 1)
        assert ahead.busy_seconds > 0
        assert first.stats().workers == (ahead,), "a view has the stats of its workers"


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_an_executor_cannot_be_pickled_or_copied(
    workers: Workers, copied: Callable[[object], object]
) -> None:
    for one in (workers, workers.on(worker=0), {"held": workers}):
        with pytest.raises(TypeError, match="threads of an executor"):
            copied(one)


def fail(error: type[BaseException]) -> None:
    raise error("mine")


@pytest.mark.anyio
async def test_a_worker_survives_every_error(workers: Workers) -> None:
    errors: list[type[BaseException]] = [ValueError, SystemExit, KeyboardInterrupt]
    errors += [asyncio.CancelledError, aiopar.QueueFull, StopAsyncIteration]
    executor = workers.on(worker=0)
    before = await executor.run_sync(place)
    for error in errors:
        for verb in (executor.submit, executor.run_sync):
            with pytest.raises(error) as caught:
                await verb(fail, error)
            assert caught.value.args == ("mine",)
    assert await executor.run_sync(place) == before


@pytest.mark.anyio
async def test_stop_iteration_becomes_a_runtime_error(workers: Workers) -> None:
    # An `await` cannot raise it: to the coroutine protocol it means "returned".
    for call in (workers.submit(next, iter(())), workers.run_sync(next, iter(()))):
        with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
            await call
        assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize(
    "fn",
    [
        _coroutine_function,
        functools.partial(_coroutine_function),
        _AsyncCallable(),
        _AsyncModule(),
    ],
)
@pytest.mark.parametrize("verb", ["submit", "run_sync", "iterate", "submit_all"])
def test_a_coroutine_function_is_refused_with_advice(
    workers: Workers, verb: str, fn: Callable[..., Any]
) -> None:
    method = getattr(workers, verb)
    with pytest.raises(TypeError, match=r"await it .* functools\.partial\(anyio\.run, fn\)"):
        method([fn] if verb == "submit_all" else fn)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"devices": []}, ValueError, "devices is empty"),
        ({"devices": "cpu"}, TypeError, "sequence of devices"),
        ({"devices": 0}, TypeError, "sequence of devices"),
        ({"devices": b"cpu"}, TypeError, "sequence of devices, got b'cpu'"),
        ({"devices": [b"cpu"]}, TypeError, "not bytes"),
        ({"devices": [None]}, TypeError, "not NoneType"),
        ({"devices": [True]}, TypeError, "not bool"),
        ({"devices": ["warp:0"]}, ValueError, "warp:0"),
        ({"devices": [np.True_]}, TypeError, "not bool"),
        ({"devices": [99]}, ValueError, "99"),
        ({"devices": [np.int64(99)]}, ValueError, "device 99"),
        ({"devices": ["cpu"], "max_pending": 0}, ValueError, "max_pending .* at least 1, got 0"),
        ({"devices": ["cpu"], "max_pending": 1.5}, TypeError, "max_pending .* not float"),
        ({"devices": ["cpu"], "num_threads": 0}, ValueError, "num_threads .* at least 1, got 0"),
        ({"devices": ["cpu"], "num_threads": True}, TypeError, "num_threads .* not bool"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(error, match=message):
        aiopar.DeviceExecutor(**arguments)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (None, r"calls must be an iterable of .* \(fn, \*args\), not "),
        (print, r"calls must be an iterable of .* \(fn, \*args\), not "),
        ([()], r"tuple \(fn, \*args\), got \(\)"),
        ([str, 3], "expected a callable, got 3"),
    ],
)
def test_submit_all_refuses_other_calls(workers: Workers, calls: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        workers.submit_all(calls)


@pytest.mark.parametrize("verb", ["submit", "run_sync", "iterate"])
def test_an_object_that_is_not_callable_is_refused(workers: Workers, verb: str) -> None:
    with pytest.raises(TypeError, match="expected a callable, got 3"):
        getattr(workers, verb)(3)


def test_submit_all_has_typed_futures() -> None:
    def one() -> int:
        return 1

    def text(n: int) -> str:
        return str(n)

    with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
        assert_type(executor.submit_all([one, one]), list[aiopar.Future[int]])
        assert_type(executor.submit_all([(text, 2)] * 2), list[aiopar.Future[str]])
        # `pow` is overloaded: mypy needs the signature to infer the element type of the list.
        assert_type(executor.submit_all([(pow, 2, 2), (pow, 2, 3)]), list[aiopar.Future[int]])
        both: list[aiopar.Future[int | str]] = executor.submit_all([(text, 4), (one,)])
        assert aiopar.wait_all(both) == ["4", 1]
        assert aiopar.wait_all(executor.submit_all([one, (text, 3)])) == [1, "3"]


# Workers that share a queue: no call is lost, and no call waits while a worker is idle.


@pytest.mark.parametrize("workers", [2, 3])
def test_a_shared_call_does_not_wait_behind_a_call_for_one_worker(
    make_workers: MakeWorkers, workers: int
) -> None:
    with make_workers(workers) as executor:
        for round_number in range(200):
            with Gate() as gate:
                # The worker may be on its way to sleep, asleep, or woken for the other call.
                pinned = executor.on(worker=round_number % workers).submit(AtHome(gate))
                assert executor.submit(abs, -round_number).result(30) == round_number
                gate.open()
                pinned.result(30)


def test_threads_that_submit_at_once_lose_no_call(make_workers: MakeWorkers) -> None:
    def hand_in(start: int) -> list[int]:
        futures = [executor.submit(abs, -n) for n in range(start, start + 300)]
        pinned = [executor.on(worker=n % 3).submit(abs, -n) for n in range(30)]
        return [future.result(60) for future in (*pinned, *futures)]

    with make_workers(3) as executor:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            results = list(threads.map(hand_in, range(8)))
        assert results == [[*range(30), *range(start, start + 300)] for start in range(8)]
        assert sum(worker.completed for worker in executor.stats().workers) == 8 * 330


def test_workers_of_different_devices_share_no_queue() -> None:
    with aiopar.DeviceExecutor(["meta", "cpu", "meta"]) as executor:
        for device in ("meta", "cpu"):
            names = set(executor.on(device).map(_thread_name, range(200)))
            assert all(name.startswith(f"aiopar-{device}-") for name in names)
        assert len(list(executor.map(_thread_name, range(200)))) == 200


def test_a_call_for_which_no_thread_starts_is_no_load() -> None:
    with aiopar.DeviceExecutor(["cpu", "cpu", "meta"]) as executor:
        for _ in range(4):
            with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
                executor.on("cpu").submit(int)
        assert executor.submit(worker_device).result() == "cpu"


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
@pytest.mark.parametrize("device", [-1, 2, "sim:2"])
def test_an_accelerator_that_is_not_there_is_refused(device: int | str) -> None:
    with pytest.raises(ValueError, match=r"out of range: expected an index in \[0, 2\)"):
        aiopar.DeviceExecutor([device])


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
