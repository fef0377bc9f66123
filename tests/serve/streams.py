"""Helpers for tests of streams: a generator function that records its events, and readers."""

import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel

import aiopar
from aiopar.serve import Batcher

from .batches import LONG, Callers, current_executor, running, until

ENDLESS = 10**9


def of_kind(kind: str, generate: Callable[[Any], Generator[Any]]) -> Callable[[Any], Any]:
    """`generate`, or an async generator function with the same steps."""

    async def generate_async(batch: Any) -> AsyncIterator[Any]:
        steps = generate(batch)
        del batch
        try:
            for part in steps:
                yield part
                del part
        finally:
            steps.close()

    return generate if kind == "generator" else generate_async


class Counting:
    """Generators, sync and async, for `collate_fn=list`: step n yields `(item, n)` for each item.

    Args:
        count: How many steps each makes.
        on_step: Called with batch and number before each step.
    """

    def __init__(
        self, count: int = 3, on_step: Callable[[list[Any], int], object] = lambda _, __: None
    ) -> None:
        self.count = count
        self.on_step = on_step
        self.batches: list[list[Any]] = []
        """The batches that were begun, and the parts of split batches."""
        self.steps: list[str] = []
        """The thread of each step."""
        self.closed: list[str] = []
        """The thread in which each generator ended."""

    def generate(self, batch: list[Any]) -> Generator[list[Any]]:
        self.batches.append(list(batch))
        try:
            for number in range(self.count):
                yield self._step(batch, number)
        finally:
            self.closed.append(threading.current_thread().name)

    async def generate_async(self, batch: list[Any]) -> AsyncIterator[list[Any]]:
        for outputs in self.generate(batch):
            await anyio.lowlevel.checkpoint()
            yield outputs

    def of(self, kind: str) -> Callable[[list[Any]], Any]:
        """The generator function of a kind."""
        return self.generate if kind == "generator" else self.generate_async

    def _step(self, batch: list[Any], number: int) -> list[Any]:
        self.on_step(batch, number)
        self.steps.append(threading.current_thread().name)
        return [(item, number) for item in batch]


class Readers(Callers):
    """Tasks that each read the stream of one item to its end; the item names the task.

    The outcome of a stream is its error, or None.
    """

    def __init__(self, batcher: Batcher[Any, Any], tasks: anyio.abc.TaskGroup) -> None:
        super().__init__(batcher, tasks)
        self.parts: defaultdict[Any, list[Any]] = defaultdict(list)

    def read(self, *items: Any, **options: Any) -> None:
        """Read these items in tasks."""
        for item in items:
            self.call(item, **options)

    async def _outcome(self, item: Any, options: dict[str, Any]) -> None:
        parts = self.parts[item]
        async for part in self.batcher.stream(item, **options):
            parts.append(part)


@asynccontextmanager
async def reading(batcher: Batcher[Any, Any]) -> AsyncIterator[Readers]:
    """Readers of `batcher`. When the block is left, they end and the batcher is closed."""
    async with batcher, anyio.create_task_group() as tasks:
        yield Readers(batcher, tasks)


async def read_all(stream: Any) -> list[Any]:
    """The parts of a stream."""
    return [part async for part in stream]


@asynccontextmanager
async def held(batcher: Batcher[Any, Any]) -> AsyncIterator[None]:
    """Hold the batcher in a batch of the item "first", which nobody reads; other items wait."""
    async with batcher.stream("first", buffer=1) as stream:
        # Not only in flight: a stream that ends before its first part frees the batcher.
        await until(lambda: "with 1 ready" in repr(stream))
        yield


async def idle(batcher: Batcher[Any, Any] | aiopar.ContinuousBatcher[Any, Any, Any]) -> None:
    """Wait until no item waits, and no batch runs."""
    await until(lambda: not (batcher.stats().queued or running(batcher)))


def one_worker() -> AbstractAsyncContextManager[aiopar.DeviceExecutor]:
    """The current executor, with one worker."""
    return current_executor(["cpu"])


async def settled(executor: aiopar.DeviceExecutor) -> None:
    """Let one free worker run the queued calls, then the calls that follow from them, and so on."""
    for _ in range(5):
        await executor.run_sync(str)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()


def counted(item: Any, count: int) -> list[tuple[Any, int]]:
    """The first parts that `Counting` yields for an item."""
    return [(item, number) for number in range(count)]


def full(size: int, **options: Any) -> dict[str, Any]:
    """Options with which a batch starts only when it has this size."""
    return {"collate_fn": list, "max_batch_size": size, "max_queue_delay": LONG, **options}
