"""`max_pending`: how many calls may wait in a worker's queue, and who waits for room."""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import InvalidStateError
from functools import partial
from typing import Any

from ..errors import QueueFull
from ..futures._future import Future
from ._call import Call, FutureCall
from ._worker import Worker, by_load

Grant = Future[list[Worker]]
"""Done with one worker for each call, in whose queue there is room for it."""

_Groups = tuple[tuple[Worker, ...], ...]
"""The workers that each call may go to; those of a gang go to distinct ones."""

_Line = OrderedDict[Grant, int]
"""Those who wait for room with the same groups, each with its number among all who wait."""


class Admission:
    """Room in the queues of an executor's workers.

    First come, first served, among those who want the same workers: whoever waits keeps its
    workers from all who came later, so that a gang, which needs room on several at once, gets it;
    and keeps nobody from other workers, so that a slow device does not hold up the others.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending: float = max_pending
        self._lock = threading.Lock()
        self._pending: dict[Worker, int] = {}
        self._lines: dict[_Groups, _Line] = {}
        self._arrived = 0

    def request(self, groups: Sequence[Sequence[Worker]]) -> Grant:
        """Ask for room for one call in each group; done at once where there is room.

        Whoever gets the workers queues a call on each (`admit`) or gives the room back (`leave`).
        """
        granted: Grant = Future()
        wanted = tuple(map(tuple, groups))
        with self._lock:
            self._arrived += 1
            self._lines.setdefault(wanted, OrderedDict())[granted] = self._arrived
        self._grant()
        return granted

    def give_up(self, granted: Grant) -> bool:
        """Leave the line; False: there was room already, and it is the caller's to give back."""
        gave_up = granted.cancel()  # also if it was before
        if gave_up:
            with self._lock:
                for line in self._lines.values():
                    line.pop(granted, None)
            # It may have kept workers with room from those behind it.
            self._grant()
        return gave_up

    def request_now(self, group: Sequence[Worker]) -> Worker:
        """A worker with room, for who cannot wait; nobody who waits is passed.

        Raises:
            QueueFull: Every queue holds `max_pending` calls, or others wait for the room.
        """
        with self._lock:
            kept = {worker for groups, _ in self._heads() for some in groups for worker in some}
            chosen = self._choose((tuple(group),), kept)
            if chosen is None:
                raise QueueFull(
                    f"each of {len(group)} workers has max_pending={self._max_pending} calls "
                    "waiting: await `run_sync`, which waits for room, or submit again later"
                )
        return chosen[0]

    def admit(self, call: Call[Any], worker: Worker) -> None:
        """`call` goes to `worker`'s queue, and takes up room there until somebody claims it."""
        room = [worker]
        call.on_claimed = partial(self._give_back, room)
        # A gang's member may have been cancelled while it waited for room. Cancelling sets the
        # state and then calls back, this sets the callback and then looks at the state: between
        # them they give the room back, and `_give_back` sees to it that they do so once.
        if isinstance(call, FutureCall) and call.future.cancelled():
            self._give_back(room)

    def leave(self, worker: Worker) -> None:
        """There is room for one more call in `worker`'s queue."""
        self._give_back([worker])

    def lift(self) -> None:
        """Let everyone in, now and from now on: the executor shuts down, and nobody else comes."""
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
            granted, workers = found
            try:
                # Without the lock: this runs callbacks, which may come back here.
                granted.set_result(workers)
            except InvalidStateError:  # it gave up since
                with self._lock:
                    for worker in workers:
                        self._pending[worker] -= 1

    def _next(self) -> tuple[Grant, list[Worker]] | None:
        """Take the first who can be let in out of its line."""
        with self._lock:
            kept: set[Worker] = set()
            for groups, line in self._heads():
                workers = self._choose(groups, kept)
                if workers is not None:
                    granted, _ = line.popitem(last=False)
                    return granted, workers
                kept.update(*groups)
        return None

    def _heads(self) -> Iterator[tuple[_Groups, _Line]]:
        """The lines, in the order in which their first came."""
        for groups in [groups for groups, line in self._lines.items() if not line]:
            del self._lines[groups]
        return iter(sorted(self._lines.items(), key=lambda item: next(iter(item[1].values()))))

    def _choose(self, groups: _Groups, kept: set[Worker]) -> list[Worker] | None:
        chosen: list[Worker] = []
        for group in groups:
            for worker in by_load(group):
                room = self._pending.get(worker, 0) < self._max_pending
                if room and worker not in kept and worker not in chosen:
                    chosen.append(worker)
                    break
            else:
                return None
        for worker in chosen:
            self._pending[worker] = self._pending.get(worker, 0) + 1
        return chosen
