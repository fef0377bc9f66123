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

    # By this name trio knows it, and raises no KeyboardInterrupt in it, which would be lost.
    def __del__(self: T) -> None:  # noqa: N807  # it becomes the method
        if not is_finalizing():
            fn(self)

    return __del__
