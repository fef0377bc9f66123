"""`Batcher` in one process, against its peers and against a loop over full batches."""

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

# Smallest allowed ratios of requests per second.
LIMIT, PEERS = 0.94, 1.15
LONE, TAIL = 1.25, 2.5  # largest allowed ratios of times
IDLE = 0.1  # largest allowed percentage of a core: the cost of the sleeping loop itself


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
        async with peer as call:  # closed afterwards, because an open peer polls
            rivals = row(against, partial(rate, call), bound=bound)
            results.append(await compare(rivals, plan.pairs))
    rivals = row("to_thread per request", in_threads, bound=None)
    results.append(await compare(rivals, plan.pairs))
    async with open_batcher(model, workers=2) as two:  # to_thread's threads use every core too
        rivals = replace(rivals, what=f"{what}, 2 workers", ours=partial(rate, two))
        return [*results, await compare(rivals, plan.pairs)]


async def requests_per_second(model: SmallModel, call: Call, *, clients: int, calls: int) -> float:
    """The rate of closed-loop clients: each sends its next request when it has its answer."""
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
    """Compare p99 and p50 of the same requests."""
    high, middle = [], []
    for _ in range(plan.pairs + 1):
        with no_garbage_collection():
            seconds = await latencies(
                model, batcher, clients=plan.clients, calls=max(4 * plan.calls, 2 * plan.clients)
            )
        high.append(p99(seconds))
        middle.append(statistics.median(seconds))
    return result_of(
        high[1:],  # the first sample warms up
        middle[1:],
        what=f"Batcher, {plan.clients} clients, p99",
        against="p50 of the same",
        unit="ms",
        bound=TAIL,
    )


async def latencies(model: SmallModel, call: Call, *, clients: int, calls: int) -> list[float]:
    """The seconds that each request took."""
    items, seconds = itertools.cycle(model.items), list[float]()

    async def timed() -> None:
        began = time.perf_counter()
        await call(next(items))
        seconds.append(time.perf_counter() - began)

    await seconds_per_call(timed, clients, calls)
    return seconds


async def measure_idle(model: SmallModel, plan: Plan) -> Result:
    """Measure the CPU time of an open batcher without requests, and of a peer that polls."""
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
    """CPU seconds of the whole process per second."""
    began = time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - began) / seconds
