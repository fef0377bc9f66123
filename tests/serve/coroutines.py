"""Helpers for tests of coroutine functions: functions with and without waits, and callers."""

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
from torch import Tensor


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
