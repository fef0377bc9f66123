"""Interruptions, as by a signal's handler or the garbage collector, at every point of a call."""

import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count


class Interruption:
    """Comes once, at the `at`-th point at which the interpreter looks for signals."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.came = False

    @contextmanager
    def by(self, handler: Callable[[], object]) -> Iterator[None]:
        """It comes in the body, if that is long enough, and calls `handler`."""

        def profile(_: types.FrameType, event: str, function: object) -> None:
            # Where a Python function begins, and where one of C has returned; but not between that
            # of a lock and the body of its `with`, where only a fault of CPython 3.14 lets a
            # handler's error come out (github.com/python/cpython/issues/148874).
            entered = getattr(function, "__name__", "") == "__enter__"
            self._at -= event == "call" or (event == "c_return" and not entered)
            if self._at < 0 and not self.came:
                self.came = True
                sys.setprofile(None)
                handler()

        # What other tests have left behind would be let go of in the body, by functions of its own:
        # an error that comes there goes to nobody.
        gc.disable()
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()


def at_every_point() -> Iterator[Interruption]:
    """One after the other, until one has not come: then the body was over."""
    for at in count():
        interruption = Interruption(at)
        yield interruption
        if not interruption.came:
            return
