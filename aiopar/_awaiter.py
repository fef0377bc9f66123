"""One `await` of one future, in whatever event loop the calling code runs."""

import asyncio
import sys
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from ._wakeup import Waker, in_event_loop, resume, trio_waker, waker_of

if TYPE_CHECKING:
    import trio

_get_running_loop = asyncio._get_running_loop


class Awaiter(Protocol):
    """A task that waits to be woken."""

    waker: Waker
    """That of the task's loop."""

    @property
    def resumed(self) -> Iterable[Any]:
        """Yielded from, once, it waits; cancelled by the means of the task's loop."""

    def __await__(self) -> Generator[Any, Any, object]:
        """Wait."""

    def wake(self) -> None:
        """End the wait; from any thread, whether or not it still goes on."""

    def deliver(self) -> None:
        """End the wait; on the loop's thread, outside of any task."""


class _LoopAwaiter:
    """An `await` on an asyncio loop."""

    __slots__ = ("resumed", "waker")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waker: Waker = waker_of(loop)
        self.resumed: asyncio.Future[None] = asyncio.Future(loop=loop)

    def __await__(self) -> Generator[Any, Any, object]:
        return self.resumed.__await__()

    def wake(self) -> None:
        self.waker.post(self)

    def deliver(self) -> None:
        resume(self.resumed, None)


class _TrioAwaiter:
    """An `await` in a trio run."""

    __slots__ = ("_event", "waker")

    def __init__(self) -> None:
        self.waker: Waker = trio_waker()
        self._event: trio.Event = sys.modules["trio"].Event()

    @property
    def resumed(self) -> Generator[Any, Any, object]:
        return self._event.wait().__await__()

    def __await__(self) -> Generator[Any, Any, object]:
        return self.resumed

    def wake(self) -> None:
        self.waker.post(self)

    def deliver(self) -> None:
        self._event.set()


def awaiter_here() -> Awaiter | None:
    """An awaiter for the running task; None where the calling thread runs no event loop."""
    loop = _get_running_loop()
    if loop is not None:
        return _LoopAwaiter(loop)
    return _TrioAwaiter() if in_event_loop() else None


async def delivered() -> None:
    """Wait until all that was posted to this task's loop before has been delivered there."""
    awaiter = awaiter_here()
    if awaiter is not None:
        awaiter.wake()  # comes behind it
        await awaiter
