"""The garbage collector, while applications serve: any number, also in threads of their own.

There is one collector in a process. Each application says what it wants; when it ends, what the
others want holds on.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_freezing = 0
"""How many applications are inside of `frozen`."""


@contextmanager
def frozen() -> Iterator[None]:
    """What there is now is left out of collections, until the last of these blocks ends."""
    global _freezing
    gc.collect()
    with _lock:
        gc.freeze()
        _freezing += 1
    try:
        yield
    finally:
        with _lock:
            _freezing -= 1
            if not _freezing:
                gc.unfreeze()


class _Threshold:
    """The larger one of what was there before and of what is wanted, unless somebody sets it."""

    def __init__(self) -> None:
        self._wanted: list[int] = []
        self._before = self._held = 0

    def add(self, objects: int) -> None:
        if not self._wanted:
            self._before = self._held = gc.get_threshold()[0]
        self._wanted.append(objects)
        self._update()

    def remove(self, objects: int) -> None:
        self._wanted.remove(objects)
        self._update()

    def _update(self) -> None:
        now, *others = gc.get_threshold()
        # Somebody's own choice stays: never to collect (0), and what was set meanwhile.
        if now == self._held and now > 0:
            self._held = max([self._before, *self._wanted])
            gc.set_threshold(self._held, *others)


_threshold = _Threshold()


@contextmanager
def threshold(objects: int) -> Iterator[None]:
    """A collection begins for `objects` new ones at least, inside of this block."""
    with _lock:
        _threshold.add(objects)
    try:
        yield
    finally:
        with _lock:
            _threshold.remove(objects)
