"""The cost of a no-op call by `run_sync` and `submit`, against `asyncio.to_thread`."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import aiopar
from examples.benchmarks.harness import Plan, Result, Rivals, compare, seconds_per_call

# Concurrent tasks: largest allowed ratios of times of `run_sync` and `submit` to to_thread.
BOUNDS = {1: (0.75, 0.80), 16: (0.42, 0.60), 256: (0.34, 0.42)}


def noop() -> None:
    """The shortest call: only the way to a thread and back is measured."""


async def measure(plan: Plan) -> list[Result]:
    """Measure on one worker, and on two, which compete for the interpreter."""
    return [
        result for workers in (1, 2) for result in await measure_on(workers, plan, loop_name="")
    ]


async def measure_on(workers: int, plan: Plan, *, loop_name: str) -> list[Result]:
    """Measure on `workers` workers. With a `loop_name` the rows have no bounds."""
    results = []
    async with aiopar.DeviceExecutor(["cpu"] * workers) as executor:
        # All are awaited directly, without a coroutine around them; so is `to_thread`.
        ways: dict[str, Callable[[], Awaitable[object]]] = {
            "run_sync": lambda: executor.run_sync(noop),
            "submit": lambda: executor.submit(noop),
        }
        for position, (name, call) in enumerate(ways.items()):
            for tasks, bounds in BOUNDS.items():
                title = f"{name}(noop), {tasks} at once, {workers} worker{'s'[: workers - 1]}"
                rivals = Rivals(
                    what=f"{title}, {loop_name}" if loop_name else title,
                    ours=partial(seconds_per_call, call, tasks, plan.calls),
                    against="asyncio.to_thread",
                    theirs=partial(
                        seconds_per_call, partial(asyncio.to_thread, noop), tasks, plan.calls
                    ),
                    bound=None if loop_name else bounds[position],
                )
                results.append(await compare(rivals, plan.pairs))
    return results
