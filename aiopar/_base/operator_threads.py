"""The cores of this process, and how the running workers share them among torch's operators."""

import functools
import os
import threading
from contextlib import suppress
from math import ceil, inf
from pathlib import Path
from typing import Any

import torch

from .forking import held_across_fork

# A fork in the middle of the import of `threadpoolctl` would leave it half made in the child.
_importing = held_across_fork()


def cgroup_cores(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> float:
    """How many cores Linux grants to the cgroup of this process; infinity if there is no limit.

    The file `groups` names the cgroup for each hierarchy below `mounted`.
    """
    granted = inf
    with suppress(OSError):  # not Linux
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(","):  # version 1
                top = mounted / "cpu"
            elif not controllers:
                top = mounted
            else:
                continue
            # In a container, `path` may be the path on the host, which is not mounted.
            own = top / path.lstrip("/")
            for group in (own, *own.parents):
                if group.is_relative_to(top):
                    granted = min(granted, _quota(group))
    return granted


def _quota(group: Path) -> float:
    with suppress(OSError, ValueError):  # no such file; "max"
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            files = group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"
            quota, period = (file.read_text() for file in files)
        if float(quota) > 0:  # -1: no limit
            return float(quota) / float(period)
    return inf


_granted = cgroup_cores()  # read once: an event loop must not read files


def core_count() -> int:
    """How many cores this process may use: CPU affinity and cgroup may grant less than all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, ceil(min(cores or 1, _granted)))


class _Thread(threading.local):
    cores: int | None = None  # how many the operators used before this thread got a share


_thread = _Thread()


@functools.cache
def _openmp_libraries() -> tuple[Any, ...]:
    with _importing:
        # Imported here, because only CPU workers need it.
        from threadpoolctl import ThreadpoolController

        return tuple(ThreadpoolController().select(user_api="openmp").lib_controllers)


def operator_threads() -> int:
    """Return how many threads the operators of the calling thread use."""
    # Torch's function sets the process-wide default for a thread on the thread's first call. So the
    # first call must come before `set_operator_threads`.
    return torch.get_num_threads()


def set_operator_threads(count: int) -> None:
    """Let operators that this thread calls use `count` threads."""
    # Without `torch.set_num_threads`, which also changes every thread that starts later.
    if _thread.cores is None:
        _thread.cores = operator_threads()
    for library in _openmp_libraries():
        library.set_num_threads(count)


class CoreShares:
    """Equal shares of cores for the running workers of an executor, or `num_threads` for each."""

    def __init__(self, num_threads: int | None) -> None:
        self._fixed = num_threads
        # An executor that a worker makes divides all cores, not that worker's share.
        self._cores = min(_thread.cores or operator_threads(), core_count())
        # A set's add, discard and len are atomic, also without a GIL.
        self.running: set[object] = set()  # workers that are running, or have just got a call
        self._always: int | None = None  # so many workers share the cores, however many run

    def equalize(self, workers: int) -> None:
        """Give each of so many workers the same share from now on, however many run."""
        self._always = self._always or workers

    @property
    def sharing(self) -> int:
        """How many workers share the cores now."""
        return self._always or len(self.running)

    def share(self, running: int) -> int:
        """Return how many threads an operator may use while `running` workers run."""
        return self._fixed or self._cores // (running or 1) or 1
