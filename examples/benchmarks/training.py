"""Training: units of work, a data-parallel step, and the cost of synchronized BatchNorm."""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial

import torch
from torch import Tensor, nn

import aiopar
from examples.benchmarks.harness import Plan, Result, Rivals, compare, seconds_per_call
from examples.train_digits import loss_and_gradients, make_network

WORKERS = 2
CPU = torch.device("cpu")


class Unit(aiopar.Parallelizable):
    """Forward and backward of a small network."""

    def __init__(self) -> None:
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.images, self.labels = torch.randn(32, 64), torch.randint(10, (32,))

    def forward_backward(self, x: int) -> float:
        return loss_and_gradients(self.network(self.images), self.labels)


class Threads:
    """The version written by hand: threads between a queue of units and a queue of losses."""

    def __init__(self, unit: Unit) -> None:
        self.units: queue.Queue[int | None] = queue.Queue()
        self.losses: queue.Queue[float] = queue.Queue()
        self.threads = [threading.Thread(target=self._run, args=(unit,)) for _ in range(WORKERS)]
        for thread in self.threads:
            thread.start()

    def _run(self, unit: Unit) -> None:
        for x in iter(self.units.get, None):
            self.losses.put(unit.forward_backward(x))

    def run(self, count: int) -> None:
        for number in range(count):
            self.units.put(number)
        for _ in range(count):
            self.losses.get()

    def end(self) -> None:
        for _ in self.threads:
            self.units.put(None)
        for thread in self.threads:
            thread.join()


async def measure_units(plan: Plan) -> Result:
    unit = Unit()
    count = max(1, plan.calls // 16)
    threads = Threads(unit)
    try:
        async with aiopar.Parallel(WORKERS, unit) as parallel:

            async def awaited() -> None:
                for number in range(count):
                    await parallel.put(number)
                for _ in range(count):
                    await parallel.get()

            rivals = Rivals(
                what=f"Parallel, {WORKERS} workers, MLP unit",
                ours=partial(_seconds_per_unit, awaited, count),
                against="2 threads and queues by hand",
                theirs=partial(
                    _seconds_per_unit, partial(asyncio.to_thread, threads.run, count), count
                ),
                bound=1.10,
            )
            return await compare(rivals, plan.pairs)
    finally:
        threads.end()


async def _seconds_per_unit(run: Callable[[], Awaitable[None]], count: int) -> float:
    began = time.perf_counter()
    await run()
    return (time.perf_counter() - began) / count


class Trainer:
    """Trains the digits network on one batch, on one device or two replicas."""

    def __init__(self, *, synchronized: bool) -> None:
        network = make_network(CPU)
        self.network = aiopar.convert_sync_batchnorm(network) if synchronized else network
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        self.images, self.labels = torch.rand(256, 1, 8, 8), torch.randint(10, (256,))
        self.dp = aiopar.DataParallel(self.network, [CPU, CPU])

    def _finish(self, outputs: Tensor) -> None:
        loss_and_gradients(outputs, self.labels)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Train one step on one device."""
        self._finish(self.network(self.images))

    async def step_on_replicas(self) -> None:
        await aiopar.run_sync(self._finish, await self.dp(self.images))


async def measure_steps(plan: Plan) -> list[Result]:
    trainer, synchronized = Trainer(synchronized=False), Trainer(synchronized=True)
    calls = max(1, plan.calls // 256)
    replicas = partial(seconds_per_call, trainer.step_on_replicas, 1, calls)
    with_sync = partial(seconds_per_call, synchronized.step_on_replicas, 1, calls)
    async with aiopar.DeviceExecutor([CPU]) as one:  # a single worker has all cores
        step = Rivals(
            what="training step, DataParallel, 2 slots",
            ours=replicas,
            against="one device, all threads",
            theirs=partial(seconds_per_call, partial(one.run_sync, trainer.step), 1, calls),
            bound=1.25,
            unit="ms",
        )
        sync = Rivals(
            what="the same, synchronized BatchNorm",
            ours=with_sync,
            against="BatchNorm for each replica",
            theirs=replicas,
            bound=1.30,
            unit="ms",
        )
        return [await compare(rivals, plan.pairs) for rivals in (step, sync)]


async def measure(plan: Plan) -> list[Result]:
    executor = aiopar.DeviceExecutor([CPU] * WORKERS)
    async with executor:
        with aiopar.use_executor(executor):
            return [await measure_units(plan), *await measure_steps(plan)]
