"""Every exception class of aiopar, one class a cause.

Bad arguments raise plain `ValueError` and `TypeError`; what a user's own function raises keeps its
type, and may gain a note. What is left is here.
"""

import asyncio
import queue
import threading
from functools import partial
from typing import Any


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

    def __reduce__(self) -> tuple[Any, ...]:
        # As any exception, but for an argument that has no place in `args`.
        made_again = partial(type(self), estimated_wait=self.estimated_wait)
        return made_again, self.args, self.__dict__


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


class ReplicaFailed(RuntimeError):
    """A replica cannot answer, and it is not the input's fault; for pools and batchers alone.

    Its cause is what the module raised for the input: then it has failed on the warm-up input as
    well. Without a cause, the replica was known to be broken, and the input was not run.

    Attributes:
        module: What has failed; by now the replica may have another.
    """

    def __init__(self, message: str, module: object) -> None:
        super().__init__(message)
        self.module = module


# Between parts of the package: no caller sees these.


class Left(Exception):  # nothing is wrong
    """Raised by a loader's worker that goes no further; its stage is closed, no outcome is read."""


class Abandoned(BaseException):
    """Nobody waits for the first part of a generator any more: no failure, of no item."""
