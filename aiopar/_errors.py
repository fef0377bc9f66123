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


class Overloaded(QueueFull):
    """A `Batcher` refused an item: its queue is full, or the wait would be longer than `max_wait`.

    Attributes:
        estimated_wait: Seconds after which there is likely to be room.
    """

    def __init__(self, message: str, *, estimated_wait: float) -> None:
        super().__init__(message)
        self.estimated_wait = estimated_wait


class DeadlineExceeded(TimeoutError):
    """An item had no result within the `timeout` that its caller gave it."""


class InvalidInput(ValueError):
    """An item that cannot be served: the fault of who sent it.

    For a service's own checks too: a web application answers it with 422, and any other
    `ValueError`, which may be a bug of its own, with 500.
    """


class OutputMismatch(RuntimeError):
    """What a function returned for a batch does not have one output for each item."""


class ReplicaUnavailable(RuntimeError):
    """No replica of a `ReplicaPool` is in service."""


class ServiceClosed(RuntimeError):
    """A `Batcher` or `ReplicaPool` was called that is closed, or that drains to be closed."""
