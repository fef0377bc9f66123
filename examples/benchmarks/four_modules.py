"""`parallel_apply` of four no-op modules, against torch's algorithm in a thread."""

import asyncio
from functools import partial

import torch
from torch import nn

import aiopar
from examples.benchmarks.by_hand import parallel_apply_by_threads
from examples.benchmarks.harness import Plan, Result, Rivals, compare, seconds_per_call


async def measure(plan: Plan) -> list[Result]:
    modules, inputs = [nn.Identity() for _ in range(4)], [torch.zeros(1)] * 4
    executor = aiopar.DeviceExecutor(["cpu"] * 4)
    async with executor:
        with aiopar.use_executor(executor):
            calls = max(1, plan.calls // 8)
            awaited = partial(aiopar.parallel_apply, modules, inputs)
            by_hand = partial(asyncio.to_thread, parallel_apply_by_threads, modules, inputs)
            rivals = Rivals(
                what="parallel_apply, 4 no-op modules",
                ours=partial(seconds_per_call, awaited, 1, calls),
                against="torch's threads, in to_thread",
                theirs=partial(seconds_per_call, by_hand, 1, calls),
                bound=0.40,
            )
            return [await compare(rivals, plan.pairs)]
