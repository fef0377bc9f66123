"""Every exception class of aiopar, one class a cause.

Bad arguments raise plain `ValueError` and `TypeError`; what a user's own function raises keeps its
type. What is left is here.
"""

import asyncio
import queue
import threading


class QueueFull(asyncio.QueueFull, queue.Full):
    """A worker's queue already holds `max_pending` calls.

    Both `asyncio.QueueFull` and `queue.Full`, so that code written for either kind of queue
    catches it.
    """


class ExecutorShutdown(RuntimeError):
    """Work was handed to an executor that is shut down (or that a `fork` left without threads)."""


class BlockingWaitError(RuntimeError):
    """A blocking wait was asked for on an event loop's thread, where only `await` may wait."""


class ReplicaAborted(threading.BrokenBarrierError):
    """A wait through `current_replica` was released because another replica failed.

    Also raised when the call was cancelled, or when a replica returned without coming to the
    meeting. It is the consequence of another error and never hides it.
    """
