"""Interruptions at every point of a call, like those of a signal handler or the collector."""

import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count


class Interruption:
    """One interruption, at the `at`-th point where the interpreter looks for signals."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.came = False

    @contextmanager
    def by(self, handler: Callable[[], object], *, inside: str = "") -> Iterator[None]:
        """Interrupt the body, if it is long enough, by a call of `handler`.

        Only files whose path contains `inside` have points.
        """

        def profile(frame: types.FrameType, event: str, function: object) -> None:
            if inside not in frame.f_code.co_filename:
                return
            # Where a Python function begins, and where a C function has returned. Not between the
            # `__enter__` of a lock and the body of its `with`: only a fault of CPython 3.14 raises
            # a handler's error there (github.com/python/cpython/issues/148874).
            entered = getattr(function, "__name__", "") == "__enter__"
            self._at -= event == "call" or (event == "c_return" and not entered)
            if self._at < 0 and not self.came:
                self.came = True
                sys.setprofile(None)
                handler()

        # The collector would free objects of other tests in the body, and swallow an error that the
        # handler raises there.
        gc.disable()
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()


def at_every_point() -> Iterator[Interruption]:
    """Interruptions at later and later points, until the body ends before the point."""
    for at in count():
        interruption = Interruption(at)
        yield interruption
        if not interruption.came:
            return
