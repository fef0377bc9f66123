"""How many threads a torch operator may use in a worker: the workers share the cores."""

import functools
import threading
from typing import Any

import torch

from .forking import held_across_fork

# Else a fork in the middle of the import would leave the module half made in the child.
_importing = held_across_fork()


class _Thread(threading.local):
    cores: int | None = None
    """What its operators used before it was given a share; None: it was given none."""


_thread = _Thread()


@functools.cache
def _openmp_libraries() -> tuple[Any, ...]:
    with _importing:
        # Imported here: it reads every shared library of the process, and only CPU workers want it.
        from threadpoolctl import ThreadpoolController

        return tuple(ThreadpoolController().select(user_api="openmp").lib_controllers)


def operator_threads() -> int:
    """How many threads the operators of the calling thread use."""
    # Also makes torch set its process-wide default, which it does at a thread's first use of it:
    # what `set_operator_threads` sets must come later.
    return torch.get_num_threads()


def set_operator_threads(count: int) -> None:
    """Let torch operators called by this thread, and by no other, use `count` threads.

    `torch.set_num_threads` would also set it for every thread that starts later.
    """
    if _thread.cores is None:
        _thread.cores = operator_threads()
    for library in _openmp_libraries():
        library.set_num_threads(count)


class CoreShares:
    """The cores of the process, divided among the workers that have something to run right now.

    Also those that are about to begin: an operator that began before them would take their cores,
    and its helper threads spin there for a while after it.
    """

    def __init__(self, num_threads: int | None) -> None:
        """Every worker gets `num_threads`; None: an equal share, at least one."""
        self._fixed = num_threads
        # Made by a worker, it is not to divide that one's share.
        self._cores = _thread.cores or operator_threads()
        # A set's add, discard and len are atomic, also without a GIL.
        self.running: set[object] = set()
        """The workers that have something to run."""

    def enter(self, worker: object) -> None:
        """`worker` has something to run."""
        self.running.add(worker)

    def leave(self, worker: object) -> None:
        """`worker` has nothing to run."""
        self.running.discard(worker)

    def share(self, running: int) -> int:
        """How many threads an operator may use in each of `running` workers."""
        return self._fixed or self._cores // (running or 1) or 1
