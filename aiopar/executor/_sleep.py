"""How a worker's thread wakes: without interrupting its waker, and after brief calls beside it.

A worker that sleeps between brief calls is woken on the core of the event loop that wakes it.

To wake a thread on an idle core takes tens of microseconds: the core sleeps too, and a virtual one
has to be scheduled first. On the core of an event loop the thread runs when the loop waits for what
comes next, which mostly is the outcome of that very call; and for as long as the loop has the
interpreter, a thread on another core could do nothing but wait for it. A call that is shorter than
such a wake-up has ended there before it would have begun elsewhere.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from ..futures._wakeup import about_to_wait

BRIEF = 50e-6
"""Seconds that a call may take to be shorter than the wake-up of a core."""


def _find_current_core() -> Callable[[], int] | None:
    # Without a GIL the other core need not wait for the interpreter; and `Sleep` relies on it.
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    if not has_gil or not hasattr(os, "sched_setaffinity"):
        return None
    # Keeps the interpreter, unlike `CDLL`: it takes no time.
    return getattr(ctypes.PyDLL(None), "sched_getcpu", None)


_current_core = _find_current_core()


def schedule_as_batch() -> None:
    """Have the calling thread, a worker's, not interrupt whoever wakes it.

    Who hands in a call has the interpreter. A thread that took its core from it at once, as the
    kernel lets a woken one do, could only wait for the interpreter and give the core back. As what
    the kernel calls a batch thread, with the same share of the cores, it runs when its waker waits
    or its core's turn is over, or at once on an idle core. Threads and processes that its calls
    start are batch too.
    """
    if _current_core is None:
        return
    with suppress(OSError):  # a sandbox forbids it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else it is the user's own choice
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Sleep:
    """The sleep of one worker's thread.

    The kernel has no word for "wake it here", but a thread that is allowed on one core is woken on
    that one. So its waker narrows what it is allowed, and the thread, awake, first of all takes
    that back: a call, and what it starts, is allowed what it was before.

    Neither waits for the other, who may be interrupted at any point, by a signal or the garbage
    collector, and wait for that very worker there.
    """

    __slots__ = ("_allowed", "_asleep", "_thread")

    def __init__(self) -> None:
        self._asleep = False
        """Written by the thread itself."""
        self._allowed: set[int] | None = None
        """The cores it was allowed, while it is allowed less."""

    def begin(self) -> None:
        """The thread is about to wait for its next call, which is likely to be brief."""
        if _current_core is not None:
            self._thread = threading.get_native_id()
            self._asleep = True

    def end(self) -> None:
        """The thread has got something to do; called by itself, before it does that."""
        if not self._asleep:
            return
        self._asleep = False  # first: a waker that narrows from here on sees it
        allowed, self._allowed = self._allowed, None
        if allowed is not None:
            with suppress(OSError):  # none of them is this process's any more: it has others
                os.sched_setaffinity(0, allowed)

    def wake_here(self) -> None:
        """The calling thread is about to wake it.

        Nothing is done for one that goes on, as any without an event loop may: the call would have
        to wait for that, beside idle cores.
        """
        if not self._asleep or self._allowed is not None or not about_to_wait():
            return
        assert _current_core is not None  # noqa: S101  # else none begins
        with suppress(OSError):  # a sandbox forbids it, or the thread has ended
            # Asked for each time: a call may have narrowed it, for good.
            allowed = os.sched_getaffinity(self._thread)
            core = _current_core()
            if core in allowed and len(allowed) > 1:
                self._narrow(core, allowed)

    def _narrow(self, core: int, allowed: set[int]) -> None:
        only = (core,)
        if not self._asleep:  # another has woken it
            return
        # From that look to the end of the system call the GIL is not let go, nor is anything else
        # run here: who ends its sleep from now on finds this.
        self._allowed = allowed
        os.sched_setaffinity(self._thread, only)
