"""A system that cannot start threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NO_THREAD = "can't start new thread"


@contextmanager
def no_more_threads() -> Iterator[None]:
    """No thread can start in the body."""

    def start(_: object) -> None:
        raise RuntimeError(NO_THREAD)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("threading.Thread.start", start)
        yield
