"""Native cancellations of asyncio, again and again, at a moment that the test chooses."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest

from aiopar.testing import Gate


async def cancel_while_held(leave: Coroutine[Any, Any, None], gate: Gate, times: int) -> None:
    """Cancel `leave` while a call is held in the gate: it stays until that is let on, then ends."""
    with gate:
        leaving = asyncio.create_task(leave)
        await gate.entered()
        for _ in range(times):
            await anyio.wait_all_tasks_blocked()
            leaving.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not leaving.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await leaving
