"""Every public exception class of aiopar.

Invalid arguments raise plain `ValueError` and `TypeError`. An exception of a user's own function
keeps its type, and may get a note.
"""

import asyncio
import queue
import threading
from functools import partial
from typing import Any


class QueueFull(asyncio.QueueFull, queue.Full):
    """A worker's queue already holds `max_pending` calls.

    Both an `asyncio.QueueFull` and a `queue.Full`: code for either kind of queue catches it.
    """


class ExecutorShutdown(RuntimeError):
    """The executor is shut down, or belongs to the parent of a forked process."""


class BlockingWaitError(RuntimeError):
    """A blocking wait was called on an event loop's thread, where only `await` may wait."""


class ReplicaAborted(threading.BrokenBarrierError):
    """A wait through `current_replica` was released because another replica failed.

    Also raised if the call was cancelled, or if a replica returned before the meeting. It never
    hides the error that caused it.
    """


class WorkerLost(RuntimeError):
    """The process or actor of a worker ended, or stopped answering, while it ran a call.

    A `ReplicaPool` and its `Batcher` try such a call elsewhere.

    Attributes:
        may_have_run: Whether the call may have run, in part or to its end.
    """

    def __init__(self, message: str, *, may_have_run: bool = True) -> None:
        super().__init__(message)
        self.may_have_run = may_have_run


class Overloaded(QueueFull):
    """A `Batcher` refused an item: the queue is full, or the wait would exceed `max_wait`.

    Attributes:
        estimated_wait: Seconds until the queue is likely to have room.
    """

    def __init__(self, message: str, *, estimated_wait: float) -> None:
        super().__init__(message)
        self.estimated_wait = estimated_wait

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are rebuilt from `args`, which has no keywords.
        rebuild = partial(type(self), estimated_wait=self.estimated_wait)
        return rebuild, self.args, self.__dict__


class DeadlineExceeded(TimeoutError):
    """An item had no result, or a model of a `ModelStore` was not ready, within `timeout`."""


class ReaderTooSlow(RuntimeError):
    """A caller has lost its stream of a `Batcher`: it read too slowly, or not at all.

    See `Batcher.stream`. The parts that the caller had not read are dropped.
    """


class InvalidInput(ValueError):
    """An item cannot be served because of its content.

    A service's own checks and the function of a batcher may raise it too. A batcher counts the item
    as refused, not as failed. A web application answers with status 422, but with
    status 500 to any other `ValueError`, which may be a bug of the service.
    """


class OutputMismatch(RuntimeError):
    """The result of a function for a batch does not have one output per item."""


class ReplicaUnavailable(RuntimeError):
    """No replica of a `ReplicaPool` is in service."""


class ServiceClosed(RuntimeError):
    """A `Batcher` or `ReplicaPool` was called while it is closed or drains."""


for _kind in [*vars().values()]:
    if isinstance(_kind, type) and _kind.__module__ == __name__:
        _kind.__module__ = "aiopar"  # as users import it, in tracebacks
