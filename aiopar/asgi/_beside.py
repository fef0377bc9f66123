"""A coroutine that runs beside a block."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio


@asynccontextmanager
async def beside(fn: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run `fn()` while the block runs; it is cancelled where the block ends.

    As a task group does; but what the block raises leaves as it is, not in an `ExceptionGroup`.
    """
    raised: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fn)
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 - past the group
            raised = error
        tasks.cancel_scope.cancel()
    try:
        if raised is not None:
            raise raised
    finally:
        del raised  # the traceback holds this frame
