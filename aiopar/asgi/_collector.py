"""The garbage collector, while an application serves."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen() -> Iterator[None]:
    """What there is now is left out of collections, inside of this block."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def threshold(objects: int) -> Iterator[None]:
    """A collection begins for `objects` new ones at least, inside of this block."""
    before, *others = gc.get_threshold()
    if not 0 < before < objects:  # never, or later: somebody's own choice
        yield
        return
    gc.set_threshold(objects)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == objects:  # else it has been set meanwhile
            gc.set_threshold(before, *others)
