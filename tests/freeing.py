"""What is freed by reference counting alone."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import anyio.lowlevel


@contextmanager
def without_gc() -> Iterator[None]:
    """Only reference counting frees what is let go of in here."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def survivors(refs: list[weakref.ref[Any]]) -> list[Any]:
    """Those that are not freed.

    A worker lets go of a result just after it has handed it over, and asyncio holds what an `await`
    returned until the next step: each is given its time. What is in a cycle stays for ever.
    """
    deadline = monotonic() + 30
    while any(one() is not None for one in refs) and monotonic() < deadline:
        await anyio.lowlevel.checkpoint()
    return [one() for one in refs if one() is not None]
