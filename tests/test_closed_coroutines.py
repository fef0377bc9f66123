"""A coroutine that is closed before its end waits for no call, and drops its queued call."""

import asyncio
import gc
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
from torch import nn

import aiopar
from aiopar.data import AsyncDataLoader, Pipeline
from aiopar.serve import Batcher, ReplicaPool
from aiopar.testing import Gate
from tests.lost_loops import closed_under_tasks
from tests.train.units import units

CPUS = ["cpu", "cpu"]
X = torch.ones(2)
Fn: TypeAlias = Any
"""A function, often a gate."""
Call: TypeAlias = Coroutine[Any, Any, Any]


class Calling(nn.Module):
    """Calls a function in its forward."""

    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fn()
        return x


async def _future(future: aiopar.Future[Any]) -> None:
    await future


def _backward(fn: Fn) -> Call:
    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(lambda _: fn())  # type: ignore[no-untyped-call]  # torch's
    return aiopar.backward(y)


def _parallel(fn: Fn) -> aiopar.Parallel:
    return aiopar.Parallel(1, units(lambda _: fn()), max_pending=1)


async def _put(fn: Fn) -> None:
    parallel = _parallel(fn)
    await parallel.put(0)
    await parallel.put(1)


async def _get(fn: Fn) -> None:
    parallel = _parallel(fn)
    await parallel.put(0)
    await parallel.get()


async def _close_parallel(fn: Fn) -> None:
    parallel = _parallel(fn)
    await parallel.put(0)
    await parallel.aclose()


def _generator(fn: Fn) -> Iterator[object]:
    while True:
        yield fn()


async def _begin_to_read(items: AsyncIterator[Any], gate: Any) -> None:
    reading: asyncio.Task[Any] = asyncio.create_task(items.__anext__())  # type: ignore[arg-type]  # a coroutine
    await gate.entered()
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading


async def _close_iteration(fn: Fn) -> None:
    iteration = aiopar.get_executor().iterate(_generator, fn)
    await _begin_to_read(iteration, fn)
    await iteration.aclose()


def _loader(fn: Fn, **options: Any) -> Call:
    loader = AsyncDataLoader(range(3), collate_fn=lambda _: fn(), **options)
    return aiter(loader).__anext__()


def _pipeline(fn: Fn, **options: Any) -> Call:
    return aiter(Pipeline(range(3), **options).map(lambda _: fn(), concurrency=1)).__anext__()


async def _close_stream(fn: Fn) -> None:
    stream = aiter(Pipeline(range(3)).map(lambda _: fn(), concurrency=1))
    await _begin_to_read(stream, fn)
    await stream.aclose()


async def _swap(fn: Fn) -> None:
    pool = ReplicaPool(nn.Identity(), CPUS, warmup=X)
    await pool(X)
    await pool.swap(Calling(fn))


async def _leave_executor(fn: Fn) -> None:
    executor = aiopar.DeviceExecutor(["cpu"])
    executor.submit(fn)
    await executor.aclose()


async def _close_batcher(fn: Fn, seconds: float | None = None) -> None:
    batcher = Batcher(Calling(fn))
    waiting = asyncio.create_task(batcher(X))
    await fn.entered()
    await batcher.aclose(timeout=seconds)
    await waiting


CALLS: dict[str, Callable[[Fn], Call]] = {
    "run_sync": aiopar.run_sync,
    "submit": lambda fn: _future(aiopar.get_executor().submit(fn)),
    "parallel_apply": lambda fn: aiopar.parallel_apply([fn] * 2, [()] * 2, devices=CPUS),
    "DataParallel": lambda fn: aiopar.DataParallel(Calling(fn), CPUS)(X),
    "DataParallel, one device": lambda fn: aiopar.DataParallel(Calling(fn), ["cpu"])(X),
    "data_parallel": lambda fn: aiopar.data_parallel(Calling(fn), X, CPUS),
    "backward": _backward,
    "Parallel.put": _put,
    "Parallel.get": _get,
    "Parallel.aclose": _close_parallel,
    "iterate": lambda fn: aiopar.get_executor().iterate(_generator, fn).__anext__(),
    "Iteration.aclose": _close_iteration,
    "loader": _loader,
    "loader, timeout": lambda fn: _loader(fn, timeout=50),
    "pipeline": _pipeline,
    "pipeline, timeout": lambda fn: _pipeline(fn, timeout=50),
    "Stream.aclose": _close_stream,
    "Batcher": lambda fn: Batcher(Calling(fn))(X),
    "Batcher.aclose": _close_batcher,
    "Batcher.aclose, timeout": lambda fn: _close_batcher(fn, 50),
    "ReplicaPool": lambda fn: ReplicaPool(Calling(fn), CPUS)(X),
    "ReplicaPool.swap": _swap,
    "DeviceExecutor.aclose": _leave_executor,
}


async def _begun(call: Call, gate: Gate) -> None:
    """Run the coroutine, as a task would, until it waits for a call that the gate holds."""
    waited = None
    while waited is None or waited.done() or not gate.held:
        if waited is None or waited.done():
            waited = call.send(None)
            if waited is not None:
                waited._asyncio_future_blocking = False
        await asyncio.sleep(0)


