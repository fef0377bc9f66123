"""Workers as Ray actors, against bare calls of an actor."""

import asyncio
import logging
import time
from functools import partial
from typing import Any

import ray
import torch
from torch import Tensor, nn

import aiopar
import aiopar.ray
from examples.benchmarks.harness import Plan, Result, Rivals, compare
from examples.benchmarks.processes import plus_one

TENSOR_BOUND = 0.5
BATCHER_BOUND = 8.0
IN_FLIGHT_BOUND = 0.85


class Actor:
    """What one would write without aiopar."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def plus_one(self, x: Tensor) -> Tensor:
        return plus_one(x)

    def predict(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y: Tensor = self._model(x)
        return y


async def measure(plan: Plan) -> list[Result]:
    await asyncio.to_thread(
        ray.init, "local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR
    )
    try:
        return [await _tensor(plan), await _batcher(plan), await _in_flight(plan)]
    finally:
        await asyncio.to_thread(ray.shutdown)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()


async def _bare_actor() -> Any:
    return await asyncio.to_thread(ray.remote(num_cpus=0)(Actor).remote, _model())


async def _tensor(plan: Plan) -> Result:
    actor, x = await _bare_actor(), torch.rand(2_500_000)
    async with aiopar.ray.RayExecutor(1, in_flight=1) as executor:

        async def ours() -> float:
            return await _seconds(partial(executor.run_sync, plus_one, x), 10)

        async def theirs() -> float:
            return await _seconds(lambda: actor.plus_one.remote(x), 10)

        rivals = Rivals(
            what="Ray: 10 MB to an actor and back",
            ours=ours,
            against="a bare call with a tensor",
            theirs=theirs,
            bound=TENSOR_BOUND,
            unit="ms",
        )
        return await compare(rivals, plan.pairs)


async def _seconds(call: Any, number: int) -> float:
    began = time.perf_counter()
    for _ in range(number):
        await call()
    return (time.perf_counter() - began) / number


async def _batcher(plan: Plan) -> Result:
    """Items per second, with many clients."""
    item, number = torch.rand(64), plan.calls // 2
    actor = await _bare_actor()
    async with (
        aiopar.ray.RayExecutor(2) as executor,
        aiopar.ReplicaPool(_model(), executor=executor, warmup=torch.rand(1, 64)) as pool,
        aiopar.Batcher(pool, max_batch_size=64) as batcher,
    ):

        async def ours() -> float:
            return await _items_per_second(lambda: batcher(item), number)

        async def theirs() -> float:
            return await _items_per_second(lambda: actor.predict.remote(item), number)

        rivals = Rivals(
            what="Ray: items of a `Batcher` over two actors",
            ours=ours,
            against="one bare call per item",
            theirs=theirs,
            bound=BATCHER_BOUND,
            unit="requests/s",
            at_least=True,
        )
        return await compare(rivals, plan.pairs)


async def _items_per_second(call: Any, number: int, clients: int = 256) -> float:
    async def client() -> None:
        for _ in range(max(1, number // clients)):
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return clients * max(1, number // clients) / (time.perf_counter() - began)


async def _in_flight(plan: Plan) -> Result:
    """Seconds for a stream of batches, of which some travel while the actor computes."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(2)]).eval()
    batches = [torch.rand(512, 1024) for _ in range(24)]
    async with (
        aiopar.ray.RayExecutor(1, in_flight=2) as two,
        aiopar.ray.RayExecutor(1, in_flight=1) as one,
    ):

        async def seconds(executor: aiopar.DeviceExecutor) -> float:
            began = time.perf_counter()
            with aiopar.use_executor(executor):
                outputs = aiopar.map(model, batches)
            async for _ in outputs:
                pass
            return time.perf_counter() - began

        rivals = Rivals(
            what="Ray: `aiopar.map` with 2 calls in flight per actor",
            ours=partial(seconds, two),
            against="1 in flight",
            theirs=partial(seconds, one),
            bound=IN_FLIGHT_BOUND,
            unit="s",
        )
        return await compare(rivals, plan.pairs)
