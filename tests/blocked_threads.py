"""Which threads are blocked in a wait."""

import sys
import threading
import time


def until_blocked(thread: threading.Thread) -> None:
    """Return when `thread` waits on a condition, as in `Future.result` or `Event.wait`."""
    while not is_blocked(thread):
        time.sleep(0.001)


def is_blocked(thread: threading.Thread) -> bool:
    """Whether `thread` waits on a condition."""
    frame = sys._current_frames().get(thread.ident or 0)
    # blockbuster may have put a frame around the lock of the condition.
    below = frame and frame.f_back
    return any(one and one.f_code is threading.Condition.wait.__code__ for one in (frame, below))
