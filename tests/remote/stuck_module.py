"""A module whose import in a worker process hangs."""

import multiprocessing
import threading

if multiprocessing.parent_process() is not None:
    threading.Event().wait()
