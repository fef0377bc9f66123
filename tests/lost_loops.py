"""Event loops that are closed while their tasks have not ended."""

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from aiopar.futures._wakeup import awaiter_here


@contextmanager
def closed_under_tasks() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that is closed at the end of the block, without a cancellation of its tasks."""
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        tasks = asyncio.all_tasks(loop)
        loop.close()
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]


class Left:
    """An async generator function.

    Args:
        waits: Whether it waits for ever before its first item. Otherwise items never end.
    """

    def __init__(self, waits: bool) -> None:
        self._waits = waits
        self.begun = False

    async def __call__(self, batch: Any = 0) -> AsyncIterator[Any]:
        self.begun = True
        if self._waits:
            await asyncio.Event().wait()
        while True:
            yield batch


def left_on_a_closed_loop(fn: Callable[[], Coroutine[Any, Any, object]], left: Left) -> list[Any]:
    """Run `fn` on a loop that is closed meanwhile; return what the collector does not free."""
    with closed_under_tasks() as loop:
        first = loop.create_task(fn())
        while not left.begun:
            loop.run_until_complete(asyncio.sleep(0))
        tasks = [weakref.ref(task) for task in asyncio.all_tasks(loop)]
    del first, loop

    async def next_loop() -> None:
        awaiter_here()  # drops what was posted to the closed loop

    asyncio.run(next_loop())
    with mock.patch.object(sys, "unraisablehook") as ignored:
        gc.collect()
    return [task() for task in tasks if task() is not None] + ignored.mock_calls
