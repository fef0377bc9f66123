"""The thread that serves a worker: takes calls from its queue and runs them."""

import enum
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Literal, Protocol, TypeAlias

from .._base.forking import after_fork_in_child
from .._base.operator_threads import CoreShares, operator_threads, set_operator_threads
from .._base.thread_state import CallerState, fresh, in_transform, is_fresh, undo_leaks
from .._base.tracebacks import logger, own_traceback
from ..futures._future import Future, thread_hooks
from ._call import Call, Queue
from ._shared_queue import Member, SharedQueue
from ._streams import HostLaunches, Launches

# Calls that a waiting call runs within itself nest on one stack; past this many, the waiting
# thread steps aside for a fresh one instead.
_MAX_HELPING_DEPTH = 24

BRIEF = 50e-6
"""Seconds that a call may take and gain nothing by more cores."""


class _Token(enum.Enum):
    WAKE = enum.auto()
    PASS = enum.auto()


WAKE: Final = _Token.WAKE
PASS: Final = _Token.PASS
Item: TypeAlias = Call[Any] | Literal[_Token.WAKE, _Token.PASS] | None
"""What is in a worker's own queue: a call; a word of one in the shared queue (WAKE); a mark that
comes after all that is older (PASS); None, for the end."""


class Slot(Queue, Protocol):
    """What the thread that serves it knows of a worker."""

    name: str
    index: int
    shares: CoreShares | None
    launches: Launches | HostLaunches | None
    """What its calls launch on accelerators; None where there are none."""
    queue: "queue.SimpleQueue[Item]"
    """The calls that are for it alone."""
    member: Member
    """Its part in the queue that it serves with others."""
    outstanding: deque[None]
    following: Call[Any] | None
    """The next call, before all that are queued; already counted by `outstanding`."""
    server: "Server | None"
    """The one thread that takes the next call."""

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        state: CallerState,
    ) -> Any:
        """As `Worker.run`."""

    def passed(self) -> None:
        """Its thread has come past a mark."""

    def hand_over(self, server: "Server") -> None:
        """`server` is about to block: let a fresh thread serve, if that was not done before."""

    def server_began(self, server: "Server") -> bool:
        """Whether `server`, whose thread begins, serves; not if its start was interrupted."""

    def server_ended(self, server: "Server") -> None:
        """`server`'s thread ends."""


@dataclass(slots=True)
class CallCounts:
    """What was done; each is written by one thread only, so that no count is ever lost."""

    completed: int = 0
    failed: int = 0
    busy_seconds: float = 0.0

    def add(self, other: "CallCounts") -> None:
        self.completed += other.completed
        self.failed += other.failed
        self.busy_seconds += other.busy_seconds


