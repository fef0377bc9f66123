"""Requests batched in one process: `Batcher` against the most that is possible, and its peers."""

import asyncio
import itertools
import statistics
import time
from dataclasses import replace
from functools import partial

from torch import Tensor

from examples.benchmarks.batchers import Call, open_async_batcher, open_batched, open_batcher
from examples.benchmarks.harness import (
    UNITS,
    Plan,
    Result,
    Rivals,
    Row,
    compare,
    no_garbage_collection,
    result_of,
    seconds_per_call,
)
from examples.benchmarks.heartbeat import p99
from examples.benchmarks.own_process import in_own_process
from examples.benchmarks.small_model import BATCH, SmallModel

# At least so many requests a second, of those of the rival.
LIMIT, PEERS = 0.88, 1.15
LONE, TAIL = 1.3, 2.5  # at most so much of the time
IDLE = 0.1  # percent of a core at most: what a sleep of the loop itself costs


async def measure(plan: Plan) -> list[Row]:
    return await in_own_process(measure_here, plan)


async def measure_here(plan: Plan) -> list[Row]:
    model = SmallModel()
    async with open_batcher(model) as batcher:
        return [
            *await measure_throughput(model, batcher, plan),
            await measure_lone(model, batcher, plan),
            await measure_tail(model, batcher, plan),
            await measure_idle(model, plan),
        ]


async def measure_throughput(model: SmallModel, batcher: Call, plan: Plan) -> list[Row]:
    what = f"Batcher, {plan.clients} clients, batch {BATCH}"
    calls = 4 * plan.calls
    rate = partial(requests_per_second, model, clients=plan.clients, calls=calls)
    ours = partial(rate, batcher)
    limit = partial(limit_per_second, model, calls)
    in_threads = partial(rate, partial(in_thread, model))
    row = partial(Rivals, what, ours, unit="requests/s", at_least=True)
    peers = (
        ("batched (aio)", open_batched(model), PEERS),
        ("async-batcher", open_async_batcher(model, 0.01), PEERS),  # its default
        ("async-batcher, max_queue_time=0", open_async_batcher(model, 0.0), None),
    )
    results: list[Row] = [await compare(row("a loop over batches", limit, bound=LIMIT), plan.pairs)]
    for against, peer, bound in peers:
        async with peer as call:  # while others are measured it would poll
            rivals = row(against, partial(rate, call), bound=bound)
            results.append(await compare(rivals, plan.pairs))
    rivals = row("to_thread per request", in_threads, bound=None)
    results.append(await compare(rivals, plan.pairs))
    async with open_batcher(model, workers=2) as two:  # those threads use every core as well
        rivals = replace(rivals, what=f"{what}, 2 workers", ours=partial(rate, two))
        return [*results, await compare(rivals, plan.pairs)]


async def requests_per_second(model: SmallModel, call: Call, *, clients: int, calls: int) -> float:
    """Of closed-loop clients: each sends its next request when it has its answer."""
    items = itertools.cycle(model.items)
    return 1 / await seconds_per_call(lambda: call(next(items)), clients, calls)


async def in_thread(model: SmallModel, item: Tensor) -> Tensor:
    return await asyncio.to_thread(model.predict, item)


async def limit_per_second(model: SmallModel, calls: int) -> float:
    began = time.perf_counter()
    done = await asyncio.to_thread(model.predict_all, calls)
    return done / (time.perf_counter() - began)


async def measure_lone(model: SmallModel, batcher: Call, plan: Plan) -> Result:
    calls = max(4, plan.calls // 8)

    async def p50(call: Call) -> float:
        return statistics.median(await latencies(model, call, clients=1, calls=calls))

    rivals = Rivals(
        what="Batcher, a lone request, p50",
        ours=partial(p50, batcher),
        against="to_thread",
        theirs=partial(p50, partial(in_thread, model)),
        bound=LONE,
    )
    return await compare(rivals, plan.pairs)


async def measure_tail(model: SmallModel, batcher: Call, plan: Plan) -> Result:
    """Both of the same requests, so that there is no rival to take turns with."""
    high, middle = [], []
    for _ in range(plan.pairs + 1):
        with no_garbage_collection():
            seconds = await latencies(
                model, batcher, clients=plan.clients, calls=max(4 * plan.calls, 2 * plan.clients)
            )
        high.append(p99(seconds))
        middle.append(statistics.median(seconds))
    return result_of(
        high[1:],  # the first was to warm up
        middle[1:],
        what=f"Batcher, {plan.clients} clients, p99",
        against="p50 of the same",
        unit="ms",
        bound=TAIL,
    )


async def latencies(model: SmallModel, call: Call, *, clients: int, calls: int) -> list[float]:
    """Seconds of each request."""
    items, seconds = itertools.cycle(model.items), list[float]()

    async def timed() -> None:
        began = time.perf_counter()
        await call(next(items))
        seconds.append(time.perf_counter() - began)

    await seconds_per_call(timed, clients, calls)
    return seconds


async def measure_idle(model: SmallModel, plan: Plan) -> Result:
    """What an open batcher does while nobody asks; a peer that polls, for comparison."""
    async with open_batcher(model) as batcher:
        await batcher(model.items[0])
        ours = [await cpu_while_asleep(plan.seconds) for _ in range(max(2, plan.pairs // 5))]
    async with open_batched(model) as batched:
        await batched(model.items[0])
        theirs = [await cpu_while_asleep(plan.seconds) for _ in ours]
    of_core = statistics.median(ours) / UNITS["%"]
    return Result(
        what="CPU of an idle Batcher",
        against="batched (aio)",
        ours=of_core,
        theirs=statistics.median(theirs) / UNITS["%"],
        unit="%",
        value=of_core,
        low=min(ours) / UNITS["%"],
        high=max(ours) / UNITS["%"],
        value_unit="%",
        bound=IDLE,
        samples=len(ours),
    )


async def cpu_while_asleep(seconds: float) -> float:
    """Seconds of CPU of the whole process, a second."""
    began = time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - began) / seconds
