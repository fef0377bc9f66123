"""Weak registries: the live objects of a kind in the process, iterable from any thread."""

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects as long as something else keeps them; from any thread."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[T] = weakref.WeakSet()

    def add(self, member: T) -> None:
        """Register `member`, without keeping it alive."""
        self._members.add(member)

    def __iter__(self) -> Iterator[T]:
        """Those that there are now."""
        while True:
            # The set says so if another thread adds one meanwhile. No lock, which a fork could
            # leave held, or a signal's handler find held by its own thread.
            with suppress(RuntimeError):
                return iter(tuple(self._members))

    def clear(self) -> None:
        """Forget all."""
        self._members.clear()
