"""`max_pending`: the bound of each worker's queue, and the calls that wait for room."""

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from functools import partial
from typing import Any, TypeAlias

from .._base.forking import ReentrantLock
from ..errors import QueueFull
from ..futures._future import Future
from ._call import Call, FutureCall
from ._worker import Worker, least_loaded

Grant: TypeAlias = Future[list[Worker]]
"""Done with one worker for each call, in whose queue there is room for that call."""

_Groups: TypeAlias = tuple[tuple[Worker, ...], ...]
"""The workers that may run each call; the calls of a gang go to distinct workers."""


class Admission:
    """Room in the queues of an executor's workers.

    Requests for the same workers are served in their order. A waiting request reserves its workers
    against later requests, so that a gang, which needs room on several workers at once, gets it.
    Requests for other workers are not delayed: a slow device does not hold up the rest. A semaphore
    for each worker would not do: a request waits for any or for all of several workers.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending: float = max_pending
        # Re-entrant: a destructor or signal handler that interrupts this thread may drop a call or
        # submit one. If it interrupts `_choose`, a queue may get one call too many.
        self._lock = ReentrantLock()
        self._pending: Counter[Worker] = Counter()
        self._waiting: dict[Grant, _Groups] = {}

    def request(self, groups: Sequence[Sequence[Worker]]) -> Grant:
        """Request room for one call in each group; the grant is done at once if there is room.

        Then the caller queues a call on each worker (`admit`), or gives the room back (`leave`).
        """
        grant: Grant = Future()
        with self._lock:
            self._waiting[grant] = tuple(map(tuple, groups))
        self._grant()
        return grant

    def request_now(self, group: Sequence[Worker]) -> Worker:
        """Take room that no waiting request reserves, or raise `QueueFull`."""
        with self._lock:
            waiting = {*self._waiting.values()}  # different ones: there are few
            reserved = {worker for groups in waiting for some in groups for worker in some}
            chosen = self._choose((tuple(group),), reserved)
        if chosen is None:
            raise QueueFull(
                f"each of {len(group)} workers has max_pending={self._max_pending} calls "
                "waiting: await `run_sync`, which waits for room, or submit again later"
            )
        return chosen[0]

    def give_up(self, grant: Grant) -> bool:
        """Withdraw a request; False if room was granted: the caller must give that room back."""
        gave_up = grant.cancel()  # also True if the grant was cancelled before
        if gave_up:
            with self._lock:
                self._waiting.pop(grant, None)
            self._grant()  # later requests may have been waiting for its workers
        return gave_up

    def admit(self, call: Call[Any], worker: Worker) -> None:
        """Let `call` have the granted room in `worker`'s queue until somebody claims it."""
        room = [worker]
        call.on_claimed = partial(self._give_back, room)
        # A member of a gang may be cancelled while it waits for room. `cancel` sets the state of
        # the future, then calls `on_claimed`; this sets `on_claimed`, then looks at the state. So
        # one of the two gives the room back, and `_give_back` does so once.
        if isinstance(call, FutureCall) and call.future.cancelled():
            self._give_back(room)

    def leave(self, worker: Worker) -> None:
        """Give back the room for one call in `worker`'s queue."""
        self._give_back([worker])

    def remove(self, workers: Sequence[Worker]) -> None:
        """Let waiting requests use other workers than these, if they may."""
        with self._lock:
            for grant, groups in tuple(self._waiting.items()):
                self._waiting[grant] = tuple(
                    tuple(one for one in group if one not in workers) or group for group in groups
                )
        self._grant()

    def lift(self) -> None:
        """Grant every request from now on: the executor shuts down."""
        with self._lock:
            self._max_pending = math.inf
        self._grant()

    def _give_back(self, room: list[Worker]) -> None:
        with self._lock:
            if not room:
                return
            self._pending[room.pop()] -= 1
        self._grant()

    def _grant(self) -> None:
        while found := self._next():
            grant, workers = found
            try:
                # Without the lock: callbacks of the grant may come back here.
                grant.set_result(workers)
            except InvalidStateError:  # the request was withdrawn meanwhile
                with self._lock:
                    self._pending.subtract(workers)

    def _next(self) -> tuple[Grant, list[Worker]] | None:
        """Remove the first request for which there is room; return its grant and workers."""
        with self._lock:
            reserved: set[Worker] = set()
            # Most requests are for the same workers: if one must wait, all later ones must too.
            seen: set[_Groups] = set()
            try:
                for grant, groups in self._waiting.items():
                    if groups in seen:
                        continue
                    workers = self._choose(groups, reserved)
                    if workers is None:
                        seen.add(groups)
                        reserved.update(*groups)
                    elif self._waiting.pop(grant, None) is not None:
                        return grant, workers
                    else:  # an interruption has granted the request, or withdrawn it
                        self._pending.subtract(workers)
            except RuntimeError:  # an interruption has changed the size of the dict
                return self._next()
        return None

    def _choose(self, groups: _Groups, reserved: set[Worker]) -> list[Worker] | None:
        """Take room for one call on a worker of each group; None if one of them has no room."""
        chosen: list[Worker] = []
        for group in groups:
            room = [worker for worker in group if self._pending[worker] < self._max_pending]
            worker = least_loaded(room, without={*reserved, *chosen})
            if worker is None:
                return None
            chosen.append(worker)
        self._pending.update(chosen)
        return chosen
