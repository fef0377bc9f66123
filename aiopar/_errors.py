"""Every exception class of aiopar, one class a cause.

Bad arguments raise plain `ValueError` and `TypeError`; what a user's own function raises keeps its
type, and may gain a note. What is left is here.
"""

import asyncio
import queue
import threading
from contextlib import suppress
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


class Left(Exception):  # nothing is wrong, and nobody sees it
    """Raised by a loader's worker that goes no further; its stage is closed, no outcome is read."""


def add_note_once(error: BaseException, note: str) -> None:
    """Add `note`, unless `error` has it: a function may raise one exception again and again.

    One that takes no attributes (a frozen dataclass) goes without: it is to reach who waits for it.
    """
    with suppress(Exception):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def in_words(error: BaseException) -> str:
    """Its type and message; the type alone if asking for the message fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # of a `__str__` of the user's
        return type(error).__name__


def error_chain(error: BaseException) -> list[BaseException]:
    """`error` and what is behind it (causes, contexts, the members of groups), each once.

    Errors may be behind each other: `raise first from second`, where `second` came of `first`.
    """
    chain = {id(error): error}
    to_see = [error]
    while to_see:
        one = to_see.pop()
        members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        for behind in (one.__cause__, one.__context__, *members):
            if behind is not None and id(behind) not in chain:
                chain[id(behind)] = behind
                to_see.append(behind)
    return [*chain.values()]
