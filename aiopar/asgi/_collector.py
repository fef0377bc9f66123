"""The garbage collector, while applications serve.

A process has one, and may have several applications, in threads of their own: what one of them
wants holds on when another one ends.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector:
    """What all applications want of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._freezing = 0
        """How many."""
        self._thresholds: list[int] = []
        self._threshold_before = self._threshold_set = 0

    def freeze(self) -> None:
        gc.collect()
        with self._lock:
            self._freezing += 1
            gc.freeze()

    def unfreeze(self) -> None:
        with self._lock:
            self._freezing -= 1
            if not self._freezing:
                gc.unfreeze()

    def add_threshold(self, objects: int) -> None:
        with self._lock:
            if not self._thresholds:
                self._threshold_before = self._threshold_set = gc.get_threshold()[0]
            self._thresholds.append(objects)
            self._set_threshold()

    def remove_threshold(self, objects: int) -> None:
        with self._lock:
            self._thresholds.remove(objects)
            self._set_threshold()

    def _set_threshold(self) -> None:
        now, *others = gc.get_threshold()
        # Somebody's own choice stays: never to collect (0), and what was set meanwhile.
        if now == self._threshold_set and now > 0:
            self._threshold_set = max([self._threshold_before, *self._thresholds])
            gc.set_threshold(self._threshold_set, *others)


_collector = _Collector()


@contextmanager
def frozen() -> Iterator[None]:
    """What there is now is left out of collections, until the last of these blocks ends."""
    _collector.freeze()
    try:
        yield
    finally:
        _collector.unfreeze()


@contextmanager
def threshold(objects: int) -> Iterator[None]:
    """A collection begins for `objects` new ones at least, inside of this block."""
    _collector.add_threshold(objects)
    try:
        yield
    finally:
        _collector.remove_threshold(objects)
