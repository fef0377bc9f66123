"""`aiopar._base.forking`: weak registries, and what a forked child repairs."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import pytest

from aiopar._base import forking
from aiopar._base.forking import ReentrantLock, Registry, after_fork_in_child, held_across_fork

_posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@pytest.fixture(autouse=True)
def _own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the hooks that a test has registered."""
    monkeypatch.setattr(forking, "_in_child", [*forking._in_child])
    monkeypatch.setattr(forking, "_held_across", [*forking._held_across])


def in_child(check: Callable[[], bool]) -> bool:
    """The result of `check` in a forked process."""
    if (pid := os.fork()) == 0:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class Thing:
    """Can be weakly referenced."""


def test_a_registry_keeps_nothing_alive() -> None:
    registry: Registry[Thing] = Registry()
    kept = Thing()
    registry.add(kept)
    registry.add(Thing())
    assert [*registry] == [kept]
    registry.clear()
    assert [*registry] == []


def test_another_thread_may_add_an_object_during_an_iteration() -> None:
    class Growing(WeakSet[Thing]):
        def __iter__(self) -> Iterator[Thing]:
            for thing in super().__iter__():
                yield thing
                if late:
                    self.add(late.pop())

    late: list[Thing] = [Thing()]
    registry: Registry[Thing] = Registry()
    members = registry._members = Growing()
    first, second = Thing(), late[0]
    members.add(first)
    assert first in {*registry}  # since CPython 3.14 an iteration misses later objects
    assert {*registry} == {first, second}


@_posix
def test_a_child_calls_its_callbacks_in_order_and_the_parent_does_not() -> None:
    called: list[object] = []
    things: Registry[Thing] = Registry(called.append)
    kept = Thing()
    things.add(kept)

    @after_fork_in_child
    def failing() -> None:
        called.append("failing")
        raise ZeroDivisionError  # it is logged

    after_fork_in_child(lambda: called.append("last"))
    assert in_child(lambda: called == [kept, "failing", "last"])
    assert called == []


@_posix
def test_no_other_thread_holds_the_lock_during_a_fork() -> None:
    lock = held_across_fork()
    states: list[str] = []
    taken = threading.Event()

    def change() -> None:
        with lock:
            states.append("half")
            taken.set()
            os.sched_yield()
            states.append("whole")

    for _ in range(20):
        states.clear()
        taken.clear()
        thread = threading.Thread(target=change)
        thread.start()
        taken.wait()
        assert in_child(lambda: lock.acquire(blocking=False) and states == ["half", "whole"])
        thread.join()


@_posix
def test_a_lock_that_another_thread_holds_is_free_in_a_child() -> None:
    lock = ReentrantLock()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lock.acquire).result()
        assert not lock.acquire(blocking=False)
        assert in_child(lambda: lock.acquire(blocking=False))
        assert not lock.acquire(blocking=False)
        thread.submit(lock.release).result()


@_posix
def test_a_lock_that_the_forking_thread_holds_stays_held_in_a_child() -> None:
    lock = ReentrantLock()

    def release_once() -> bool:
        held = lock.held_here
        lock.release()
        return held and not lock.held_here

    with lock:
        assert in_child(release_once)
