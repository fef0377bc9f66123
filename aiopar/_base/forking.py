"""Weak registries: the live objects of a kind in the process, iterable from any thread."""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects as long as something else keeps them; from any thread.

    Args:
        in_child: Called on each in a process that was forked: what threads had of it, its locks
            too, stayed in the parent. None: nothing is.
    """

    def __init__(self, in_child: Callable[[T], object] | None = None) -> None:
        self._members: weakref.WeakSet[T] = weakref.WeakSet()
        if in_child is not None and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(self._each, in_child))

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

    def _each(self, fn: Callable[[T], object]) -> None:
        for member in self:
            fn(member)
