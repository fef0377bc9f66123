"""Workers: what runs calls. Here, a thread that serves one slot of one device."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from .._base.devices import slot_stream, supported_accelerator
from .._base.operator_threads import CoreShares
from .._base.thread_state import CallerState, applied
from ..futures._future import Future, running_future
from ._call import Call
from ._observer import ExecutorObserver
from ._shared_queue import SharedQueue
from ._streams import HostLaunches, Launches
from ._worker_thread import PASS, WAKE, CallCounts, Item, Server, current_server


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What one worker has done and has before it.

    Attributes:
        device: Its device.
        queued: Calls that have not started.
        running: Started and not ended; calls that wait for others, or for their kernels, included.
        completed: Calls that returned.
        failed: Calls that raised.
        busy_seconds: How long it has run calls, altogether.
    """

    device: torch.device
    queued: int
    running: int
    completed: int
    failed: int
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class WorkerCapabilities:
    """What a kind of worker can do; asked before any work starts.

    Attributes:
        meetings: Calls on several workers can meet (`current_replica`).
        streams: Its results can be ordered on the device, without a wait for them.
        iterate: It can run a generator step by step.
        shared_parameters: Its calls see the caller's own modules and tensors, not copies.
    """

    meetings: bool
    streams: bool
    iterate: bool
    shared_parameters: bool


class Worker(Protocol):
    """What an executor knows of a worker. Only `WorkerPool` names a kind of worker."""

    capabilities: WorkerCapabilities

    device: torch.device
    index: int
    observer: ExecutorObserver | None
    ended: Future[None]
    """Done when it was stopped and its last call has ended."""

    @property
    def alive(self) -> bool:
        """Whether threads of it are there; for an instant they are when it has ended."""

    @property
    def load(self) -> float:
        """How many calls are queued and running; those that wait for others not counted."""

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        state: CallerState,
    ) -> Any:
        """Return `fn(*args, **kwargs)`, run under a caller's state.

        Every function of a user's task is run here: a call's, a batch's, a replica's module. It is
        called on this worker's thread, for one call at a time unless a call waits for others; it
        may block.
        """

    def expect_launches(self) -> None:
        """From now on calls may launch on accelerators, also where it has no stream of its own."""

    def put(self, call: Call[Any]) -> None:
        """Queue a call for this worker alone; never blocks."""

    def offer(self, call: Call[Any]) -> None:
        """Queue a call that the other workers of the device may run as well; never blocks."""

    def follow(self, call: Call[Any]) -> bool:
        """Run a call next, past the queue; whether that can be: others may wait already.

        Of the thread that serves this worker, by the call that is ending there.
        """

    def cancel_queued(self) -> None:
        """Cancel every call that has not started."""

    def when_through(self, then: Callable[[], None]) -> None:
        """Call `then()` when all that was queued before has run, also what waits for other calls.

        On a thread of this worker, or at once if there is none.
        """

    def stop(self) -> None:
        """End once the queue is empty; returns at once; more than once does nothing."""

    def join(self) -> None:
        """Wait until it has ended, unless called from itself."""

    def stats(self) -> WorkerStats:
        """A snapshot."""


