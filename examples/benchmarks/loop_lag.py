"""The lag of the event loop while every worker computes, measured by a heartbeat."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import chain

import torch
from torch import nn

import aiopar
from examples.benchmarks.harness import Plan, Result, no_garbage_collection, quartiles
from examples.benchmarks.heartbeat import beat, p99
from examples.train_digits import make_network

BOUND = 5.0  # milliseconds

Load = Callable[[aiopar.DeviceExecutor], contextlib.AbstractAsyncContextManager[None]]


@contextlib.asynccontextmanager
async def long_calls(
    work: Callable[[], object], executor: aiopar.DeviceExecutor
) -> AsyncIterator[None]:
    """Keep every worker busy with one long call that repeats `work`."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            work()

    calls = executor.submit_all([repeat] * len(executor.devices))
    try:
        yield
    finally:
        stop.set()
        await aiopar.collect_all(calls)


@contextlib.asynccontextmanager
async def short_calls(
    work: Callable[[], object], executor: aiopar.DeviceExecutor
) -> AsyncIterator[None]:
    """Keep calls queued for every worker; the loop awaits each result."""

    async def repeat() -> None:
        while True:
            await executor.run_sync(work)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(repeat()) for _ in range(2 * len(executor.devices))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


@contextlib.asynccontextmanager
async def backwards(
    network: nn.Module, images: torch.Tensor, executor: aiopar.DeviceExecutor
) -> AsyncIterator[None]:
    """Await forwards and backwards, one after the other."""

    async def repeat() -> None:
        with aiopar.use_executor(executor):
            while True:
                outputs = await executor.run_sync(network, images)
                await aiopar.backward(outputs, torch.ones_like(outputs))

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def measure(plan: Plan) -> list[Result]:
    async with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
        matrix = await executor.run_sync(torch.randn, 256, 256)
        layer = await executor.run_sync(nn.TransformerEncoderLayer, 256, 4)
        tokens = await executor.run_sync(torch.randn, 64, 8, 256)
        network = await executor.run_sync(make_network, torch.device("cpu"))
        images = await executor.run_sync(torch.rand, 256, 1, 8, 8)
        matmul, forward = partial(torch.mm, matrix, matrix), partial(layer, tokens)
        loads: dict[str, Load] = {
            "256x256 matmuls": partial(long_calls, matmul),
            "a transformer layer": partial(long_calls, forward),
            "awaited matmuls": partial(short_calls, matmul),
            "awaited backwards": partial(backwards, network, images),
        }
        return [await measure_lag(name, load, executor, plan) for name, load in loads.items()]


async def measure_lag(name: str, load: Load, executor: aiopar.DeviceExecutor, plan: Plan) -> Result:
    """The 99th percentile of all beats, and the quartiles of the 99th percentiles per sample."""
    idle, busy = [], []
    for _ in range(max(2, plan.pairs // 2)):
        with no_garbage_collection():
            idle.append(await beat(plan.beats))
            async with load(executor):
                busy.append(await beat(plan.beats))
    low, _, high = quartiles([p99(late) for late in busy])
    overall = p99(chain.from_iterable(busy))
    return Result(
        what=f"loop lag p99, {name}",
        against="idle loop",
        ours=overall,
        theirs=p99(chain.from_iterable(idle)),
        unit="ms",
        value=overall,
        low=low,
        high=high,
        value_unit="ms",
        bound=BOUND,
        samples=len(busy) * plan.beats,
    )
