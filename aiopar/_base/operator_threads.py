"""How many threads torch's operators may use in a worker: the running workers share the cores."""

import functools
import threading
from typing import Any

import torch

from .forking import held_across_fork

# Else a fork in the middle of the import would leave the module half made in the child.
_importing = held_across_fork()


class _Thread(threading.local):
    cores: int | None = None
    """How many threads the operators used before this thread got a share; None without a share."""


_thread = _Thread()


@functools.cache
def _openmp_libraries() -> tuple[Any, ...]:
    with _importing:
        # Imported here: it reads every shared library of the process, and only CPU workers need it.
        from threadpoolctl import ThreadpoolController

        return tuple(ThreadpoolController().select(user_api="openmp").lib_controllers)


def operator_threads() -> int:
    """Return how many threads the operators of the calling thread use."""
    # A thread's first call also makes torch set the process-wide default for this thread. So this
    # must come before `set_operator_threads`.
    return torch.get_num_threads()


def set_operator_threads(count: int) -> None:
    """Let operators that this thread calls use `count` threads.

    `torch.set_num_threads` would also change every thread that starts later.
    """
    if _thread.cores is None:
        _thread.cores = operator_threads()
    for library in _openmp_libraries():
        library.set_num_threads(count)


class CoreShares:
    """Divides the cores of the process among the workers of an executor that are running.

    Args:
        num_threads: How many threads every worker gets. None: an equal share, at least one.
    """

    def __init__(self, num_threads: int | None) -> None:
        self._fixed = num_threads
        # An executor that a worker makes divides all cores, not that worker's share.
        self._cores = _thread.cores or operator_threads()
        # A set's add, discard and len are atomic, also without a GIL.
        self.running: set[object] = set()
        """The workers that are running, or that have just got a call."""

    def share(self, running: int) -> int:
        """Return how many threads an operator may use while `running` workers run."""
        return self._fixed or self._cores // (running or 1) or 1
