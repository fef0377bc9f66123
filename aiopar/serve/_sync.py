"""A lock and a counter that tasks of any event loops can wait for."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .._future import Future, running_future


class FairLock:
    """A lock for tasks, in the order in which they came; of any event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Future[None] | None = None

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Wait for it, and have it for the body."""
        over = running_future()
        with self._lock:
            before, self._last = self._last, over
        if before is not None:
            try:
                await before
            except BaseException:
                # Cancelled: the next one has it when this one would have had it.
                before.add_done_callback(lambda _: over.set_result(None))
                raise
        try:
            yield
        finally:
            over.set_result(None)


class InFlight:
    """How many bodies of `with` run, in any threads and tasks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._idle: Future[None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._count -= 1
            idle = None
            if not self._count:
                idle, self._idle = self._idle, None
        if idle is not None:
            idle.set_result(None)

    @property
    def count(self) -> int:
        """How many there are, now."""
        return self._count

    async def ended(self) -> None:
        """Wait for a moment in which there are none."""
        with self._lock:
            if not self._count:
                return
            if self._idle is None:
                self._idle = running_future()
            idle = self._idle
        await idle
