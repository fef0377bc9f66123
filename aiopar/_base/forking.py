"""What a forked process repairs: threads stay in the parent, and so does whatever they held."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from .tracebacks import logger

T = TypeVar("T")
C = TypeVar("C", bound=Callable[[], object])

_in_child: list[Callable[[], object]] = []
_held_across: list[Any] = []


def after_fork_in_child(callback: C) -> C:
    """Call `callback` in every forked child, after those registered earlier; also a decorator."""
    _in_child.append(callback)
    return callback


def held_across_fork() -> threading.Lock:
    """Make a lock that no other thread holds while the process forks.

    So no child inherits it locked, or what it guards half changed. Never fork with it held.
    """
    lock = threading.Lock()
    _held_across.append(lock)
    return lock


class Registry(Generic[T]):
    """Objects for as long as something else refers to them; for any thread.

    Args:
        in_child: Called with each object in a forked child, to repair its locks and threads.
    """

    def __init__(self, in_child: Callable[[T], object] | None = None) -> None:
        self._members: weakref.WeakSet[T] = weakref.WeakSet()
        if in_child is not None:
            after_fork_in_child(lambda: [in_child(member) for member in self])

    def add(self, member: T) -> None:
        """Register `member`, without keeping it alive."""
        self._members.add(member)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the objects of this moment."""
        while True:
            # The set raises RuntimeError if another thread adds an object meanwhile. No lock: a
            # fork may leave it held, and a signal handler may interrupt the thread that holds it.
            with suppress(RuntimeError):
                return iter(tuple(self._members))

    def clear(self) -> None:
        """Forget all."""
        self._members.clear()


def _before() -> None:
    for lock in _held_across:
        lock.acquire()


def _release() -> None:
    for lock in reversed(_held_across):
        lock.release()


def _repair_child() -> None:
    _release()
    for callback in _in_child:
        try:
            callback()
        except Exception:  # noqa: BLE001  # the other callbacks run too
            logger.exception("%r failed in a forked process", callback)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_repair_child)
