"""Tasks of either kind of event loop: which one runs, and whether one has ended."""

import asyncio
import sys
import weakref
from typing import Any, TypeAlias

from .._wakeup import in_event_loop

TaskRef: TypeAlias = weakref.ref[Any]
"""Of a task of asyncio's or trio's; two of one task are equal."""


def current_task() -> TaskRef | None:
    """The task that runs this; None outside of tasks."""
    task: Any = None
    if asyncio._get_running_loop() is not None:
        task = asyncio.current_task()
    elif in_event_loop():
        task = sys.modules["trio"].lowlevel.current_task()
    return None if task is None else weakref.ref(task)


def has_ended(task: TaskRef) -> bool:
    """Whether it takes no more steps."""
    known = task()
    if known is None:
        return True
    if isinstance(known, asyncio.Future):
        return known.done()
    nursery = known.parent_nursery
    return nursery is None or known not in nursery.child_tasks
