"""Interruptions, as by a signal's handler or the garbage collector, at every point of a call."""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count


class Interruption:
    """Runs `handler()` at the `at`-th point at which the interpreter looks for signals."""

    def __init__(self, at: int, handler: Callable[[], object]) -> None:
        self._at = at
        self._handler = handler
        self.came = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """It comes while the body runs, if that is long enough."""
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _profile(self, _: types.FrameType, event: str, __: object) -> None:
        # Where a Python function begins, and where one of C has returned.
        self._at -= event in ("call", "c_return")
        if self._at < 0 and not self.came:
            self.came = True
            sys.setprofile(None)
            self._handler()


def at_every_point(handler: Callable[[], object]) -> Iterator[Interruption]:
    """One after the other, until one has not come: then the body was over."""
    for at in count():
        interruption = Interruption(at, handler)
        yield interruption
        if not interruption.came:
            return
