"""`max_pending`: the bound of each worker's queue, and the line of those that wait for room."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from functools import partial
from typing import Any, TypeAlias

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

    First come, first served, among requests for the same workers. A request that waits reserves
    its workers against later requests, so that a gang, which needs room on several workers at once,
    gets it. Requests for other workers are not delayed: a slow device does not hold up the rest.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending: float = max_pending
        self._lock = threading.Lock()
        self._pending: dict[Worker, int] = {}
        self._waiting: dict[Grant, _Groups] = {}

    def request(self, groups: Sequence[Sequence[Worker]]) -> Grant:
        """Ask for room for one call in each group; the grant is done at once if there is room.

        The caller then queues a call on each worker (`admit`), or gives the room back (`leave`).
        """
        grant: Grant = Future()
        with self._lock:
            self._waiting[grant] = tuple(map(tuple, groups))
        self._grant()
        return grant

    def request_now(self, group: Sequence[Worker]) -> Worker:
        """Take room for one call at once, behind every request that waits.

        Raises:
            QueueFull: Every queue holds `max_pending` calls, or the room is reserved.
        """
        with self._lock:
            reserved = {
                worker for groups in self._waiting.values() for some in groups for worker in some
            }
            chosen = self._choose((tuple(group),), reserved)
        if chosen is None:
            raise QueueFull(
                f"each of {len(group)} workers has max_pending={self._max_pending} calls "
                "waiting: await `run_sync`, which waits for room, or submit again later"
            )
        return chosen[0]

    def give_up(self, grant: Grant) -> bool:
        """Leave the line; False if there is room already, which the caller must give back."""
        gave_up = grant.cancel()  # also True if it was cancelled before
        if gave_up:
            with self._lock:
                self._waiting.pop(grant, None)
            self._grant()  # requests behind it may have been waiting for its workers
        return gave_up

    def admit(self, call: Call[Any], worker: Worker) -> None:
        """`call` takes the granted room in `worker`'s queue until somebody claims it."""
        room = [worker]
        call.on_claimed = partial(self._give_back, room)
        # A member of a gang may be cancelled while it waits for room. Cancelling sets the state and
        # then calls back; this sets the callback and then looks at the state. So one of them gives
        # the room back, and `_give_back` does so once.
        if isinstance(call, FutureCall) and call.future.cancelled():
            self._give_back(room)

    def leave(self, worker: Worker) -> None:
        """Give back the room for one call in `worker`'s queue."""
        self._give_back([worker])

    def lift(self) -> None:
        """Admit every request, from now on: the executor shuts down."""
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
            except InvalidStateError:  # its caller gave up meanwhile
                with self._lock:
                    for worker in workers:
                        self._pending[worker] -= 1

    def _next(self) -> tuple[Grant, list[Worker]] | None:
        """Take the first request that can be admitted out of the line."""
        with self._lock:
            reserved: set[Worker] = set()
            # Most lines are for the same workers: after the first one, all others must wait too.
            seen: set[_Groups] = set()
            for grant, groups in self._waiting.items():
                if groups in seen:
                    continue
                workers = self._choose(groups, reserved)
                if workers is not None:
                    del self._waiting[grant]
                    return grant, workers
                seen.add(groups)
                reserved.update(*groups)
        return None

    def _choose(self, groups: _Groups, reserved: set[Worker]) -> list[Worker] | None:
        """Take room for one call on a worker of each group; None if one of them has no room."""
        chosen: list[Worker] = []
        for group in groups:
            room = [one for one in group if self._pending.get(one, 0) < self._max_pending]
            worker = least_loaded(room, without={*reserved, *chosen})
            if worker is None:
                return None
            chosen.append(worker)
        for worker in chosen:
            self._pending[worker] = self._pending.get(worker, 0) + 1
        return chosen
