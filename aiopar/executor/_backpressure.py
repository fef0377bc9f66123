"""`max_pending`: the bound of each worker's queue, and the calls that wait for room."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from .._base.forking import ReentrantLock
from ..errors import QueueFull
from ._call import Call
from ._worker import Worker, least_loaded

_Groups: TypeAlias = tuple[tuple[Worker, ...], ...]
"""The workers that may run each call; the calls of a gang go to distinct workers."""


class Admission:
    """Room in the queues of an executor's workers.

    Requests for the same workers are served in their order. A waiting request reserves its workers
    against later requests, so that a gang, which needs room on several workers at once, gets it.
    Requests for other workers are not delayed: a slow device does not hold up the rest.

    A call keeps its room until it leaves the queue (`Call.on_claimed`). A semaphore for each worker
    would not do: a request waits for any of several workers, or for several workers at once.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending: float = max_pending
        # Re-entrant: a destructor or signal handler that interrupts this thread may drop a call or
        # submit one. If it interrupts `_choose`, a queue may get one call too many.
        self._lock = ReentrantLock()
        self._room: dict[Call[Any], Worker] = {}
        self._pending: defaultdict[Worker, int] = defaultdict(int)
        """How many calls of `_room` each worker has."""
        self._waiting: dict[
            Call[Any], tuple[Sequence[Call[Any]], _Groups, Callable[[list[Worker]], object]]
        ] = {}
        """The arguments of each request that waits, by the first of its calls."""

    def request(
        self,
        calls: Sequence[Call[Any]],
        groups: Sequence[Sequence[Worker]],
        put: Callable[[list[Worker]], object],
    ) -> None:
        """Call `put` with a worker of each group as soon as all of them have room; perhaps now.

        A call that is dropped withdraws the request. If one call of a gang is dropped, all are.
        """
        for call in calls:
            call.on_claimed = self._left
        self._waiting[calls[0]] = calls, tuple(map(tuple, groups)), put
        self._admit()

    def request_now(self, call: Call[Any], group: Sequence[Worker]) -> Worker:
        """Return a worker with room that no waiting request reserves; QueueFull if none has."""
        with self._lock:
            waiting = {groups for _, groups, _ in tuple(self._waiting.values())}
            reserved = {worker for groups in waiting for some in groups for worker in some}
            chosen = self._choose((tuple(group),), reserved)
            if chosen is not None:
                call.on_claimed = self._left
                self._give_room(call, chosen[0])
                return chosen[0]
        raise QueueFull(
            f"each of {len(group)} workers has max_pending={self._max_pending} calls "
            "waiting: await `run_sync`, which waits for room, or submit again later"
        )

    def remove(self, workers: Sequence[Worker]) -> None:
        """Let waiting requests use other workers than these, if they may."""
        with self._lock:
            for first, (calls, groups, put) in tuple(self._waiting.items()):
                left = (tuple(one for one in group if one not in workers) for group in groups)
                others = tuple(some or group for some, group in zip(left, groups, strict=True))
                self._waiting[first] = calls, others, put
        self._admit()

    def lift(self) -> None:
        """Serve every request from now on: the executor shuts down."""
        with self._lock:
            self._max_pending = math.inf
        self._admit()

    def _left(self, call: Call[Any]) -> None:
        with self._lock:
            worker = self._room.pop(call, None)
            if worker is not None:
                self._pending[worker] -= 1
            else:
                self._waiting.pop(call, None)
        self._admit()

    def _admit(self) -> None:
        while (request := self._next()) is not None:
            put, workers = request
            put(workers)  # without the lock, because `put` calls observers

    def _next(self) -> tuple[Callable[[list[Worker]], object], list[Worker]] | None:
        """Remove the first request for which there is room; return its `put` and its workers."""
        with self._lock:
            reserved: set[Worker] = set()
            # Most requests are for the same workers: if one must wait, all later ones must too.
            blocked: set[_Groups] = set()
            try:
                for first, (calls, groups, put) in self._waiting.items():
                    if groups in blocked:
                        continue
                    workers = self._choose(groups, reserved)
                    if workers is None:
                        blocked.add(groups)
                        reserved.update(*groups)
                    elif self._waiting.pop(first, None):  # else an interruption has removed it
                        for call, worker in zip(calls, workers, strict=True):
                            self._give_room(call, worker)
                        return put, workers
            except RuntimeError:  # an interruption has changed the size of the dict
                return self._next()
        return None

    def _choose(self, groups: _Groups, reserved: set[Worker]) -> list[Worker] | None:
        """A worker with room for each group; None if a group has none."""
        chosen: list[Worker] = []
        for group in groups:
            room = [worker for worker in group if self._pending[worker] < self._max_pending]
            worker = least_loaded(room, without={*reserved, *chosen})
            if worker is None:
                return None
            chosen.append(worker)
        return chosen

    def _give_room(self, call: Call[Any], worker: Worker) -> None:
        self._room[call] = worker
        self._pending[worker] += 1
        if call.on_claimed is None:  # dropped meanwhile, perhaps before it had room
            self._left(call)
