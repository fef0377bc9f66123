"""Streams that end in every way at once: each gets its own parts, and no request is left."""

import random
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiopar
from aiopar.serve import Batcher

from .batches import current_executor
from .streams import Counting, counted, idle

COUNT = 30
"""Parts of a stream."""


class Bad(Exception):
    pass


Item = tuple[str, int]
"""How it behaves, and its number."""

WAYS = {
    "to the end": 90,
    "breaks off": 25,
    "is cancelled": 25,
    "is closed": 25,
    "has a deadline": 25,
    "is bad": 7,
    "is bad later": 7,
}
"""How many streams end in each way."""


def on_step(batch: list[Item], number: int) -> None:
    ways = [way for way, _ in batch]
    if "is bad" in ways or (number == 10 and "is bad later" in ways):
        raise Bad


class Reader:
    """Reads one stream to its kind of end."""

    def __init__(self, batcher: Batcher[Any, Any], item: Item) -> None:
        self.item = item
        self.way = item[0]
        self.parts: list[Any] = []
        self.end: type[BaseException] | None = None
        self.left_after = random.Random(item[1]).randrange(COUNT)
        timeout = 0.02 if self.way == "has a deadline" else None
        self.stream = batcher.stream(item, buffer=1 + item[1] % 5, timeout=timeout)

    async def __call__(self) -> None:
        with anyio.CancelScope() as self.scope:
            try:
                async with self.stream:
                    await self._read()
            except Exception as error:  # noqa: BLE001  # to be looked at
                self.end = type(error)

    async def _read(self) -> None:
        async for part in self.stream:
            self.parts.append(part)
            if len(self.parts) > self.left_after:
                if self.way == "breaks off":
                    break
                if self.way == "is cancelled":
                    self.scope.cancel()
                    await anyio.lowlevel.checkpoint()
                if self.way == "is closed":
                    await self.stream.aclose()

    def check(self) -> None:
        """Check that it got its own parts."""
        assert self.parts == counted(self.item, len(self.parts))
        if self.way == "is bad":
            assert (self.parts, self.end) == ([], Bad)
        elif self.end is Bad:
            assert len(self.parts) == 10, "of another in its batch, or its own"
        elif self.end is not None:
            assert (self.way, self.end) == ("has a deadline", aiopar.DeadlineExceeded)
        elif self.way in {"breaks off", "is cancelled", "is closed"}:
            assert len(self.parts) == self.left_after + 1
        else:
            assert self.way != "is bad later"
            assert len(self.parts) == COUNT


@pytest.mark.anyio
async def test_many_streams_that_end_in_every_way(kind: str) -> None:
    ways = [way for way, count in WAYS.items() for _ in range(count)]
    random.Random(5).shuffle(ways)
    counting = Counting(COUNT, on_step)
    async with current_executor(["cpu", "cpu"]):
        options: dict[str, Any] = {"max_batch_size": 8, "concurrency": 3}
        async with Batcher(counting.of(kind), collate_fn=list, **options) as batcher:
            readers = [Reader(batcher, (way, n)) for n, way in enumerate(ways)]
            async with anyio.create_task_group() as tasks:
                for reader in readers:
                    tasks.start_soon(reader)
            await idle(batcher)
    for reader in readers:
        reader.check()
    assert len(counting.closed) == len(counting.batches)
    assert max(map(len, counting.batches)) == 8
