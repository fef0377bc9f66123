"""Ten thousand requests that end in every way at once; each gets its own parts or one error."""

import random
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from prometheus_client import CollectorRegistry

import aiopar
from aiopar.serve import PrometheusMetrics

from .batches import LONG, Bad, current_executor, on_asyncio, outcomes_in
from .steppers import Counting, Item
from .streams import idle

pytestmark = pytest.mark.anyio

COUNT = 10_000
WAYS = {
    "await": 40,
    "stream": 30,
    "cancel": 12,
    "break": 8,
    "deadline": 4,
    "bad": 2,
    "no item": 2,
    "slow": 2,
}
"""How often requests end in each way, in percent."""


class Caller:
    """Sends one item, and ends in its way."""

    def __init__(self, batcher: Any, number: int, chance: random.Random) -> None:
        self.batcher = batcher
        [self.way] = chance.choices([*WAYS], [*WAYS.values()])
        self.item = Item((self.way, number), chance.randint(1, 6), chance.randint(0, 1))
        self.after = chance.randint(0, 5)
        self.parts: list[Any] = []
        self.outcome: Any = "left"

    async def __call__(self) -> None:
        with anyio.CancelScope() as self.scope:
            try:
                await self._call()
            except Exception as error:  # noqa: BLE001  # to be looked at
                self.outcome = type(error)

    async def _call(self) -> None:
        if self.way == "no item":
            self.outcome = await self.batcher(self.way)
        elif self.way in {"await", "bad"} or (self.way == "cancel" and self.after % 2):
            if self.way == "cancel":
                self.scope.cancel()
            self.outcome = await self.batcher(self.item)
        else:
            timeout = 0.005 if self.way == "deadline" else None
            buffer = 1 + self.after % 3
            async with self.batcher.stream(self.item, timeout=timeout, buffer=buffer) as stream:
                await self._read(stream)

    async def _read(self, stream: Any) -> None:
        async for part in stream:
            self.parts.append(part)
            if self.way == "slow":
                await anyio.lowlevel.checkpoint()
            if len(self.parts) > self.after:
                if self.way == "break":
                    return
                if self.way == "cancel":
                    self.scope.cancel()
                    await anyio.lowlevel.checkpoint()
        self.outcome = None

    def check(self) -> None:
        """Check that it got its own parts, and its own outcome."""
        assert self.parts == self.item.parts()[: len(self.parts)]
        ends: dict[str, list[Any]] = {
            "await": [self.item.result],
            "stream": [None],
            "slow": [None],
            "cancel": [None, "left"],
            "break": [None, "left"],
            "deadline": [None, aiopar.DeadlineExceeded],
            "bad": [Bad],
            "no item": [TypeError],
        }
        assert self.outcome in ends[self.way], self.way
        if self.outcome is None:
            assert self.parts == self.item.parts()


@on_asyncio
@pytest.mark.parametrize("bounded", [False, True])
async def test_ten_thousand_requests(bounded: bool) -> None:
    chance = random.Random(7)
    steps = 0

    def on_step(names: list[Any]) -> None:
        nonlocal steps
        steps += 1
        if steps % 50 == 0 and len(names) > 4:
            raise torch.OutOfMemoryError("full")
        if any(way == "bad" for way, _ in names):
            raise Bad

    stepper = Counting(on_step, resumable=True)
    options: dict[str, Any] = {"max_batch_size": 32, "max_pending": COUNT, "read_timeout": LONG}
    if bounded:
        options["max_batch_cost"] = 60
    async with (
        current_executor(["cpu", "cpu"]),
        aiopar.ContinuousBatcher(stepper, **options) as batcher,
    ):
        PrometheusMetrics(batcher, registry=(registry := CollectorRegistry()))
        callers = [Caller(batcher, n, chance) for n in range(COUNT)]
        async with anyio.create_task_group() as tasks:
            for caller in callers:
                tasks.start_soon(caller)
        await idle(batcher)
        stats = batcher.stats()
    for caller in callers:
        caller.check()
    assert stepper.misuse == []
    assert stepper.live == set()
    seen = {
        name: registry.get_sample_value(
            "aiopar_batcher_requests_total", {"batcher": batcher.name, "outcome": name}
        )
        for name in ("answered", "failed", "expired", "cancelled")
    }
    assert seen == outcomes_in(stats), "each outcome is there, and no refusal"
    assert stats.submitted == COUNT
    assert 8 < max(stats.batch_sizes) <= 32
    assert stats.preempted > 0
