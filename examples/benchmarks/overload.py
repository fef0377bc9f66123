"""`Batcher` at ten times its capacity: most are refused, at once, and the others soon served."""

import asyncio
import statistics
import time

import aiopar
from examples.benchmarks.harness import Plan, Result, no_garbage_collection, quartiles, result_of
from examples.benchmarks.heartbeat import PERIOD, p99
from examples.benchmarks.own_process import in_own_process

BATCH, BATCH_SECONDS = 32, 0.020
PENDING = 2 * BATCH
TIMES = 10
RATE = TIMES * BATCH / BATCH_SECONDS  # requests a second
REFUSED = 50.0  # milliseconds
ACCEPTED = 4.0  # batch times


async def measure(plan: Plan) -> list[Result]:
    return await in_own_process(measure_here, plan)


async def measure_here(plan: Plan) -> list[Result]:
    samples = []
    for _ in range(max(2, plan.pairs // 2)):
        with no_garbage_collection():
            samples.append(await overload(plan.beats))
    return results_of(samples)


class Load:
    """Requests, and how many seconds after they were due each was answered or refused."""

    def __init__(self, batcher: aiopar.Batcher) -> None:
        self.accepted: list[float] = []
        self.refused: list[float] = []
        self._batcher = batcher

    async def request(self, due: float) -> None:
        after = self.accepted
        try:
            await self._batcher(0)
        except aiopar.Overloaded:
            after = self.refused
        after.append(time.perf_counter() - due)


def compute(items: list[int]) -> list[int]:
    """As an accelerator does: it takes its time, and no core."""
    time.sleep(BATCH_SECONDS)
    return items


async def overload(beats: int) -> Load:
    """A full queue, and then so many milliseconds of ten times the requests that can be served."""
    async with (
        aiopar.DeviceExecutor(["cpu"]) as executor,
        asyncio.TaskGroup() as tasks,
    ):
        with aiopar.use_executor(executor):
            batcher = aiopar.Batcher(
                compute, max_batch_size=BATCH, max_pending=PENDING, collate_fn=list
            )
            load, began, sent = Load(batcher), time.perf_counter(), 0
            for _ in range(4 * PENDING):
                tasks.create_task(load.request(began))
            for _ in range(beats):
                # Clients do not wait for each other: what is late is sent, and counted, as due.
                while (due := began + sent / RATE) <= time.perf_counter():
                    tasks.create_task(load.request(due))
                    sent += 1
                await asyncio.sleep(PERIOD)
            await batcher.aclose()
    return load


def results_of(samples: list[Load]) -> list[Result]:
    """Of the 99th percentile of each sample the median, and as its spread the quartiles."""
    what = f"Batcher at {TIMES} times its capacity"
    refused = [p99(load.refused) for load in samples]
    accepted = [p99(load.accepted) for load in samples]
    low, value, high = quartiles(refused)
    until_refused = Result(
        what=f"{what}: p99 until refused",
        against="until answered",
        ours=value * 1e3,
        theirs=statistics.median(accepted) * 1e3,
        unit="ms",
        value=value * 1e3,
        low=low * 1e3,
        high=high * 1e3,
        value_unit="ms",
        bound=REFUSED,
        samples=sum(len(load.refused) for load in samples),
    )
    until_answered = result_of(
        accepted,
        [BATCH_SECONDS] * len(accepted),
        what=f"{what}: p99 until answered",
        against="one batch",
        unit="ms",
        bound=ACCEPTED,
    )
    return [until_refused, until_answered]