class Server(threading.Thread):
    """Serves a worker until it is stopped, or has handed the worker over to another thread."""

    def __init__(self, worker: Slot) -> None:
        # Daemon, so that the interpreter's exit reaches the handler that stops and joins it; a
        # thread that is not would be waited for before that, for ever.
        super().__init__(name=worker.name, daemon=True)
        self.worker = worker
        self.tally = CallCounts()
        self.call: Call[Any] | None = None
        """The one it runs, not those within; None once it has ended and counts no more."""
        self._pace = 1e-3  # seconds that a call takes, on the average of late
        self.brief = False
        """Whether its calls have been brief of late: too short to gain by more cores."""
        self._depth = 0
        self._helped: Call[Any] | None = None
        """The innermost of those within; None once it has ended."""
        self._sharing = 0  # among how many workers the cores were, when it took its share
        self._granted = 0
        self._paused = True
        self._began = 0.0

    def run(self) -> None:
        if not self.worker.server_began(self):
            return
        _current.server = self
        thread_hooks.help = self.help
        thread_hooks.about_to_block = self.about_to_block
        if self.worker.shares is not None:
            self._granted = operator_threads()
        try:
            self._serve()
        finally:
            self.worker.server_ended(self)

    def _serve(self) -> None:
        # No `while self.worker.server is self`: a thread calls this once, and CPython 3.11
        # specializes code at its eighth call, or as many jumps back that have no condition.
        while True:
            if self.worker.server is not self:
                return
            call = None if self.worker.following is None else self._following()
            if call is None:
                call = self._next()
                if call is None:
                    return
            if self.worker.member.idle:
                self.worker.member.busy()
            if self._paused:
                self._go_on()
            call.queue = None
            self.call = call
            if call.on_claimed is not None:
                call.leave_queue()
            self._run_claimed(call)
            # Function, arguments and result must not live on in an idle worker.
            del call

    def _following(self) -> Call[Any] | None:
        """The call that goes before all that are queued, claimed; None: there is none."""
        call, self.worker.following = self.worker.following, None
        if call is None or call.claim():
            return call
        call.withdraw()  # cancelled before it came here, it still counts
        return None

    def _next(self) -> Call[Any] | None:
        """The next call, claimed; None: the worker was stopped, and there is none left."""
        own, member = self.worker.queue, self.worker.member
        while True:
            # What is for this worker alone goes first: no other can run it.
            if own.empty():
                call = member.queue.take(self.worker.outstanding)
                if call is not None:
                    break
                if member.stand_by():
                    continue  # one may have come before
                self._pause()
            item = own.get()
            if item is WAKE:
                member.woken()
            elif item is None or item is PASS:
                call = self._before(item)
                if call is not None or item is None:
                    break
            elif item.claim():
                call = item
                member.queue.pass_on()  # woken for another, it has found this one behind the token
                break
            else:
                item.withdraw()  # cancelled before it came into the queue, it still counts here
            del item
        return call

    def _before(self, mark: Item) -> Call[Any] | None:
        """A call that goes before `mark`: one in the shared queue may be as old."""
        call = self.worker.member.queue.take(self.worker.outstanding)
        if call is not None:
            self.worker.queue.put(mark)  # to be read again
        elif mark is PASS:
            self.worker.passed()
        else:
            self._pause()
        return call

    # From call to call without a pause it keeps its cores, and need not look at the clock: each
    # call begins where the last one ended.

    def _pause(self) -> None:
        self._paused = True
        if self.worker.shares is not None:
            self.worker.shares.leave(self.worker)
            if self.worker.outstanding:  # a call was put there meanwhile, and it counted in
                self.worker.shares.enter(self.worker)

    def _go_on(self) -> None:
        if self.worker.shares is not None:
            self.worker.shares.enter(self.worker)
        self._paused = False
        self._began = perf_counter()

    def _run_claimed(self, call: Call[Any]) -> None:
        worker = self.worker
        try:
            if worker.shares is not None:
                sharing = len(worker.shares.running)
                # Of calls that were handed in together, the first leaves cores for the others.
                ahead = not self.brief and worker.member.queue.calls
                sharing = worker.member.sharing(sharing) if ahead else sharing
                if sharing != self._sharing:
                    self._take_share(worker.shares, sharing)
            if worker.launches is not None:
                worker.launches.begin(call)
            if call.watch is not None:
                call.watch.start(worker.index)
            if call.internal:
                call.result = call.fn(*call.args)
            else:
                call.result = worker.run(call.fn, call.args, call.kwargs, call.state)
            self.tally.completed += 1
        except BaseException as error:  # noqa: BLE001  # whatever it is, the awaiter gets it
            call.error = own_traceback(error)
            self.tally.failed += 1
        if not is_fresh():
            undo_leaks()
        if not self._depth:
            now = perf_counter()
            seconds = now - self._began
            self._began = now
            self.tally.busy_seconds += seconds
            self._pace = pace = 0.75 * self._pace + 0.25 * seconds
            self.brief = pace < BRIEF
        self._finish(call)
        # An error's traceback holds the frames below the function's too, which must not hold the
        # future that holds the error. Likewise in `help`.
        del call

    def _take_share(self, shares: CoreShares, sharing: int) -> None:
        """Other workers have begun or ended since the last call: use what cores that leaves."""
        self._sharing = sharing
        share = shares.share(sharing)
        if share != self._granted:
            set_operator_threads(share)
            self._granted = share

    def _finish(self, call: Call[Any]) -> None:
        worker = self.worker
        if call.watch is not None:
            call.watch.launched()
        ends_later = worker.launches is not None and _launched(call, worker.launches)
        if not self._depth:
            if worker.launches is not None:
                self._began = perf_counter()  # it may have waited for the device
            # Before who awaits it can look: then this worker is free. One that has handed its slot
            # over does not count there any more.
            if worker.server is self:
                worker.outstanding.pop()
                if not worker.member.queue.calls and worker.queue.empty():
                    worker.member.stand_by()
            self.call = None
        else:
            self._helped = None
        if not ends_later:
            try:
                call.end()
            except BaseException:  # noqa: BLE001  # its future was completed by another, say
                logger.exception("a call could not be ended in %s", worker.name)

    def help(self, future: Future[Any]) -> None:
        """Run the call behind `future` here, if nobody has started it."""
        call = future.call
        if not isinstance(call, Call) or not call.helpable or self._depth >= _MAX_HELPING_DEPTH:
            return
        place = call.queue  # read once: a worker may take the call at any moment
        if place is None or not self._may_run(call, place) or in_transform() or not call.claim():
            return
        call.withdraw()
        self._depth += 1
        outer, self._helped = self._helped, call
        try:
            with fresh():
                self._run_claimed(call)
        finally:
            self._depth -= 1
            self._helped = outer
            del call, future, outer

    def _may_run(self, call: Call[Any], place: Queue) -> bool:
        """Whether a call of those that wait in `place` may be run here."""
        worker = self.worker
        if place is worker or place is worker.member.queue:
            return True
        # On another device it would launch on this worker's stream.
        if place.device != worker.device or place.owner not in (None, worker.owner):
            return False
        return call.movable or isinstance(place, SharedQueue)

    @property
    def innermost(self) -> Call[Any] | None:
        """The call whose function this thread is in; None in what is called back after one."""
        return self._helped if self._depth else self.call

    def about_to_block(self) -> None:
        """The calling call is about to block: the queue must not wait for it."""
        if self.call is not None:
            self.call.blocks()
        self.worker.hand_over(self)


def _launched(call: Call[Any], launches: Launches | HostLaunches) -> bool:
    """Whether `launches` ends the call when its kernels have run; else it is to be ended."""
    try:
        return launches.put(call)
    except BaseException as error:  # noqa: BLE001  # the device's, say: the awaiter gets it
        call.error = own_traceback(error) if call.error is None else call.error
        return False
    finally:
        del call  # an error's traceback may hold this frame


def launches_here() -> Launches | HostLaunches | None:
    """Those of the worker whose thread this is; None where there are no accelerators."""
    server = current_server()
    return None if server is None else server.worker.launches


class _Current(threading.local):
    server: Server | None = None


_current = _Current()


def current_server() -> Server | None:
    """The server whose thread this is."""
    return _current.server


@after_fork_in_child
def _forget_after_fork() -> None:
    # Forked inside of a call, the child's only thread is no worker: it must not run calls itself.
    _current.server = None
    thread_hooks.clear()
