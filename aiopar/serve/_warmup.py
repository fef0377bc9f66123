"""Warm-up: what a replica runs before it serves, and to tell whether it still can."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from .._future import thread_hooks

Arguments: TypeAlias = tuple[Any, ...]

_compiling = threading.Lock()
_alone: ContextVar[bool] = ContextVar("aiopar_compiling_alone", default=False)


def warmup_calls(warmup: Any) -> tuple[Arguments, ...]:
    """The positional arguments of each call that `warmup` stands for."""
    if warmup is None:
        return ()
    several = warmup if isinstance(warmup, list) else [warmup]
    return tuple(one if isinstance(one, tuple) else (one,) for one in several)


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Run the body, which may compile, while no other replica of the process compiles.

    Dynamo and Inductor are not thread-safe. Where Dynamo is not loaded, nobody has to wait.
    """
    # A pool that is opened by a module which is being warmed up has its turn already.
    if "torch._dynamo" not in sys.modules or _alone.get():
        yield
        return
    if not _compiling.acquire(blocking=False):
        # Who has it may wait for a call in the queue of this worker.
        thread_hooks.about_to_block()
        _compiling.acquire()
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)
        _compiling.release()
