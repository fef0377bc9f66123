"""Cancellations of an asyncio task, several times, while a call is held."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest

from aiopar.testing import Gate


async def cancel_while_held(leave: Coroutine[Any, Any, None], gate: Gate, times: int) -> None:
    """Cancel `leave` while a gate holds a call: it must wait for the call, and then end."""
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
