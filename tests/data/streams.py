"""Streams for tests, their sources, and a check that a stream has left nothing behind."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from time import monotonic
from typing import Any, TypeAlias

import anyio.lowlevel
import pytest

from aiopar import DeviceExecutor
from aiopar.data import Pipeline, Stream


class Source:
    """The numbers from 0, sync and async; counts the taken items and notes the close."""

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
        """The same numbers, asynchronously."""
        try:
            while self.taken < self.count:
                self.taken += 1
                await anyio.lowlevel.checkpoint()
                yield self.taken - 1
        finally:
            self.closed.set()


def double(n: int) -> int:
    return 2 * n


Executor: TypeAlias = DeviceExecutor | None
"""The argument of streams."""


async def double_async(n: int) -> int:
    await anyio.lowlevel.checkpoint()
    return 2 * n


FUNCTIONS = pytest.mark.parametrize("fn", [double, double_async], ids=["sync", "async"])
SOURCES = pytest.mark.parametrize("asynchronous", [False, True], ids=["iter", "aiter"])


def iterable(asynchronous: bool, source: Source) -> Any:
    """The source as an iterable or an async iterable."""
    return source.later() if asynchronous else source


def is_odd(n: int) -> bool:
    return n % 2 == 1


Verb = Callable[["Pipeline[Any]"], "Pipeline[Any]"]
"""Adds steps to a pipeline."""


def mapped(
    fn: Callable[[Any], Any],
    *,
    concurrency: int | None = 1,
    bound: int | None = None,
    in_order: bool = True,
) -> Verb:
    """A stage of `fn`, with a bound if one is given."""

    def add(pipeline: "Pipeline[Any]") -> "Pipeline[Any]":
        pipeline = pipeline.map(fn, concurrency=concurrency, in_order=in_order)
        return pipeline if bound is None else pipeline.prefetch(bound)

    return add


def stream_of(source: Any, *verbs: Verb, **options: Any) -> "Stream[Any]":
    """A stream over `source` and the stages that `verbs` add."""
    pipeline: Pipeline[Any] = Pipeline(source, **options)
    for verb in verbs:
        pipeline = verb(pipeline)
    return aiter(pipeline)


def fetched(source: Any, bound: int = 2) -> "Stream[Any]":
    """A stream that only reads `source` ahead."""
    return aiter(Pipeline(source).prefetch(bound))


async def collect(items: Any, got: list[Any]) -> None:
    """Append the items to `got`, also those that come before an error."""
    async for item in items:
        got.append(item)  # noqa: PERF401  # an error must not lose those before it


async def read_to_the_end(stream: Stream[Any]) -> None:
    async for _ in stream:
        pass


async def until_full(stream: "Stream[Any]") -> None:
    """Wait until workers of the last stage wait because its buffer is full."""
    waited = stream.stats().worker_seconds
    await until(lambda: stream.stats().worker_seconds > waited)


def _tasks() -> int:
    if sys.modules.get("trio") is not None and asyncio._get_running_loop() is None:
        return int(sys.modules["trio"].lowlevel.current_statistics().tasks_living)
    return len(asyncio.all_tasks())


def running() -> tuple[frozenset[threading.Thread], int]:
    """The threads of streams, and the number of tasks."""
    threads = frozenset(t for t in threading.enumerate() if t.name.startswith("aiopar-data"))
    return threads, _tasks()


def left_since(before: tuple[frozenset[threading.Thread], int]) -> bool:
    """Whether there are threads or tasks that were not `running` before."""
    # Threads of other tests' streams may have ended since.
    threads, tasks = running()
    return bool(threads - before[0]) or tasks > before[1]


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds, for at most 30 seconds."""
    deadline = monotonic() + 30
    while not condition():
        if monotonic() > deadline:
            raise TimeoutError("the condition did not become true")
        await anyio.lowlevel.checkpoint()
