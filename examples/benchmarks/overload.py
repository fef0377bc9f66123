"""`Batcher` at ten times its capacity: times until requests are refused or answered."""

import asyncio
import time
from itertools import chain

import aiopar
from examples.benchmarks.harness import UNITS, Plan, Result, no_garbage_collection, quartiles
from examples.benchmarks.heartbeat import PERIOD, p99
from examples.benchmarks.own_process import in_own_process

BATCH, BATCH_SECONDS = 32, 0.020
PENDING = 2 * BATCH
TIMES = 10
RATE = TIMES * BATCH / BATCH_SECONDS  # requests per second
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
    """Sends requests, and records the seconds from due time to answer or refusal."""

    def __init__(self, batcher: aiopar.Batcher[int, int]) -> None:
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
    """Take time but no core, like an accelerator."""
    time.sleep(BATCH_SECONDS)
    return items


async def overload(beats: int) -> Load:
    """Fill the queue, then send ten times the possible rate for `beats` milliseconds."""
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
                # Clients do not wait for each other: a late request counts from its due time.
                while (due := began + sent / RATE) <= time.perf_counter():
                    tasks.create_task(load.request(due))
                    sent += 1
                await asyncio.sleep(PERIOD)
            await batcher.aclose()
    return load


def results_of(samples: list[Load]) -> list[Result]:
    """The 99th percentiles of all requests, and the quartiles of the samples' percentiles."""
    refused = [load.refused for load in samples]
    accepted = [load.accepted for load in samples]
    what = f"Batcher at {TIMES} times its capacity: p99 until"
    return [
        result_of_tail(f"{what} refused", "until answered", refused, accepted, REFUSED),
        result_of_tail(
            f"{what} answered", "one batch", accepted, [[BATCH_SECONDS]], ACCEPTED, of=BATCH_SECONDS
        ),
    ]


def result_of_tail(
    what: str,
    against: str,
    ours: list[list[float]],
    theirs: list[list[float]],
    bound: float,
    *,
    of: float | None = None,
) -> Result:
    """A table row from seconds per request; the bound is in ms, or in multiples of `of`."""
    ours_p99, theirs_p99 = p99(chain.from_iterable(ours)), p99(chain.from_iterable(theirs))
    low, _, high = quartiles([p99(seconds) for seconds in ours])
    unit = of or UNITS["ms"]
    return Result(
        what=what,
        against=against,
        ours=ours_p99 / UNITS["ms"],
        theirs=theirs_p99 / UNITS["ms"],
        unit="ms",
        value=ours_p99 / unit,
        low=low / unit,
        high=high / unit,
        value_unit="" if of else "ms",
        bound=bound,
        samples=sum(map(len, ours)),
    )
