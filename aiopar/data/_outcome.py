"""What passes from stage to stage: an item, a `Failure` in its place, `PENDING` or `END`."""

import traceback
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, Final, final

from .._base.arguments import not_begun
from .._base.tracebacks import add_note_once, awaitable_error, own_traceback, stand_in
from ..futures._future import Future

PENDING: Final[Any] = object()
"""There is no item yet. The stage calls its listener when there is one."""


class StopFlag:
    """Tells workers that the reader has left; they check it between two items.

    A `threading.Event` has a lock, which must not be taken in a finalizer or after Ctrl-C.
    """

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FailedItem:
    """An item that a stream skipped, as `max_failures` allows.

    Attributes:
        error: The error that was raised.
        stage: The step in which the item failed.
        position: The position of the item among the inputs of that step, counted from 0.
    """

    error: BaseException
    stage: str
    position: int


@final
@dataclass(slots=True, eq=False)
class Failure:
    """Takes the place of an item that failed; every later stage passes it on."""

    error: BaseException | None
    """None after `take`."""
    stage: str
    position: int
    fatal: bool = False
    """Whether no item can follow, because the source failed or a worker was lost."""

    def take(self) -> BaseException:
        """Return the error and release it, once.

        The error's traceback refers to frames of pumps and steps, which may refer to this object.
        """
        error, self.error = self.error, None
        assert error is not None  # noqa: S101
        return error


def failure(error: BaseException, stage: str, position: int, *, fatal: bool = False) -> Failure:
    """The `Failure` for an error that was caught in the calling frame."""
    error = own_traceback(error)
    if isinstance(error, StopAsyncIteration):
        # If `__anext__` raised it, the reader's loop would end silently.
        error = stand_in("the stage raised StopAsyncIteration", error)
    error = awaitable_error(error)
    add_note_once(error, f"in stage {stage!r} of the stream, item ", str(position))
    if _misses_worker_info(error):
        add_note_once(
            error,
            "get_worker_info() is None in threads, which share one process: use the argument of "
            'worker_init_fn, or AsyncDataLoader(..., worker_type="process")',
        )
    return Failure(error, stage, position, fatal)


def _misses_worker_info(error: BaseException) -> bool:
    """Whether code that asks torch for the info of its worker process used None as the info."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return (
        isinstance(error, AttributeError)
        and error.obj is None
        and bool(frames)
        and "get_worker_info" in frames[-1][0].f_code.co_names
    )


UNAWAITED: frozenset[type] = frozenset((CoroutineType, Future))
"""The types that a plain function must not return, because nobody would await the result."""


def unawaited(result: Any) -> TypeError:
    """The error for a plain function that returned a `result` of a type in `UNAWAITED`."""
    if isinstance(result, Future):
        return TypeError("the function returned a Future: give an `async def` that awaits it")
    return not_begun(result)
