"""Helpers for errors: notes, tracebacks, messages, replacements, and the log."""

import logging
import re
import threading
import traceback
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

logger = logging.getLogger("aiopar")
"""The package's logger, for errors that reach no caller."""


def add_note_once(error: BaseException, start: str, rest: str = "") -> None:
    """Add the note `start + rest` unless `error` has a note with this start.

    A function may raise one exception again and again. `rest` is what differs from raise to raise.
    An exception that accepts no attributes (a frozen dataclass) gets no note.
    """
    with suppress(Exception):
        if not any(str(note).startswith(start) for note in getattr(error, "__notes__", ())):
            error.add_note(start + rest)


def log_failure(what: str, ended: "Future[Any]") -> None:
    """Log the error of the close of `what`, if `ended`, which nobody awaits, has one."""
    if not ended.cancelled() and (error := ended.exception()) is not None:
        logger.error("%s failed when it was closed", what, exc_info=error)


def in_words(error: BaseException) -> str:
    """Return the error's type and message; only the type if its `__str__` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # the user's `__str__`
        return type(error).__name__


def in_one_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message that is not empty."""
    return re.sub(r":\s+", ": ", in_words(error), count=1).partition("\n")[0]


def error_chain(error: BaseException) -> list[BaseException]:
    """Return `error` and its causes, contexts and group members, each once; cycles are allowed."""
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


def own_traceback(error: E) -> E:
    """Drop from the traceback the frame that caught `error`: a frame keeps its locals alive."""
    caught = error.__traceback__
    return error.with_traceback(None if caught is None else caught.tb_next)


# No frame of a user is cleared. The traceback of an exception that is raised again and again has
# the frames of earlier callers too, and CPython 3.11 and 3.12 clear a coroutine's frame by closing
# the coroutine.


def drop_frames(error: BaseException) -> None:
    """Drop the tracebacks of `error`, its causes and members: their frames keep tensors alive."""
    for one in error_chain(error):
        one.with_traceback(None)


def without_frames(error: E) -> E:
    """`error` with its traceback as a text note, because frames would keep tensors alive."""
    add_note_once(error, "raised here:\n", "".join(traceback.format_exception(error)))
    drop_frames(error)
    return error


def awaitable_error(error: BaseException) -> BaseException:
    """Return an error that a coroutine can raise: for StopIteration, a RuntimeError."""
    if not isinstance(error, StopIteration):
        return error
    # A StopIteration would mean that the coroutine has returned.
    return stand_in("the call raised StopIteration", error)


def stand_in(message: str, cause: BaseException | None) -> RuntimeError:
    """Make an error to raise in place of `cause`, which Python would misunderstand."""
    error = RuntimeError(message)
    error.__cause__ = cause
    return error


def log_callback_error(
    error: BaseException, logger: logging.Logger, message: str, *args: object
) -> None:
    """Log the error of a user's callback, so that it does not reach the code that called it.

    `SystemExit` is logged too, because it would end a worker. `KeyboardInterrupt` on the main
    thread is raised, because it is Ctrl-C.
    """
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and isinstance(error, KeyboardInterrupt):
        raise error
    logger.error(message, *args, exc_info=error)
