"""Repairs in a forked process: threads and the locks that they held stay in the parent."""

import os
import socket
import threading
import weakref
from _thread import RLock
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from .tracebacks import logger

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])
C = TypeVar("C", bound=Callable[[], object])

_in_child: list[Callable[[], object]] = []
_held_across: list[Any] = []


def after_fork_in_child(callback: C) -> C:
    """Call `callback` in every forked child, after those registered earlier; also a decorator."""
    _in_child.append(callback)
    return callback


def held_across_fork() -> "threading.RLock":
    """Make a lock that no other thread holds while the process forks.

    So a child inherits neither a locked lock nor half changed data. Never fork while you hold it.
    """
    lock = threading.RLock()  # the collector may close a coroutine here that takes the lock
    _held_across.append(lock)
    return lock


class Registry(Generic[T]):
    """A thread-safe set of weak references; a forked child calls `in_child` with each object."""

    def __init__(self, in_child: Callable[[T], object] | None = None) -> None:
        self._members: weakref.WeakSet[T] = weakref.WeakSet()
        if in_child is not None:
            after_fork_in_child(lambda: [in_child(member) for member in self])

    def add(self, member: T) -> None:
        """Register `member`, without keeping it alive."""
        self._members.add(member)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the objects that are alive at this moment."""
        while True:
            # The set raises RuntimeError if another thread adds an object meanwhile. A lock would
            # not do: a forked child, or a handler, could find it held for ever.
            with suppress(RuntimeError):
                return iter(tuple(self._members))

    def clear(self) -> None:
        """Remove all objects."""
        self._members.clear()


def live_methods(references: "set[weakref.WeakMethod[M]]") -> list[M]:
    """The bound methods of a set whose objects are alive; the others are discarded."""
    found = {reference: reference() for reference in references.copy()}
    references.difference_update([dead for dead, method in found.items() if method is None])
    return [method for method in found.values() if method is not None]


class ReentrantLock(RLock):  # type: ignore[misc]  # only type checkers take it for final
    """A re-entrant lock that a forked child finds free, unless the forking thread holds it.

    The data that the lock guards may be half changed in the child.
    """

    def __init__(self) -> None:
        _locks.add(self)

    @property
    def held_here(self) -> bool:
        """Whether this thread holds the lock: a destructor or handler then interrupts a change."""
        held: bool = self._is_owned()  # type: ignore[attr-defined]  # as `threading` does
        return held

    def renew(self) -> None:
        """Free the lock in a forked child."""
        if not self.held_here:
            self._at_fork_reinit()  # type: ignore[attr-defined]


_locks: Registry[ReentrantLock] = Registry(ReentrantLock.renew)

_own_sockets: Registry[socket.socket] = Registry(socket.socket.close)
_making_sockets = held_across_fork()


def own_socketpair() -> tuple[socket.socket, socket.socket]:
    """A pair of connected sockets without copies in forked children.

    So the process at the other end sees the end of this process at once.
    """
    with _making_sockets:
        pair = socket.socketpair()
        own_sockets(*pair)
    return pair


def own_sockets(*sockets: socket.socket) -> None:
    """Let forked children keep no copies of `sockets`."""
    for one in sockets:
        _own_sockets.add(one)


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
