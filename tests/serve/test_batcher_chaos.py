"""`Batcher` with all kinds of requests at once: each caller gets its own result or error."""

import gc
import math
import random
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar import DeviceExecutor
from aiopar.serve import Batcher
from tests import simdevice
from tests.freeing import survivors
from tests.home import elsewhere

from .batches import open_batcher, outcomes_in, running, until

CLIENTS = 100
KIB = 1 << 10


class Item:
    """The item of one caller."""

    def __init__(self, number: int, choices: random.Random) -> None:
        self.number = number
        self.key = choices.randrange(3)
        self.cost = choices.choice([1, 1, 2, 3.5, 8])
        kinds = ["good"] * 85 + ["bad"] * 8 + ["short"] * 2 + ["huge"] * 5
        self.kind = choices.choice(kinds)


class Bad(Exception):
    """Its arguments are the numbers of the bad items in the batch."""


class Chaos:
    """A function that fails for some items, and does not fit into memory with many."""

    def __init__(self) -> None:
        self.computed: Counter[int] = Counter()
        self.with_short: set[int] = set()
        """The items that shared a batch with an item that makes the outputs too few."""

    def __call__(self, items: Sequence[Item]) -> list[Any]:
        numbers = [item.number for item in items]
        self.computed.update(numbers)
        self.allocate(sum(99 if item.kind == "huge" else 1 for item in items))
        bad = [item.number for item in items if item.kind == "bad"]
        if bad:
            raise Bad(*bad)
        if any(item.kind == "short" for item in items):
            self.with_short.update(numbers)
            return self.outputs(numbers)[1:]
        return self.outputs(numbers)

    def allocate(self, count: int) -> None:
        if count > 6:
            raise torch.OutOfMemoryError(f"no room for {count}")

    def outputs(self, numbers: list[int]) -> list[Any]:
        torch.ones(64).sum().item()  # lets the GIL go
        return [-number for number in numbers]


class ChaosOnDevices(Chaos):
    """The same on accelerators, with their real memory limit."""

    def allocate(self, count: int) -> None:
        torch.empty(count * KIB, device="sim")

    def outputs(self, numbers: list[int]) -> list[Any]:
        scratch = torch.ones(6 * KIB, device="sim")
        scratch += 1
        return list(torch.tensor(numbers, device="sim").neg().unbind())


class Account:
    """The outcome of each item."""

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos
        self.outcomes: Counter[str] = Counter()
        self.items: list[weakref.ref[Item]] = []

    async def client(self, batcher: Batcher[Any, Any], numbers: range, seed: int) -> None:
        """Send one item after the other, with all kinds of options."""
        choices = random.Random(f"{seed}, {numbers.start}")
        for number in numbers:
            item = Item(number, choices)
            self.items.append(weakref.ref(item))
            options: dict[str, Any] = {
                "timeout": choices.choice([None] * 8 + [1e-6, 0.003, 0.03, 30]),
                "priority": choices.randrange(-2, 3),
            }
            kind = "cancelled"
            with anyio.move_on_after(choices.choice([math.inf] * 9 + [0, 0.001, 0.01])):
                try:
                    outcome = await batcher(item, **options)
                except Exception as error:  # noqa: BLE001  # to be looked at
                    outcome = error
                kind = self._kind_of(item, outcome)
                outcome = None
            self.outcomes[kind] += 1
            if kind == "refused":
                await anyio.sleep(0.005)  # as a client would, before the next

    def _kind_of(self, item: Item, outcome: object) -> str:
        """Name the outcome, and check that it belongs to the item."""
        never_computed = item.number not in self.chaos.computed
        match outcome:
            case Bad() if item.kind == "bad" and outcome.args == (item.number,):
                assert "by one item" in outcome.__notes__[-1]
                return "bad"
            case torch.OutOfMemoryError() if item.kind == "huge":
                return "out of memory"
            case Bad() | torch.OutOfMemoryError():
                # So many items of its batch failed first that the function counted as broken.
                assert "not split further" in outcome.__notes__[-1]
                return "broken"
            case aiopar.OutputMismatch():
                assert item.number in self.chaos.with_short
                return "mismatch"
            case aiopar.DeadlineExceeded():
                assert "in the queue" not in str(outcome) or never_computed
                return "expired"
            case aiopar.Overloaded():
                assert never_computed
                return "refused"
            case _:
                assert (item.kind, outcome) == ("good", -item.number)
                return "answered"


async def run_chaos(chaos: Chaos, seed: int, requests: int, workers: DeviceExecutor) -> None:
    account = Account(chaos)
    async with open_batcher(
        workers,
        chaos,
        max_batch_size=16,
        max_pending=CLIENTS - 30,
        concurrency=2,
        batch_key=lambda item: item.key,
        cost=lambda item: item.cost,
        max_batch_cost=24,
        max_queue_delay=0.001 if seed % 2 else 0.0,
        timeout=60,
    ) as batcher:
        async with anyio.create_task_group() as clients:
            each = requests // CLIENTS
            for client in range(CLIENTS):
                numbers = range(client * each, (client + 1) * each)
                clients.start_soon(account.client, batcher, numbers, seed)
        await until(lambda: not running(batcher))  # with requests that have left
        assert account.outcomes.total() == each * CLIENTS
        stats = batcher.stats()
        assert stats.queued == stats.in_flight == 0
        assert stats.refused.get("queue_full", 0) == account.outcomes["refused"]
        outcomes = account.outcomes
        failures = ("bad", "mismatch", "out of memory", "broken")
        ends = {name: outcomes[name] for name in ("answered", "refused", "expired", "cancelled")}
        ends["failed"] = sum(outcomes[kind] for kind in failures)
        assert outcomes_in(stats) == {name: count for name, count in ends.items() if count}
    always = {"answered", "bad", "mismatch", "out of memory", "expired", "cancelled"}
    assert always <= account.outcomes.keys() <= always | {"broken", "refused"}
    # Halves of halves, once each.
    assert max(chaos.computed.values()) <= 1 + 4
    gc.collect()  # the backend's own cycles
    assert await survivors(list(account.items)) == []


@pytest.fixture
def requests(anyio_backend: tuple[str, dict[str, Any]], workers: DeviceExecutor) -> int:
    """The number of requests; in asyncio's debug mode, and in processes, they are slower."""
    return 2_000 if anyio_backend[1].get("debug") or elsewhere(workers) else 10_000


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(2))
async def test_thousands_of_requests(workers: DeviceExecutor, seed: int, requests: int) -> None:
    await run_chaos(Chaos(), seed, requests, workers)


@pytest.mark.asyncio
@pytest.mark.sim
@pytest.mark.parametrize("seed", range(2))
async def test_on_accelerators_that_run_out_of_memory(seed: int) -> None:
    used = [torch.accelerator.memory_allocated(index) for index in (0, 1)]
    for index in (0, 1):
        simdevice.set_memory_limit(index, used[index] + 64 * KIB)
    async with aiopar.DeviceExecutor(["sim:0", "sim:1"]) as executor:
        await run_chaos(ChaosOnDevices(), seed, 10_000, executor)
    gc.collect()
    assert [torch.accelerator.memory_allocated(index) for index in (0, 1)] <= used
