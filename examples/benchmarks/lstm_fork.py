"""The LSTM ensemble of PyTorch's tutorial: eager `aiopar.fork` against TorchScript's."""

import time
from functools import partial

import torch
from torch import Tensor, nn

import aiopar
from examples.benchmarks.harness import Plan, Result, Rivals, compare
from examples.lstm_ensemble import make_ensembles, run


async def seconds(ensemble: nn.Module, x: Tensor) -> float:
    began = time.perf_counter()
    await run(ensemble, x)
    return time.perf_counter() - began


async def measure(plan: Plan) -> list[Result]:
    executor = aiopar.DeviceExecutor()
    async with executor:
        with aiopar.use_executor(executor):
            ensembles = await executor.run_sync(make_ensembles, 4, plan.channels)
            x = await executor.run_sync(torch.randn, plan.steps, plan.steps, plan.channels)
            forked, scripted = ensembles["aiopar.fork"], ensembles["TorchScript fork"]
            if not torch.equal(await run(forked, x), await run(scripted, x)):
                raise RuntimeError("the two ensembles disagree")
            rivals = Rivals(
                what=f"fork, 4 bidirectional LSTMs, C={plan.channels}",
                ours=partial(seconds, forked, x),
                against="TorchScript fork",
                theirs=partial(seconds, scripted, x),
                bound=1.05,
                unit="ms",
            )
            return [await compare(rivals, plan.pairs)]
