"""The share of the time in which workers are busy, from how long they have been."""

import threading
from collections import Counter
from typing import NamedTuple
from weakref import WeakKeyDictionary

from .._pool import WorkerPool
from .._worker import Worker

_SHORTEST = 1.0  # seconds; a call counts when it ends, so that shorter ones say little


class _Reading(NamedTuple):
    at: float
    busy_seconds: float
    ratio: float


class BusyRatios:
    """What is remembered of workers from one reading to the next; used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: WeakKeyDictionary[Worker, _Reading] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[WorkerPool, str] = WeakKeyDictionary()
        self._prefixes: Counter[str] = Counter()

    def read(self, worker: Worker, busy_seconds: float, now: float) -> float:
        """The share since the reading before; one within a second of it repeats it."""
        with self._lock:
            latest = self._latest.setdefault(worker, _Reading(now, busy_seconds, 0.0))
            elapsed = now - latest.at
            if elapsed >= _SHORTEST:
                # A call that began before that may be longer than the time since.
                ratio = min(1.0, (busy_seconds - latest.busy_seconds) / elapsed)
                latest = self._latest[worker] = _Reading(now, busy_seconds, ratio)
        return latest.ratio

    def name(self, pool: WorkerPool) -> str:
        """The prefix of its threads' names, numbered where several executors have the same."""
        with self._lock:
            if pool not in self._names:
                prefix = pool.thread_name_prefix
                self._prefixes[prefix] += 1
                count = self._prefixes[prefix]
                self._names[pool] = prefix if count == 1 else f"{prefix}-{count}"
            return self._names[pool]
