"""The worker that runs the calling test code, as its thread's name shows it."""

import re
import threading

_NAME = re.compile(r"-([a-z]+(?::\d+)?)-\d+$")


def worker_device() -> str | None:
    """The device of the worker that runs this; None outside workers."""
    found = _NAME.search(threading.current_thread().name)
    return None if found is None else found[1]
