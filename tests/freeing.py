"""Objects that must be freed by reference counting, without the garbage collector."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import anyio.lowlevel

from tests.gil import GIL


def collect_without_gil() -> None:
    """Let idle threads free what other threads have dropped: without a GIL, only a collection does.

    With a GIL reference counting frees it at once, which is what the tests show.
    """
    if not GIL:
        gc.collect()


@contextmanager
def without_gc() -> Iterator[None]:
    """Switch the garbage collector off in the body."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def survivors(refs: list[weakref.ref[Any]]) -> list[Any]:
    """The objects that are not freed after some steps of the loop.

    A worker drops a result just after it has delivered it, and asyncio keeps the result of an
    `await` until the next step. Objects in a reference cycle are never freed.
    """
    deadline = monotonic() + 30
    while any(one() is not None for one in refs) and monotonic() < deadline:
        await anyio.lowlevel.checkpoint()
        collect_without_gil()
    return [one() for one in refs if one() is not None]
