"""Something to be done in a while, on the event loop of the calling thread."""

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    import trio

Cancel = Callable[[], object]
"""Takes the order back; afterwards it does nothing. To be called on the loop's thread."""


def call_later(seconds: float, fn: Callable[[], object]) -> Cancel:
    """Call `fn` on this thread's loop, outside of any task, after `seconds`."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        # In an empty context: asyncio keeps that of a cancelled timer until its time has come.
        return loop.call_later(seconds, fn, context=contextvars.Context()).cancel
    return _call_later_in_trio(seconds, fn)


async def within(seconds: float, fn: Callable[[], Awaitable[object]]) -> float | None:
    """Await `fn()`; the seconds that are left then. None: it took longer, and was cancelled."""
    began = monotonic()
    with anyio.CancelScope() as scope:
        # Not by its own deadline, whose timer keeps the context until its time has come.
        expiry = call_later(seconds, scope.cancel)
        try:
            await fn()
            return max(0.0, seconds - (monotonic() - began))
        finally:
            expiry()
    return None


def _call_later_in_trio(seconds: float, fn: Callable[[], object]) -> Cancel:
    trio_module = sys.modules["trio"]
    scope: trio.CancelScope = trio_module.CancelScope()

    async def run() -> None:
        with scope:
            await trio_module.sleep(seconds)
        if not scope.cancelled_caught:
            fn()

    trio_module.lowlevel.spawn_system_task(run)
    return scope.cancel
