"""A queue that several workers serve: the first of them that is free takes the next call."""

import heapq
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ._call import Call
from ._observer import ExecutorObserver


class SharedQueue:
    """The calls that any worker of one device may run, oldest first.

    A worker sleeps on a queue of its own, where the calls come that are for it alone; there it is
    woken for a call from here too. So to hand in a call to busy workers is no more than an append,
    and no call waits while a worker is idle.

    No call is forgotten: who hands one in appends it, then looks for an idle worker; a worker
    registers as idle, then looks for a call (`take`) before it sleeps. The deque's own lock puts
    that append and that look in an order, also without a GIL: either the worker finds the call, or
    it is found.
    """

    __slots__ = (
        "_idle",
        "_members",
        "calls",
        "device",
        "observer",
        "only_worker",
        "owner",
        "stream",
    )

    def __init__(self, device: torch.device, owner: object = None) -> None:
        self.device = device
        self.owner = owner
        self.stream: torch.Stream | None = None
        self.observer: ExecutorObserver | None = None
        self.only_worker: int | None = None
        """The index of the one worker that serves it, if there will never be another."""
        self.calls: deque[Call[Any]] = deque()
        # The last to come is the first to go: its thread has started, and its caches are warm.
        self._idle: deque[Member] = deque()
        self._members: list[Member] = []

    def join(self, outstanding: deque[None], wake: Callable[[], None]) -> "Member":
        """A worker, whose own calls are counted by `outstanding`, serves this queue from now on.

        `wake` has it look here; for what waits here already, call `pass_on` when it is made.
        """
        member = Member(self, outstanding, wake)
        self._members.append(member)
        self._idle.appendleft(member)
        return member

    def put(self, call: Call[Any]) -> None:
        """Hand in a call; never blocks. If it raises, nobody was woken for the call."""
        if self.observer is not None:
            call.observe(self.observer, self.device, worker=self.only_worker)
        call.queue = self
        self.calls.append(call)
        if self._idle:
            self._wake_one()

    def take(self, outstanding: deque[None]) -> Call[Any] | None:
        """The oldest call, claimed and put on the count `outstanding`; None if there is none."""
        while True:
            try:
                call = self.calls.popleft()
            except IndexError:
                return None
            if call.claim():
                outstanding.append(None)
                return call

    def _wake_one(self) -> None:
        try:
            member = self._idle.pop()
        except IndexError:  # another call has woken it
            return
        try:
            member.wake()
        except BaseException:  # there can be no more threads: it sleeps on, for the next call
            self._idle.append(member)
            raise

    def pass_on(self) -> None:
        """Wake a worker for the calls that are there: who was woken may not take one."""
        if self.calls and self._idle:
            # There can be no more threads: a busy worker takes them later.
            with suppress(RuntimeError):
                self._wake_one()

    def withdrawn(self) -> None:
        """Nothing to count: `queued` leaves out what was withdrawn."""

    def cancel_queued(self) -> None:
        """Cancel every call that has not started."""
        with suppress(IndexError):
            while True:
                self.calls.popleft().cancel()


class Member:
    """One worker's part in a shared queue; used by the one thread that takes its next call."""

    __slots__ = ("_late", "_outstanding", "idle", "queue", "wake")

    def __init__(
        self, queue: SharedQueue, outstanding: deque[None], wake: Callable[[], None]
    ) -> None:
        self.queue = queue
        self.wake = wake
        self._outstanding = outstanding
        self.idle = True
        """Whether it may be woken."""
        self._late = 0  # how often it was woken when it had something to do already

    def stand_by(self) -> bool:
        """It has nothing to do and is to be woken for a call; False: that held already."""
        if self.idle:
            return False
        self.idle = True
        self.queue._idle.append(self)
        return True

    def woken(self) -> None:
        """`wake` was called, and this is what came of it."""
        if self._late:
            self._late -= 1
        else:
            self.idle = False

    def busy(self) -> None:
        """It has something to do, and was idle: whoever has a call is to wake another."""
        self.idle = False
        try:
            self.queue._idle.remove(self)
        except ValueError:
            # Woken just now, for a call that it may not have come for.
            self._late += 1
            self.queue.pass_on()

    @property
    def load(self) -> float:
        """How many calls wait, for each worker."""
        return len(self.queue.calls) / len(self.queue._members)

    def sharing(self, running: int) -> int:
        """How many workers run, or are about to, for the calls that wait; `running` do already."""
        return min(running + len(self.queue.calls), max(running, len(self.queue._members)))

    @property
    def queued(self) -> int:
        """How many of the calls that wait count for this worker: the next for the least loaded."""
        members = self.queue._members
        waiting = sum(call.queue is not None for call in self.queue.calls.copy())
        loads = [(len(member._outstanding), rank) for rank, member in enumerate(members)]
        count = 0
        heapq.heapify(loads)
        for _ in range(waiting):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + 1, rank))
            count += members[rank] is self
        return count
