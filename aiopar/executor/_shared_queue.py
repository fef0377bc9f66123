"""A queue that several workers serve: the first worker that is free takes the next call."""

from collections import deque
from contextlib import suppress
from typing import Any, Protocol

import torch

from ._call import Call


class SharingWorker(Protocol):
    """A worker, as the queue sees it."""

    spare: bool
    """Whether it gets a call only if no other worker is idle."""

    def wake(self) -> None:
        """Make the worker's thread look into the queue.

        Raises:
            RuntimeError: It has no thread, and no more threads can be started.
        """


class SharedQueue:
    """The calls that any worker of one device may run, oldest first.

    Each worker also has a queue of its own, for calls that only it may run. Its thread sleeps on
    its own queue, and is woken there for a call of the shared queue. So a call for busy workers
    costs one append, and no call waits while a worker is idle.

    No call is lost. `put` appends the call, then looks for an idle worker. A worker registers as
    idle, then looks for a call (`take`) before it sleeps. The lock of the deque orders the append
    and that look, also without a GIL: either the worker finds the call, or `put` finds the worker.
    Likewise `leave`: either it removes the idle worker, or the worker finds that it has left.
    """

    def __init__(self, device: torch.device, owner: object = None) -> None:
        self.device = device
        self.owner = owner
        self.stream: torch.Stream | None = None
        self.calls: deque[Call[Any]] = deque()
        self.workers: list[SharingWorker] = []
        self._idle: deque[SharingWorker] = deque()

    def join(self, worker: SharingWorker) -> None:
        """Add a worker that has no thread yet. Call `wake_for_rest` when the worker is made."""
        self.workers.append(worker)
        self._idle.appendleft(worker)  # idle threads are woken before a new one is started

    def leave(self, worker: SharingWorker) -> None:
        """Remove a worker, which takes no more calls of this queue."""
        self.workers.remove(worker)
        with suppress(ValueError):  # it is busy, or is being woken: see `wake_for_rest`
            self._idle.remove(worker)

    def put(self, call: Call[Any]) -> None:
        """Queue a call; never blocks. If this raises, no worker was woken for the call."""
        call.queue = self
        self.calls.append(call)
        if self._idle:
            try:
                self._wake_one()
            except BaseException:
                with suppress(ValueError):  # a busy worker has taken it
                    self.calls.remove(call)
                raise

    def take(self, outstanding: deque[None]) -> Call[Any] | None:
        """Claim the oldest call and count it in `outstanding`; None if there is no call."""
        while True:
            try:
                call = self.calls.popleft()
            except IndexError:
                return None
            if call.claim():
                outstanding.append(None)
                return call

    def enter_idle(self, worker: SharingWorker) -> None:
        """Register `worker` as idle. Its thread must look for a call after this."""
        if worker.spare:
            self._idle.appendleft(worker)
        else:
            self._idle.append(worker)  # the last worker is woken first: its caches are warm

    def leave_idle(self, worker: SharingWorker) -> bool:
        """Unregister `worker`. False: it is being woken for a call of this queue."""
        try:
            self._idle.remove(worker)
        except ValueError:
            return False
        return True

    def _wake_one(self) -> None:
        try:
            worker = self._idle.pop()
        except IndexError:  # another call has woken it
            return
        try:
            worker.wake()
        except BaseException:  # no more threads can be started
            self._idle.append(worker)
            raise

    def wake_for_rest(self) -> None:
        """Wake a worker if calls wait: the worker that was woken for them may not take one."""
        if self.calls and self._idle:
            with suppress(RuntimeError):  # if no thread can be started, a busy worker takes them
                self._wake_one()

    @property
    def queued(self) -> int:
        """How many calls wait; calls that were withdrawn are still in the deque."""
        return sum(call.queue is not None for call in self.calls.copy())

    def withdrawn(self) -> None:
        """Nothing to do: `queued` does not count the call."""

    def cancel_queued(self) -> None:
        """Cancel every call that waits."""
        with suppress(IndexError):
            while True:
                self.calls.popleft().cancel()
