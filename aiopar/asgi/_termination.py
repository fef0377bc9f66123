"""SIGTERM, between the system and the server's own handler."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import cast

import anyio

from .._awaiter import Awaiter, awaiter_here
from .._error_handling import logger
from ._service import Resource, Service

GRACE = 1.0
"""Seconds for each step that is left when there is no time to drain."""

_Handler = Callable[[int, FrameType | None], object]


class Termination:
    """One end of a service: `lifespan` says what it consists of. Made in its event loop."""

    def __init__(
        self,
        service: Service,
        resources: tuple[Resource, ...],
        drain_delay: float,
        shutdown_timeout: float | None,
    ) -> None:
        self._service = service
        self._resources = resources
        self._drain_delay = drain_delay
        self._shutdown_timeout = shutdown_timeout
        self._deadline: float | None = None
        # Woken by the handler, which may run between any two steps of the loop's thread. That is
        # no place to touch the loop: a waker's `post` is made for any thread, and for any moment.
        self._first = cast(Awaiter, awaiter_here())
        self._second = cast(Awaiter, awaiter_here())
        self._handed_on = False
        self._server_handler: _Handler | signal.Handlers = signal.SIG_DFL

    @contextmanager
    def handling(self) -> Iterator[None]:
        """SIGTERM comes here first, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handler = signal.getsignal(signal.SIGTERM)
        # None: installed by other means than Python's, and could not be called or put back.
        if handler is None or handler == signal.SIG_IGN:
            yield
            return
        self._server_handler = handler  # type: ignore[assignment]  # an int is one of Handlers
        signal.signal(signal.SIGTERM, self._handle)
        try:
            yield
        finally:
            # Who has put a handler over this one calls it, or puts it back: then it hands on.
            self._handed_on = True
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._server_handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # Called in the main thread between any two of its steps, also between two of these: what
        # may then happen twice is a mark that is set, or a waiter that is woken. A signal just
        # before the loop goes to sleep is seen when it wakes next; uvicorn's does in 0.1 s.
        if self._handed_on:
            self._call_server_handler(signum, frame)
            return
        watching = self._second if self._service.draining else self._first
        self._service.draining = True
        watching.wake()
        if watching.waker.finished:  # the loop was closed under this: nobody is told there
            self._call_server_handler(signum, frame)

    def _call_server_handler(self, signum: int, frame: FrameType | None) -> None:
        if isinstance(self._server_handler, signal.Handlers):  # the default: the process ends
            signal.signal(signum, self._server_handler)
            signal.raise_signal(signum)
        else:
            self._server_handler(signum, frame)

    def time_left(self) -> float | None:
        """Seconds that a resource may drain now."""
        if self._deadline is None:
            return self._shutdown_timeout
        return max(0.0, self._deadline - anyio.current_time())

    async def watch(self) -> None:
        """Keep to the times, from the first SIGTERM on; cancelled when all is closed."""
        await self._first
        with anyio.move_on_after(self._drain_delay):
            await self._second
        if self._shutdown_timeout is not None:
            self._deadline = anyio.current_time() + self._shutdown_timeout
        self._handed_on = True
        self._call_server_handler(signal.SIGTERM, None)
        if self._shutdown_timeout is not None:
            await anyio.sleep(self._shutdown_timeout)
            await self._force()

    async def _force(self) -> None:
        logger.error("not shut down within %s s: waiting requests fail", self._shutdown_timeout)
        async with anyio.create_task_group() as closing:
            for resource in self._resources:
                closing.start_soon(_drop, resource)
            # Their answers are on the way, and the server may leave by itself. Nobody waits for the
            # resources: one may be stuck in a kernel.
            await anyio.sleep(GRACE)
            # As Ctrl-C: to uvicorn, which is leaving already, it says to leave at once.
            signal.raise_signal(signal.SIGINT)
            await anyio.sleep(GRACE)
            # It still waits, for a connection to close or for a lifespan to end.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


async def _drop(resource: Resource) -> None:
    try:
        # Nor is what runs waited for: its callers need the time for their answers.
        await resource.aclose(drain=False, timeout=0.0)
    except Exception:  # noqa: BLE001 - the other resources' waiters are to be let go too
        logger.exception("%s failed to close", type(resource).__name__)
