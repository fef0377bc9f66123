"""What is done with errors: notes, tracebacks, words, stand-ins, and the log."""

import logging
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

logger = logging.getLogger("aiopar")
"""The package's own: of errors that reach no caller."""


def add_note_once(error: BaseException, note: str) -> None:
    """Add `note`, unless `error` has it: a function may raise one exception again and again.

    One that takes no attributes (a frozen dataclass) goes without: it is to reach who waits for it.
    """
    with suppress(Exception):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def log_failure(what: str, ended: "Future[Any]") -> None:
    """A callback of `ended`, for whose error nobody waits: `what` failed when it was closed."""
    if not ended.cancelled() and (error := ended.exception()) is not None:
        logger.error("%s failed when it was closed", what, exc_info=error)


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


def own_traceback(error: E) -> E:
    """`error` without the frame that caught it, whose locals it would keep alive."""
    traceback = error.__traceback__
    return error.with_traceback(None if traceback is None else traceback.tb_next)


def awaitable_error(error: BaseException) -> BaseException:
    """`error`, or what stands for it where it cannot be raised: in a coroutine."""
    if not isinstance(error, StopIteration):
        return error
    # There it would mean that the coroutine has returned.
    return stand_in("the call raised StopIteration", error)


def stand_in(message: str, cause: BaseException | None) -> RuntimeError:
    """What is raised in place of an error that would be misunderstood there; that is its cause."""
    error = RuntimeError(message)
    error.__cause__ = cause
    return error


def log_callback_error(
    error: BaseException, logger: logging.Logger, message: str, *args: object
) -> None:
    """Log what a callback of the user's raised: it disturbs nobody who called it.

    Not even `sys.exit`, which would end a worker. Only Ctrl-C on the main thread goes on: it is not
    the callback's own.
    """
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and isinstance(error, KeyboardInterrupt):
        raise error
    logger.error(message, *args, exc_info=error)
