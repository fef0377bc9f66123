"""Streams to test with, their sources, and the look for what one has left behind."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from time import monotonic
from typing import Any

import anyio.lowlevel
import pytest

from aiopar.data._stages import MapStep
from aiopar.data._stream import Stream


class Source:
    """Numbers from 0, sync and async; it knows what becomes of its iterator."""

    def __init__(self, count: float = float("inf"), hold: Callable[[], object] = int) -> None:
        self.count = count
        self.hold = hold
        self.taken = 0
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[int]:
        try:
            while self.taken < self.count:
                self.taken += 1
                self.hold()
                yield self.taken - 1
        finally:
            self.closed.set()

    async def later(self) -> AsyncIterator[int]:
        """The same, asynchronously."""
        try:
            while self.taken < self.count:
                self.taken += 1
                await anyio.lowlevel.checkpoint()
                yield self.taken - 1
        finally:
            self.closed.set()


def double(n: int) -> int:
    return 2 * n


async def double_async(n: int) -> int:
    await anyio.lowlevel.checkpoint()
    return 2 * n


FUNCTIONS = pytest.mark.parametrize("fn", [double, double_async], ids=["sync", "async"])
SOURCES = pytest.mark.parametrize("asynchronous", [False, True], ids=["iter", "aiter"])


def iterable(asynchronous: bool, source: Source) -> Any:
    """`source`, as one of `SOURCES`."""
    return source.later() if asynchronous else source


def fetched(source: Any, bound: int = 2) -> Stream[Any]:
    """`source`, read ahead."""
    return Stream(source, [MapStep(None, bound=bound)])


async def read_to_the_end(stream: Stream[Any]) -> None:
    async for _ in stream:
        pass


def at_rest(stream: Stream[Any]) -> bool:
    """Whether nothing happens before another item is read."""
    flow = stream._flow
    return flow is not None and not any(stage._pumps for stage in flow.stages)


def _tasks() -> int:
    if sys.modules.get("trio") is not None and asyncio._get_running_loop() is None:
        return int(sys.modules["trio"].lowlevel.current_statistics().tasks_living)
    return len(asyncio.all_tasks())


def running() -> tuple[frozenset[threading.Thread], int]:
    """The threads of streams, and how many tasks there are."""
    threads = frozenset(t for t in threading.enumerate() if t.name.startswith("aiopar-data"))
    return threads, _tasks()


def left_since(before: tuple[frozenset[threading.Thread], int]) -> bool:
    """Whether there are threads or tasks that were not `running` before."""
    # Those that were may have ended since: streams of other tests.
    threads, tasks = running()
    return bool(threads - before[0]) or tasks > before[1]


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds: what ends a stream is a moment older than the end of its threads.

    Raises:
        TimeoutError: It does not in time.
    """
    deadline = monotonic() + 30
    while not condition():
        if monotonic() > deadline:
            raise TimeoutError("it did not come to that")
        await anyio.lowlevel.checkpoint()
