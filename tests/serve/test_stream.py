"""`Batcher.stream`: what is read, when steps are made, who leaves, and how it ends."""

import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.serve import Batcher
from aiopar.testing import Gate
from tests import simdevice

from .batches import until
from .streams import ENDLESS, LONG, Counting, Readers, counted, full

pytestmark = pytest.mark.anyio

Devices = tuple[torch.device, ...]


@pytest.fixture(params=["generator", "async generator"])
def kind(request: pytest.FixtureRequest) -> str:
    """Run the test with a generator function, and with an async one."""
    param: str = request.param
    return param


async def settled(executor: aiopar.DeviceExecutor) -> None:
    """Let what is queued on its only worker run, and what comes of it, and so on."""
    for _ in range(5):
        await executor.run_sync(str)
        await anyio.wait_all_tasks_blocked()


# What is read.


async def test_each_reads_its_own_part_of_each_step(kind: str) -> None:
    counting = Counting(40)
    async with Batcher(counting.of(kind), **full(3)) as batcher:
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read("a", "b", "c")
        assert readers.parts == {item: counted(item, 40) for item in "abc"}
        assert readers.ended == dict.fromkeys("abc"), "the generator's end is that of all"
    assert list(map(sorted, counting.batches)) == [["a", "b", "c"]]
    assert len(counting.steps) == 40
    assert len(counting.closed) == 1


async def test_items_are_collated_and_outputs_taken_apart_as_otherwise(devices: Devices) -> None:
    def double(batch: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
        x = batch["x"]
        for _ in range(4):
            x = x * 2
            yield {"y": x, "n": ["text"] * len(x)}

    async with aiopar.DeviceExecutor(devices) as executor:
        with aiopar.use_executor(executor):
            batcher = Batcher(double, max_batch_size=2, max_queue_delay=LONG)
            items = {n: {"x": torch.full((2,), float(n), device=devices[0])} for n in (1, 3)}
            found: dict[int, list[Any]] = {}

            async def read(n: int) -> None:
                parts = [part async for part in batcher.stream(items[n])]
                found[n] = [(part["y"].tolist(), part["n"]) for part in parts]

            async with batcher, anyio.create_task_group() as tasks:
                for n in items:
                    tasks.start_soon(read, n)
    for n in items:
        assert found[n] == [([n * 2.0**k] * 2, "text") for k in range(1, 5)]


@pytest.mark.sim
async def test_a_part_is_complete_on_its_device(kind: str) -> None:
    launched: list[Tensor] = []

    def generate(batch: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            batch = batch + 1
            launched.append(batch)
            yield batch

    async with aiopar.DeviceExecutor(["sim:0"]) as executor:
        with aiopar.use_executor(executor):
            x = torch.zeros(2, device="sim:0")
            async with Batcher(generate) as batcher, batcher.stream(x) as stream:
                with simdevice.paused("sim:0"):
                    with anyio.move_on_after(0.01):
                        await until(lambda: len(launched) > 1)
                    assert len(launched) == 1, "the next is not launched before"
                    assert stream._entry.request.parts == []
                assert [part.tolist() async for part in stream] == [[1, 1], [2, 2]]