def _close(call: Call, loop: asyncio.AbstractEventLoop, where: str) -> None:
    async def close() -> None:
        call.close()

    if where == "in another task":
        loop.run_until_complete(close())
    loop.close()
    call.close()


WHERE = ["in its task", "in another task", "without a loop"]


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", CALLS)
def test_a_closed_coroutine_does_not_wait_for_a_running_call(
    name: str, where: str, cancelled: bool
) -> None:
    async def begin() -> Call:
        call = CALLS[name](gate)
        await _begun(call, gate)
        if cancelled:
            with suppress(asyncio.CancelledError):
                call.throw(asyncio.CancelledError())
        if where == "in its task":
            call.close()
        return call

    with Gate() as gate, closed_under_tasks() as loop:
        call = loop.run_until_complete(begin())
        _close(call, loop, where)
        assert gate.held


async def _within(owner: Any, use: Callable[[Any], Awaitable[object]]) -> None:
    async with owner as entered:
        await use(entered)


async def _read(items: Any) -> None:
    async for _ in items:
        pass


async def _unit(parallel: aiopar.Parallel) -> None:
    await parallel.put(0)
    await parallel.get()


OWNERS: dict[str, Callable[[Fn], Call]] = {
    "async with executor": lambda fn: _within(
        aiopar.DeviceExecutor(["cpu"]), lambda one: one.run_sync(fn)
    ),
    "async with Parallel": lambda fn: _within(_parallel(fn), _unit),
    "async with Iteration": lambda fn: _within(
        aiopar.get_executor().iterate(_generator, fn), _read
    ),
    "async with Pipeline": lambda fn: _within(
        Pipeline([1]).map(lambda _: fn(), concurrency=1), _read
    ),
    "async with loader": lambda fn: _within(AsyncDataLoader([1], collate_fn=lambda _: fn()), _read),
    "async with Batcher": lambda fn: _within(Batcher(Calling(fn)), lambda batcher: batcher(X)),
    "async with ReplicaPool": lambda fn: _within(
        ReplicaPool(Calling(fn), CPUS), lambda pool: pool(X)
    ),
}


@pytest.mark.parametrize("name", [*CALLS, *OWNERS])
def test_the_task_of_a_closed_loop_is_collected(name: str) -> None:
    async def begin() -> None:
        tasks.append(asyncio.create_task((CALLS | OWNERS)[name](gate)))
        await gate.entered()
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[Any]] = []
    with Gate() as gate:
        with closed_under_tasks() as loop:
            loop.run_until_complete(begin())
        with mock.patch.object(sys, "unraisablehook") as ignored:
            tasks.clear()
            gc.collect()
        assert [
            traceback.format_exception(call.args[0].exc_value) for call in ignored.mock_calls
        ] == []
        assert gate.held


ON_THE_EXECUTOR = ["run_sync", "parallel_apply", "DataParallel", "data_parallel"]
ON_THE_EXECUTOR += ["DataParallel, one device", "backward"]
CALLS_WITHOUT_A_FUNCTION: dict[str, Callable[[], Call]] = {
    "scatter": lambda: aiopar.scatter(X, CPUS),
    "gather": lambda: aiopar.gather([X, X], "cpu"),
    "replicate": lambda: aiopar.replicate(nn.Identity(), CPUS),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", [*ON_THE_EXECUTOR, *CALLS_WITHOUT_A_FUNCTION])
@pytest.mark.parametrize("max_pending", [None, 1])  # with 1 there is no room in the queue
def test_a_closed_coroutine_drops_a_queued_call(
    name: str, where: str, max_pending: int | None
) -> None:
    ran: list[object] = []

    async def begin() -> Call:
        executor.submit_all([gate, gate])
        await gate.entered(2)
        for _ in range(2 * (max_pending or 0)):
            executor.submit(int)
        with aiopar.use_executor(executor):
            if name in CALLS:
                call = CALLS[name](lambda: ran.append(0))
            else:
                call = CALLS_WITHOUT_A_FUNCTION[name]()
            call.send(None)
        if where == "in its task":
            call.close()
        return call

    executor = aiopar.DeviceExecutor(CPUS, max_pending=max_pending)
    with executor, Gate() as gate, closed_under_tasks() as loop:
        call = loop.run_until_complete(begin())
        _close(call, loop, where)
        assert sum(worker.queued for worker in executor.stats().workers) == 2 * bool(max_pending)
        gate.open()
    assert ran == []


def test_a_generator_that_is_closed_on_a_worker_may_wait() -> None:
    ended: list[int] = []

    def generate() -> Iterator[int]:
        try:
            yield 1
        finally:
            ended.append(aiopar.wait(aiopar.run_sync(abs, -2)))

    async def main() -> None:
        async with aiopar.get_executor().iterate(generate) as items:
            assert await anext(items) == 1

    asyncio.run(main())
    assert ended == [2]
