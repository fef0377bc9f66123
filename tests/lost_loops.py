"""Event loops that are closed while tasks of theirs have not ended."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


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
