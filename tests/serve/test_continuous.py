"""`ContinuousBatcher`: requests join and leave a running batch, one outcome for each."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiopar
from aiopar.testing import Gate

from .batches import current_executor, until
from .steppers import Counting, Item
from .streams import ENDLESS, Readers

pytestmark = pytest.mark.anyio


class Steps:
    """Holds each step at a gate, and records the names of its states; in the test's process."""

    def __init__(self, on_step: Callable[[list[Any]], object] = lambda _: None) -> None:
        self.gate = Gate()
        self.seen: list[list[Any]] = []
        self.on_step = on_step

    def __call__(self, names: list[Any]) -> None:
        self.seen.append(names)
        self.gate()
        self.on_step(names)

    async def next(self) -> list[Any]:
        """Let the held step on, and wait for the next one; returns its names."""
        count = len(self.seen)
        self.gate.let_on()
        await self.gate.entered(count + 1)
        return self.seen[count]


class Serving(Readers):
    """Readers of a continuous batcher whose steps are held."""

    def __init__(self, batcher: Any, tasks: Any, stepper: Counting, steps: Steps) -> None:
        super().__init__(batcher, tasks)
        self.stepper = stepper
        self.steps = steps

    async def join(self, *names: Any, count: int = ENDLESS, **options: Any) -> list[Any]:
        """Queue streams, and let steps on until all have joined; returns the names of the step."""
        for name in names:
            await self.queue(Item(name, count), **options)
        step: list[Any] = []
        while not set(names) <= set(step):
            step = await self.steps.next()
        return step


@asynccontextmanager
async def serving(
    make: Callable[..., Counting] = Counting,
    *,
    on_step: Callable[[list[Any]], object] = lambda _: None,
    resumable: bool = False,
    **options: Any,
) -> AsyncIterator[Serving]:
    """A batcher held in a step of the endless stream "first"; left, the callers are cancelled."""
    steps = Steps(on_step)
    stepper = make(steps, resumable=resumable)
    async with current_executor(["cpu"]):
        with steps.gate:
            async with (
                aiopar.ContinuousBatcher(stepper, **options) as batcher,
                anyio.create_task_group() as tasks,
            ):
                served = Serving(batcher, tasks, stepper, steps)
                served.read(Item("first", ENDLESS), buffer=ENDLESS)
                await steps.gate.entered()
                yield served
                tasks.cancel_scope.cancel()
                steps.gate.open()
        stats = batcher.stats()
        assert (stats.queued, stats.in_flight) == (0, 0)
    assert stepper.misuse == []
    assert stepper.live == set()


# A step fails.


async def test_all_requests_of_a_step_fail_and_the_parked_ones_go_on() -> None:
    """Nothing but the batch itself lets the parked requests go on."""
    together = 0

    def on_step(names: list[str]) -> None:
        nonlocal together
        together += len(names) == 2
        if together == 2 and "first" in names:
            raise torch.OutOfMemoryError("full")

    async with serving(on_step=on_step, resumable=True) as served:
        await served.queue(Item("second"))
        served.steps.gate.open()
        await until(lambda: len(served.outcomes) == 2)
        assert isinstance(served.outcomes[Item("first", ENDLESS)], torch.OutOfMemoryError)
        assert served.outcomes[Item("second")] is None
        assert served.parts[Item("second")] == Item("second").parts()
