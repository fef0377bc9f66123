"""What passes from stage to stage in the place of an item: nothing yet, the end, or a failure."""

import traceback
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

from .._base.tracebacks import add_note_once, awaitable_error, error_chain, own_traceback, stand_in


class Leaving:
    """Whether the reader has left; workers look between two items.

    No `threading.Event`: it is set by finalizers too, and after Ctrl-C, where no lock may be taken.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: bool = False


E = TypeVar("E", bound=BaseException)


@final
class _Signal:
    """A word between stages; told by identity."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


PENDING: Final[Any] = _Signal("PENDING")
"""Nothing to hand out yet: who asked is told (`Stage.listener`) when there is."""

END: Final[Any] = _Signal("END")
"""There is nothing more, and never will be."""


@dataclass(frozen=True, slots=True, eq=False)
class FailedItem:
    """An item that `max_failures` let a stream leave out.

    Attributes:
        error: What was raised.
        stage: The step in which it failed.
        position: Which of the items that came into that step, counted from 0.
    """

    error: BaseException
    stage: str
    position: int


@final
@dataclass(slots=True, eq=False)
class Failure:
    """Stands where the item would have come; passed on by every later stage as it is."""

    error: BaseException | None
    """None: it was taken."""
    stage: str
    position: int
    fatal: bool = False
    """Whether nothing can come after it: the source itself failed, or a worker was taken away."""

    def take(self) -> BaseException:
        """The error, for who raises it or lets go of it; called once.

        From then on it is not held from here: its traceback holds the frames that it came through
        and those that called them, of links and pumps, which may have ended with this in hand.
        """
        error, self.error = self.error, None
        assert error is not None  # noqa: S101
        return error


def failure(error: BaseException, stage: str, position: int, *, fatal: bool = False) -> Failure:
    """What stands for an item that failed with `error`, which was caught in the calling frame."""
    error = _raisable(own_traceback(error))
    add_note_once(error, f"in stage {stage!r} of the stream, item {position}")
    return Failure(error, stage, position, fatal)


def _raisable(error: BaseException) -> BaseException:
    if isinstance(error, StopAsyncIteration):
        # Out of `__anext__` it would end the consumer's loop, and nobody would know that it failed.
        return stand_in("the stage raised StopAsyncIteration", error)
    return awaitable_error(error)


def without_frames(error: E) -> E:
    """`error` with its traceback in words: it is kept, and must not keep tensors with it.

    The frames of a traceback hold those that called them, in which batches were made.
    """
    add_note_once(error, "".join(traceback.format_exception(error)))
    for one in error_chain(error):
        one.with_traceback(None)
    return error
