"""`aiopar.DeviceExecutor`: which worker runs a call, refused arguments, statistics."""

import asyncio
import concurrent.futures
import copy
import dataclasses
import functools
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, assert_type

import numpy as np
import pytest
import torch

import aiopar
from aiopar.testing import Gate
from tests.home import AtHome, place, places
from tests.workers import MakeWorkers, Workers


async def _coroutine_function() -> None:
    raise AssertionError("never called")


async def _async_generator() -> AsyncIterator[int]:
    yield 1


class _AsyncCallable:
    async def __call__(self) -> None:
        raise AssertionError("never called")


class _AsyncModule(torch.nn.Module):
    async def forward(self) -> None:
        raise AssertionError("never called")


def _thread_name() -> str:
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
            executor.on(worker=1).submit(AtHome(gate))
            await gate.entered(3)
            # One call waits for the first worker. Any worker may run these two.
            queued = [executor.submit(place) for _ in range(2)]
            assert sum(worker.queued for worker in executor.stats().workers) == 3
        assert {await future for future in queued} <= await places(executor)


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
