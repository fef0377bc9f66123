"""`await dp(x)` with kept replicas, against torch's algorithm: replicate at each call."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import torch
from torch import nn

import aiopar
from examples.benchmarks.by_hand import data_parallel_by_hand
from examples.benchmarks.harness import Plan, Result, Rivals, compare, seconds_per_call

DEVICES = ["cpu", "cpu"]


def without_grad(call: Callable[..., Coroutine[Any, Any, Any]]) -> Coroutine[Any, Any, Any]:
    """Make the call under inference mode; the mode is not held while the call is awaited."""
    with torch.inference_mode():
        return call()


def make_module(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))


async def measure(plan: Plan) -> list[Result]:
    executor = aiopar.DeviceExecutor(DEVICES)
    async with executor:
        with aiopar.use_executor(executor):
            module = await executor.run_sync(make_module, plan.layers)
            x = await executor.run_sync(torch.randn, 8, 16)
            dp = aiopar.DataParallel(module, DEVICES)
            ours = partial(without_grad, partial(dp, x))
            by_hand = partial(executor.run_sync, data_parallel_by_hand, module, x, len(DEVICES))
            theirs = partial(without_grad, by_hand)
            if not torch.allclose(await ours(), await theirs()):
                raise RuntimeError("the two ways disagree")
            calls = max(1, plan.calls // 64)
            rivals = Rivals(
                what=f"DataParallel, {plan.layers} layers, 2 slots",
                ours=partial(seconds_per_call, ours, 1, calls),
                against="replicate, parallel_apply each time",
                theirs=partial(seconds_per_call, theirs, 1, calls),
                bound=0.80,
            )
            return [await compare(rivals, plan.pairs)]
