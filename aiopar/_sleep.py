"""A worker that sleeps between brief calls is woken on the core of the event loop that wakes it.

To wake a thread on an idle core takes tens of microseconds: the core sleeps too, and a virtual one
has to be scheduled first. On the core of an event loop the thread runs when the loop waits for what
comes next, which mostly is the outcome of that very call; and for as long as the loop has the
interpreter, a thread on another core could do nothing but wait for it. A call that is shorter than
such a wake-up has ended there before it would have begun elsewhere.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from ._wakeup import about_to_wait

BRIEF = 50e-6
"""Seconds that a call may take to be shorter than the wake-up of a core."""


def _find_current_core() -> Callable[[], int] | None:
    if not hasattr(os, "sched_setaffinity"):
        return None
    # Keeps the interpreter, unlike `CDLL`: it takes no time.
    return getattr(ctypes.PyDLL(None), "sched_getcpu", None)


_current_core = _find_current_core()


class Sleep:
    """The sleep of one worker's thread.

    The kernel has no word for "wake it here", but a thread that is allowed on one core is woken on
    that one. So its waker narrows what it is allowed, and the thread, awake, first of all takes
    that back: a call, and what it starts, is allowed what it was before.
    """

    __slots__ = ("_allowed", "_asleep", "_began", "_lock", "_thread")

    def __init__(self) -> None:
        self._began = False
        """What the thread knows itself; wakers do not write it."""
        self._asleep = False
        """Whether a waker may narrow what it is allowed."""
        self._allowed: set[int] | None = None
        """The cores it was allowed, while it is allowed less."""
        # Reentrant: a finalizer that runs in here may have a call for the same worker.
        self._lock = threading.RLock()

    def begin(self) -> None:
        """The thread is about to wait for its next call, which is likely to be brief."""
        if _current_core is not None:
            self._thread = threading.get_native_id()
            self._began = self._asleep = True

    def end(self) -> None:
        """The thread has got something to do; called by itself, before it does that."""
        if not self._began:
            return
        self._began = False
        with self._lock:  # a waker may be at it, though it was another who woke the thread
            self._asleep = False
            allowed, self._allowed = self._allowed, None
        if allowed is not None:
            with suppress(OSError):  # none of them is this process's any more: it has others
                os.sched_setaffinity(0, allowed)

    def wake_here(self) -> None:
        """The calling thread is about to wake it.

        Nothing is done for one that goes on, as any without an event loop may: the call would have
        to wait for that, beside idle cores.
        """
        if not self._asleep or _current_core is None or not about_to_wait():
            return
        with self._lock:  # while it is held, the thread cannot go on or end
            if not self._asleep:
                return
            self._asleep = False
            core = _current_core()
            try:
                # Asked for each time: a call may have narrowed it, for good.
                allowed = os.sched_getaffinity(self._thread)
                if core in allowed and len(allowed) > 1:
                    self._allowed = allowed  # first: Ctrl-C may come in between
                    os.sched_setaffinity(self._thread, (core,))
            except OSError:  # a sandbox forbids it
                self._allowed = None