class ThreadWorker:
    """One slot of one device, served by one thread at a time.

    The thread starts with the first call. A call that blocks hands the slot to a fresh thread,
    and its own thread ends after it: what is queued behind a waiting call is never stuck. That is
    why calls that wait for calls cannot deadlock, on any number of workers.
    """

    capabilities = WorkerCapabilities(
        meetings=True, streams=True, iterate=True, shared_parameters=True
    )

    def __init__(
        self,
        device: torch.device,
        index: int,
        name: str,
        shares: CoreShares,
        shared: SharedQueue,
    ) -> None:
        self.device = device
        self.index = index
        self.name = name
        self.observer: ExecutorObserver | None = None
        # A token for each call: appending and popping are atomic, and the length is the load.
        self.outstanding: deque[None] = deque()
        self.stream = slot_stream(device)
        self.launches: Launches | HostLaunches | None = None
        if self.stream is not None:
            self.launches = Launches(self.stream, self.outstanding, f"{name}-completions")
        elif supported_accelerator() is not None:
            self.expect_launches()
        self.shares = shares if self.stream is None else None
        self.queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.following: Call[Any] | None = None
        self.server: Server | None = None
        # May be taken again: a signal's handler, or a destructor, may hand in calls here too (and
        # must not wait for them, for the thread that it has interrupted may be starting this one).
        self._lock = threading.RLock()
        self._threads: list[Server] = []
        self._ending: list[Server] = []  # those that have only a few steps to go
        self._detached = 0
        self._past = CallCounts()
        self._stopping = False
        self._then: Callable[[], None] | None = None
        self._marked = False  # whether its thread has yet to come to a mark before `_then`
        # Under way: who gives up waiting for it does not cancel it for those who come later.
        self.ended: Future[None] = running_future()
        self.member = shared.join(self.outstanding, self.wake)
        self.owner = shared.owner
        self.member.queue.pass_on()  # last: its thread may start now

    @property
    def load(self) -> float:
        return len(self.outstanding) + self.member.load

    def expect_launches(self) -> None:
        if self.launches is None:
            self.launches = HostLaunches()

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        state: CallerState,
    ) -> Any:
        try:
            context = state.context()
            if state.torch_state is None:
                return context.run(fn, *args, **kwargs)
            with applied(state.torch_state):
                return context.run(fn, *args, **kwargs)
        finally:
            del fn, args, kwargs, state, context  # an error's traceback holds this frame

    def put(self, call: Call[Any]) -> None:
        self._tell(call)
        try:
            if self.server is None:
                self._count_in()
                self._start()  # first: if there can be no more threads, nothing was queued
            # Counted first: who cancels it takes it off the count as soon as it has a queue.
            self.outstanding.append(None)
            self._count_in()
            call.queue = self
            self.queue.put(call)
        except BaseException:
            # Perhaps nothing is queued, and nobody would take it off. If it runs after all, it is
            # back after its next pause.
            if self.shares is not None:
                self.shares.leave(self)
            raise

    def _count_in(self) -> None:
        """It shares the cores: now, for another may begin before, and is to leave some for it."""
        server = self.server
        if self.shares is not None and (server is None or not server.brief):
            self.shares.enter(self)

    def offer(self, call: Call[Any]) -> None:
        if self.stream is None:
            self.member.queue.put(call)
        else:
            call.movable = True
            self.put(call)

    def follow(self, call: Call[Any]) -> bool:
        server = self.server
        if (
            server is None
            or server is not current_server()
            or self.stream is not None  # what has ended may not be through there
            or server.call is not None  # within another call
            or self.following is not None
            or self.member.queue.calls
            or not self.queue.empty()
        ):
            return False
        self.outstanding.append(None)
        call.queue = self
        # The worker has it: should this thread block before it is back (an observer may), the next
        # one runs it.
        self.following = call
        self._tell(call)
        return True

    def _tell(self, call: Call[Any]) -> None:
        observer = self.observer  # read once: it may be removed meanwhile
        if observer is not None:
            call.observe(observer, self.device, worker=self.index)

    def wake(self) -> None:
        """There is a call in the queue that it shares."""
        if self.server is None:
            self._start()  # first, as in `put`
        self.queue.put(WAKE)

    def withdrawn(self) -> None:
        self.outstanding.pop()

    def cancel_queued(self) -> None:
        self.member.queue.cancel_queued()
        kept: list[Item] = []
        with suppress(queue.Empty):
            while True:
                item = self.queue.get_nowait()
                if isinstance(item, Call):
                    item.cancel()
                    item.withdraw()  # cancelled before it came into the queue, it still counts
                else:
                    kept.append(item)
        for item in kept:
            self.queue.put(item)

    def when_through(self, then: Callable[[], None]) -> None:
        with self._lock:
            self._then = then
            self._marked = self.server is not None
            if self._marked:
                self.queue.put(PASS)
        self._go_on_if_through()

    def passed(self) -> None:
        self._marked = False
        self._go_on_if_through()

    def _go_on_if_through(self) -> None:
        with self._lock:
            if self._marked or self._detached:
                return
            then, self._then = self._then, None
        if then is not None:
            then()

    def stop(self) -> None:
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self.queue.put(None)
            idle = not self._threads
        if idle:
            self._all_ended()

    @property
    def alive(self) -> bool:
        launches = self.launches is not None and self.launches.alive
        return launches or any(thread.is_alive() for thread in (*self._threads, *self._ending))

    def join(self) -> None:
        own = threading.current_thread()
        # First: until then a thread may hand over to another. And a call of another executor's that
        # waits here hands its own worker over.
        if not any(thread is own for thread in self._threads):
            self.ended.result()
        for thread in (*self._threads, *self._ending):
            if thread is not own:
                thread.join()

    def stats(self) -> WorkerStats:
        with self._lock:
            total = CallCounts()
            for tally in (self._past, *(server.tally for server in self._threads)):
                total.add(tally)
            launched = 0 if self.launches is None else self.launches.pending
            active = self.server is not None and self.server.call is not None
            outstanding = len(self.outstanding)
            running = min(outstanding, active + launched)
            detached = self._detached
        return WorkerStats(
            self.device,
            outstanding - running + self.member.queued,
            running + detached,
            total.completed,
            total.failed,
            total.busy_seconds,
        )

    def _start(self) -> None:
        with self._lock:
            if self.server is None:
                self._serve_on_new_thread(None)

    def _serve_on_new_thread(self, before: Server | None) -> bool:
        """Instead of `before`, with the lock held; if there can be no more threads, by that still.

        False: what interrupted this, a signal's handler, say, has started one, which serves.
        """
        server = Server(self)
        server.start()
        if self.server is not before:
            return False  # this one ends: it was never recorded as the one that serves
        # Only now: a call queued while this may fail tries to start one itself, behind the lock.
        self.server = server  # first: who interrupts what follows finds that one serves
        self._threads.append(server)
        return True

    def server_began(self, server: Server) -> bool:
        """Whether `server`, whose thread begins, serves; not if its start was interrupted."""
        with self._lock:  # until it was put down as the one that serves
            return self.server is server

    def hand_over(self, server: Server) -> None:
        """`server` is about to block: let a fresh thread serve, if that was not done before.

        Raises:
            RuntimeError: There can be no more threads. The call must not block then: what it is to
                wait for may be queued behind it, and would never run.
        """
        with self._lock:
            # First: it may fail, and `server` serves on.
            if self.server is server and self._serve_on_new_thread(server):
                self._detached += 1
                if server.call is not None:  # else it is in callbacks, after its call has ended
                    # It waits: whoever looks for a free worker may come here.
                    self.outstanding.pop()

    def server_ended(self, server: Server) -> None:
        """`server`'s thread ends."""
        with self._lock:
            self._threads.remove(server)
            self._ending = [*filter(Server.is_alive, self._ending), server]
            self._past.add(server.tally)
            if self.server is not server:
                self._detached -= 1
            elif not self._stopping:
                self.server = None  # an error ended it: whoever has a call starts another
                self._marked = False
                if self.shares is not None:
                    self.shares.leave(self)
            last = self._stopping and not self._threads
            stands_by = self.server is None and self.member.stand_by()
        if stands_by:
            self.member.queue.pass_on()  # for calls that wait already
        self._go_on_if_through()  # outside of the lock: it may stop this worker
        if last:
            self._all_ended()

    def _all_ended(self) -> None:
        if self.member.idle:  # nobody is to wake it any more
            self.member.busy()
        # Whoever put a call behind the last one takes it back (`WorkerPool.put`).
        if self.launches is not None:
            self.launches.stop(then=self._set_ended)
        else:
            self._set_ended()

    def _set_ended(self) -> None:
        with suppress(InvalidStateError):  # more than once does nothing
            self.ended.set_result(None)


class WorkerFactory(Protocol):
    """Makes a worker of one kind."""

    def __call__(
        self, device: torch.device, index: int, name: str, shares: CoreShares, shared: SharedQueue
    ) -> Worker:
        """A worker of `device`, the `index`-th of its pool."""


def check_capability(
    workers: Iterable[Worker],
    capability: Literal["meetings", "streams", "iterate", "shared_parameters"],
    what: str,
) -> None:
    """Raise `NotImplementedError` if one of `workers` lacks what `what` needs."""
    for worker in workers:
        if not getattr(worker.capabilities, capability):
            raise NotImplementedError(
                f"{what} needs the capability {capability!r}, which worker {worker.index} on "
                f"{worker.device} ({type(worker).__name__}) does not have"
            )


def by_load(workers: Iterable[Worker]) -> list[Worker]:
    """Workers with the fewest calls queued and running first."""
    return sorted(workers, key=lambda worker: worker.load)


def current_worker() -> Worker | None:
    """The worker whose thread this is."""
    server = current_server()
    # No `cast`, which is a call.
    return None if server is None else server.worker  # type: ignore[return-value]
