"""What a call costs that does nothing: `run_sync` and `submit` against `asyncio.to_thread`."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import aiopar
from examples.benchmarks.harness import Plan, Result, Rivals, compare, seconds_per_call

# Tasks at once, and at most which part of to_thread's time `run_sync` and `submit` may take.
BOUNDS = {1: (0.75, 0.80), 16: (0.50, 0.60), 256: (0.45, 0.55)}


def noop() -> None:
    """The shortest call: what is left is the way to a thread and back."""


async def measure(plan: Plan) -> list[Result]:
    """On one worker, and on two, which take turns with the interpreter."""
    return [
        result for workers in (1, 2) for result in await measure_on(workers, plan, loop_name="")
    ]


async def measure_on(workers: int, plan: Plan, *, loop_name: str) -> list[Result]:
    """On asyncio's own loop the bounds hold; `loop_name` names another one, for information."""
    results = []
    async with aiopar.DeviceExecutor(["cpu"] * workers) as executor:
        # Each is awaited as it is, with no coroutine around it; so is `to_thread`.
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
