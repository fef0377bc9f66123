"""Helpers for tests of `Batcher`: functions that are held or record, and callers in tasks."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from torch import Tensor

from aiopar import Batcher, DeviceExecutor, use_executor
from aiopar.serve import BatcherStats
from aiopar.testing import Gate
from tests.home import AtHome

LONG = 1000.0
"""A duration in seconds that no test reaches."""


on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""For tests in an `anyio` module that need asyncio, or for which one loop is enough."""


class Bad(Exception):
    """The error of a function for a bad item."""


class Recorder:
    """A function for `collate_fn=list`: returns `fn` of each item and records its batches."""

    def __init__(self, fn: Callable[[Any], Any] = str) -> None:
        self.fn = fn
        self.runs: list[list[Any]] = []

    def __call__(self, items: list[Any]) -> list[Any]:
        self.runs.append(list(items))
        return [self.fn(item) for item in items]


class Held:
    """A coroutine function that waits in each batch until it is let on."""

    def __init__(self) -> None:
        self.runs: list[list[Any]] = []
        self.ended: list[list[Any]] = []
        self._events: list[anyio.Event] = []

    async def __call__(self, items: list[Any]) -> list[Any]:
        self.runs.append(list(items))
        event = anyio.Event()
        self._events.append(event)
        try:
            await event.wait()
        finally:
            self.ended.append(list(items))
        return [str(item) for item in items]

    def let_on(self) -> None:
        """Let the waiting batches go on."""
        for event in self._events:
            event.set()


async def double(batch: Tensor) -> Tensor:
    await anyio.lowlevel.checkpoint()
    return batch * 2


def coroutine(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A coroutine function that calls `fn`."""

    async def call(batch: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        try:
            return fn(batch)
        finally:
            del batch  # an error's traceback holds this frame

    return call


class Callers:
    """Tasks that each await one item; the item names the task."""

    def __init__(self, batcher: Batcher[Any, Any], tasks: anyio.abc.TaskGroup) -> None:
        self.batcher = batcher
        self.outcomes: dict[Any, Any] = {}
        """The result or error of each item that has one."""
        self._tasks = tasks
        self._scopes: dict[Any, anyio.CancelScope] = {}

    def call(self, item: Any, **options: Any) -> None:
        """Await `item` in a task."""
        self._tasks.start_soon(self._call, item, options)

    async def queue(self, *items: Any, **options: Any) -> None:
        """Await these items in tasks; wait until each is in the queue, in this order."""
        for item in items:
            waiting = self.batcher.stats().queued
            self.call(item, **options)
            while self.batcher.stats().queued == waiting:
                assert item not in self.outcomes, self.outcomes[item]
                await anyio.lowlevel.checkpoint()

    def cancel(self, item: Any) -> None:
        """Cancel the task that awaits `item`."""
        self._scopes[item].cancel()

    async def _call(self, item: Any, options: dict[str, Any]) -> None:
        with anyio.CancelScope() as self._scopes[item]:
            try:
                self.outcomes[item] = await self._outcome(item, options)
            except Exception as error:  # noqa: BLE001  # to be looked at
                self.outcomes[item] = error

    async def _outcome(self, item: Any, options: dict[str, Any]) -> Any:
        return await self.batcher(item, **options)


class Busy(Callers):
    """Callers of a batcher whose worker is held in a first batch."""

    def __init__(
        self, batcher: Batcher[Any, Any], tasks: anyio.abc.TaskGroup, gate: Gate, recorder: Recorder
    ) -> None:
        super().__init__(batcher, tasks)
        self.gate = gate
        self.recorder = recorder

    @property
    def runs(self) -> list[list[Any]]:
        """The later batches that have run, and the parts of split batches."""
        return self.recorder.runs[1:]


@asynccontextmanager
async def current_executor(devices: Sequence[Any], **options: Any) -> AsyncIterator[DeviceExecutor]:
    """An open executor, which is the current one."""
    async with DeviceExecutor(devices, **options) as executor:
        with use_executor(executor):
            yield executor


@asynccontextmanager
async def open_batcher(
    workers: DeviceExecutor | None, fn: Callable[[Any], Any], **options: Any
) -> AsyncIterator[Batcher[Any, Any]]:
    """An open batcher that calls `fn` from these workers; it runs in the process of the test."""
    with nullcontext() if workers is None else use_executor(workers):
        async with Batcher(AtHome(fn), **{"collate_fn": list, **options}) as batcher:
            yield batcher


@asynccontextmanager
async def busy(
    fn: Callable[[Any], Any] = str,
    *,
    always: bool = False,
    workers: DeviceExecutor | None = None,
    **options: Any,
) -> AsyncIterator[Busy]:
    """A batcher held in a batch of the item "first", until the block is left.

    What waits then runs, before it is closed. With `always`, all batches are held, not the first
    alone.
    """
    recorder, gate = Recorder(fn), Gate()

    def run(items: list[Any]) -> list[Any]:
        if always or not recorder.runs:
            recorder.runs.append(list(items))
            gate()
            return [fn(item) for item in items]
        return recorder(items)

    async with open_batcher(workers, run, **options) as batcher, anyio.create_task_group() as tasks:
        with gate:
            callers = Busy(batcher, tasks, gate, recorder)
            callers.call("first", timeout=1000)
            await gate.entered()
            yield callers


async def outcomes_of(
    service: Callable[..., Any], items: Sequence[Any], **options: Any
) -> list[Any]:
    """The results and errors of concurrent items, in the order of the items."""
    outcomes: list[Any] = [None] * len(items)

    async def call(place: int) -> None:
        try:
            outcomes[place] = await service(items[place], **options)
        except Exception as error:  # noqa: BLE001  # to be looked at
            outcomes[place] = error

    async with anyio.create_task_group() as tasks:
        for place in range(len(items)):
            tasks.start_soon(call, place)
    return outcomes


async def together(
    fn: Callable[[Any], Any],
    items: list[Any],
    *,
    workers: DeviceExecutor | None = None,
    **options: Any,
) -> list[Any]:
    """The outcomes of items that form one batch, in their order."""
    options = {"max_batch_size": len(items), "max_queue_delay": 1000, **options}
    with nullcontext() if workers is None else use_executor(workers):
        async with Batcher(fn, **options) as batcher:
            return await outcomes_of(batcher, items)


def outcomes_in(stats: BatcherStats) -> dict[str, int]:
    """How many requests had each outcome, by `stats()`; outcomes without requests are left out."""
    counts = {name: getattr(stats, name) for name in ("answered", "failed", "expired", "cancelled")}
    counts["refused"] = sum(stats.refused.values())
    assert stats.submitted == sum(counts.values()) + stats.queued + stats.in_flight
    return {name: count for name, count in counts.items() if count}


def running(batcher: Any) -> int:
    """How many batches run: also those whose callers have all left, which count nowhere."""
    return len(batcher._scheduler._runners.busy)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until `condition` holds; the time limit of the test ends it."""
    while not condition():
        await anyio.lowlevel.checkpoint()
