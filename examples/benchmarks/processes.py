"""Worker processes, against `ProcessPoolExecutor`, threads, and processes of the program's own."""

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing
from torch import Tensor, nn

import aiopar
from examples.benchmarks.harness import (
    Plan,
    Result,
    Rivals,
    compare,
    result_of,
    seconds_per_call,
)
from examples.benchmarks.heartbeat import beat, p99

ROUND_TRIP_BOUNDS = {"a no-op": 0.7, "1 KB": 0.2, "10 MB": 0.25}
THREAD_BOUND = 4.0
START_BOUND = 0.1
LAG_BOUND = 0.4
PLAIN_BOUND = 0.8

Call = Callable[..., Awaitable[object]]


def noop() -> None:
    """The shortest call."""


def plus_one(x: Tensor) -> Tensor:
    """The result is another tensor: nothing can be handed back as it came."""
    return x + 1


def count(steps: int = 200_000) -> int:
    """Python code, for about as long as a batch takes in a tokenizer: ten milliseconds."""
    total = 0
    for step in range(steps):
        total += step & 3
    return total


async def measure(plan: Plan) -> list[Result]:
    results = await _round_trips(plan)
    results.append(await _start(plan))
    results.append(await _lag(plan))
    results.append(await _python(plan))
    results.append(await _small_model(plan))
    return results


async def _round_trips(plan: Plan) -> list[Result]:
    loop, results = asyncio.get_running_loop(), []
    context = torch.multiprocessing.get_context("forkserver")
    async with (
        aiopar.ProcessExecutor(["cpu"]) as ours,
        aiopar.DeviceExecutor(["cpu"]) as threads,
    ):
        with ProcessPoolExecutor(1, mp_context=context) as theirs:
            pool: Call = partial(loop.run_in_executor, theirs)
            calls = plan.calls // 8
            sizes = {"a no-op": (0, calls), "1 KB": (256, calls), "10 MB": (2_500_000, 20)}
            for name, (size, number) in sizes.items():
                rivals = Rivals(
                    what=f"worker process: {name} there and back",
                    ours=partial(_trips, ours.run_sync, size, number),
                    against="ProcessPoolExecutor",
                    theirs=partial(_trips, pool, size, number),
                    bound=ROUND_TRIP_BOUNDS[name],
                )
                results.append(await compare(rivals, plan.pairs))
        rivals = Rivals(
            what="worker process: a no-op there and back",
            ours=partial(_trips, ours.run_sync, 0, calls),
            against="thread worker",
            theirs=partial(_trips, threads.run_sync, 0, calls),
            bound=THREAD_BOUND,
        )
        results.append(await compare(rivals, plan.pairs))
    return results


async def _trips(run: Call, size: int, number: int) -> float:
    """Seconds per call with a tensor of this size. Each is new: torch shares a tensor only once."""
    if not size:
        return await seconds_per_call(partial(run, noop), 1, number)
    sent, seconds = torch.rand(size), 0.0
    for _ in range(number):
        x = sent.clone()
        began = time.perf_counter()
        y = await run(plus_one, x)
        seconds += time.perf_counter() - began
        del x, y
    return seconds / number


def _ready(end: Connection) -> None:
    end.send(torch.ones(1).item())


def _spawn() -> float:
    began = time.perf_counter()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_ready, args=(there,))
    process.start()
    here.recv()
    seconds = time.perf_counter() - began
    process.join()
    return seconds


async def _start(plan: Plan) -> Result:
    # Each process imports the main module, `run`, which imports transformers and more.
    async with aiopar.ProcessExecutor(["cpu"], preload=["examples.benchmarks.run"]) as executor:

        async def second() -> float:
            began = time.perf_counter()
            await executor.resize(2)
            seconds = time.perf_counter() - began
            await executor.resize(1)
            return seconds

        rivals = Rivals(
            what="a second worker process takes calls, modules preloaded",
            ours=second,
            against="multiprocessing's spawn",
            theirs=partial(asyncio.to_thread, _spawn),
            bound=START_BOUND,
            unit="ms",
        )
        return await compare(rivals, max(2, plan.pairs // 3))


async def _lag(plan: Plan) -> Result:
    async with (
        aiopar.ProcessExecutor(["cpu", "cpu"]) as processes,
        aiopar.DeviceExecutor(["cpu", "cpu"]) as threads,
    ):
        rivals = Rivals(
            what="loop lag p99, two workers run Python code in processes",
            ours=partial(_lag_of, processes, plan.beats),
            against="the same in threads",
            theirs=partial(_lag_of, threads, plan.beats),
            bound=LAG_BOUND,
            unit="ms",
        )
        return await compare(rivals, plan.pairs)


async def _lag_of(executor: aiopar.DeviceExecutor, beats: int) -> float:
    async def repeat() -> None:
        while True:
            await executor.run_sync(count)

    tasks = [asyncio.create_task(repeat()) for _ in range(2)]
    try:
        return p99(await beat(beats)) / 1e3
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _count_when_told(end: Connection) -> None:
    while calls := end.recv():
        for _ in range(calls):
            count()
        end.send(None)


async def _python(plan: Plan) -> Result:
    """Calls per second of Python code on a pair of workers."""
    context, calls = multiprocessing.get_context("forkserver"), plan.calls // 16
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    plain = [context.Process(target=_count_when_told, args=(there,)) for _, there in pipes]
    for process in plain:
        process.start()

    def by_hand() -> float:
        began = time.perf_counter()
        for here, _ in pipes:
            here.send(calls // 2)
        for here, _ in pipes:
            here.recv()
        return calls / (time.perf_counter() - began)

    async with aiopar.ProcessExecutor(["cpu", "cpu"]) as executor:

        async def ours() -> float:
            return 1 / await seconds_per_call(partial(executor.run_sync, count), 4, calls)

        rivals = Rivals(
            what="a pair of worker processes: calls of Python code",
            ours=ours,
            against="loops in two plain processes",
            theirs=partial(asyncio.to_thread, by_hand),
            bound=PLAIN_BOUND,
            unit="requests/s",
            at_least=True,
        )
        result = await compare(rivals, plan.pairs)
    for (here, _), process in zip(pipes, plain, strict=True):
        here.send(0)
        process.join()
    return result


async def _small_model(plan: Plan) -> Result:
    """Batches per second of a model that spends its time in torch's operators."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    batch = torch.rand(64, 256)
    async with (
        aiopar.ProcessExecutor(["cpu", "cpu"]) as processes,
        aiopar.DeviceExecutor(["cpu", "cpu"]) as threads,
        aiopar.ReplicaPool(model, executor=processes, warmup=batch) as there,
        aiopar.ReplicaPool(model, executor=threads, warmup=batch) as here,
    ):

        async def speed(pool: aiopar.ReplicaPool[Tensor]) -> float:
            return 1 / await seconds_per_call(partial(pool, batch), 4, plan.calls // 4)

        ours, theirs = [], []
        for _ in range(max(2, plan.pairs)):
            ours.append(await speed(there))
            theirs.append(await speed(here))
    return result_of(
        ours,
        theirs,
        what="a small MLP in worker processes",
        against="the same in threads",
        unit="requests/s",
        bound=None,
        at_least=True,
    )
