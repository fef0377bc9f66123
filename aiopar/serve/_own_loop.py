"""A coroutine that needs an event loop, driven in a thread that runs none."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def run_in_own_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What `coroutine` comes to, on an event loop made for it; blocks."""
    # With a factory, so that the thread keeps the loop that is set for it, if any.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        outcome, error = runner.run(_outcome(coroutine))
    if error is None:
        return outcome
    try:
        raise error
    finally:
        # Its traceback holds this frame.
        del error, coroutine


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, Exception | None]:
    # Returned: raised in there, its traceback would hold frames of the runner, which hold the task
    # that holds the error.
    try:
        return await coroutine, None
    except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets it
        return None, error
    finally:
        del coroutine
