"""Event loops that are closed while tasks of theirs have not ended."""

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
    """A loop that runs until the block is left, and is then closed: its tasks are not cancelled."""
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
        waits: Whether it waits for ever before its first item; else it has endless ones.
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
    """Run `fn` on a loop that is closed under it; which tasks, or errors, the collector leaves."""
    with closed_under_tasks() as loop:
        first = loop.create_task(fn())
        while not left.begun:
            loop.run_until_complete(asyncio.sleep(0))
        tasks = [weakref.ref(task) for task in asyncio.all_tasks(loop)]
    del first, loop

    async def next_loop() -> None:
        awaiter_here()  # with it goes what was posted to the last one

    asyncio.run(next_loop())
    with mock.patch.object(sys, "unraisablehook") as ignored:
        gc.collect()
    return [task() for task in tasks if task() is not None] + ignored.mock_calls
