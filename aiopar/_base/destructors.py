"""`destructor`: a `__del__` that does nothing when the interpreter ends."""

import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def destructor(fn: Callable[[T], object]) -> Callable[[T], None]:
    """Decorate a `__del__`: it does nothing when the interpreter ends.

    At that time no thread can start, and the globals of modules may be None. Without a GIL many
    objects live until then.
    """
    is_finalizing = sys.is_finalizing  # a global may be None

    def run(self: T) -> None:
        if not is_finalizing():
            fn(self)

    return run
