"""Contexts that an async generator may hold open from one item to the next."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest


@asynccontextmanager
async def _scope() -> AsyncIterator[None]:
    with anyio.CancelScope():
        yield


@asynccontextmanager
async def _timeout() -> AsyncIterator[None]:
    with anyio.fail_after(60):
        yield


@asynccontextmanager
async def _task_group() -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep_forever)
        yield


@asynccontextmanager
async def _own() -> AsyncIterator[None]:
    """A task group of asyncio or trio itself."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            yield
    else:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.Event().wait())
            yield


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The logged errors, without asyncio's warnings of slow steps."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


HELD = pytest.mark.parametrize("held", [_scope, _timeout, _task_group, _own])
"""Runs a test with each context, as its argument `held`."""


class Holding:
    """An async generator function that holds a context, and awaits when it is closed."""

    def __init__(self, held: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._held = held
        self.closed = 0

    async def __call__(self, batch: Any = 0) -> AsyncIterator[Any]:
        async with contextlib.AsyncExitStack() as outer:
            outer.push_async_callback(self._close)
            async with self._held():
                while True:
                    yield batch

    async def _close(self) -> None:
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        self.closed += 1


async def cut_off(batch: Any = 0) -> AsyncIterator[Any]:
    """An async generator that cancels its own scope before the second item."""
    with anyio.CancelScope() as scope:
        yield batch
        scope.cancel()
        while True:
            yield batch
