"""An error that several callers get, as one object for each of them."""

import copy
from types import TracebackType


def own_error(error: BaseException, traceback: TracebackType | None) -> BaseException:
    """A copy of `error` for one more caller, or `error` itself where it cannot be copied.

    Who raises an error writes to it: the frames it passes (`__traceback__`) and what was handled
    there (`__context__`). In one object for all, the log of one would show those of another.
    """
    try:
        copied = copy.copy(error)
        if copied is error or type(copied) is not type(error):
            return error
        # A constructor need not hand on what it was given; and what is a list would be shared.
        copied.args = error.args
        if hasattr(error, "__notes__"):
            copied.__notes__ = list(error.__notes__)
        copied.__cause__ = error.__cause__  # which sets `__suppress_context__`
        copied.__context__ = error.__context__
        copied.__suppress_context__ = error.__suppress_context__
        return copied.with_traceback(traceback)
    except Exception:  # noqa: BLE001  # of a constructor, or of a class that forbids it
        return error
