"""`Call`, a function with arguments and a caller's state; `CallQueue`, the calls for a worker."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import torch

from .._base.devices import CallerStream
from .._base.thread_state import CallerState
from ..futures._future import Future
from ..futures._wakeup import Awaiter
from ._observer import CallWatch

T = TypeVar("T")

NO_KWARGS: Mapping[str, Any] = {}


class QueueWorker(Protocol):
    """A worker, as a queue sees it."""

    def wake(self) -> None:
        """Make the worker look into its queues; RuntimeError if it cannot start its thread."""


class CallQueue:
    """The calls that one worker, or each of several workers of a device, may run, oldest first.

    A worker has a queue of its own, and may share another one. A call for a busy worker costs one
    append, and no call waits while a worker that may run it is idle.

    No call is lost. `put` appends the call, then looks for an idle worker. A worker registers as
    idle, then looks for a call (`take`) before it sleeps. The lock of the deque orders the append
    and that look, also without a GIL: either the worker finds the call, or `put` finds the worker.
    A worker that unregisters without a call of this queue calls `wake_for_rest`.

    Args:
        device: The device of the workers.
        owner: The executor whose workers run the calls. None: any worker may help.
    """

    def __init__(self, device: torch.device, owner: object = None) -> None:
        self.device = device
        self.owner = owner
        self.stream: torch.Stream | None = None
        """The stream that the calls launch on; None: the default streams."""
        self.calls: deque[Call[Any]] = deque()
        self.workers: list[QueueWorker] = []
        self.idle: deque[QueueWorker] = deque()
        """The workers that a call wakes, the last one first."""

    def leave(self, worker: QueueWorker) -> None:
        """Remove a worker, which takes no more calls of this queue."""
        self.workers.remove(worker)
        self.leave_idle(worker)
        self.wake_for_rest()

    def leave_idle(self, worker: QueueWorker) -> None:
        """Unregister a worker, if it is registered as idle."""
        with suppress(ValueError):
            self.idle.remove(worker)

    def put(self, call: "Call[Any]") -> None:
        """Queue a call; never blocks. If `put` raises, no worker was woken for the call."""
        call.queue = self
        self.calls.append(call)
        if self.idle:
            try:
                self._wake_one()
            except BaseException:
                with suppress(ValueError):  # a busy worker may have taken the call
                    self.calls.remove(call)
                raise

    def take(self) -> "Call[Any] | None":
        """Claim the oldest call that nobody has claimed; None if there is no such call."""
        while True:
            try:
                call = self.calls.popleft()
            except IndexError:
                return None
            if call.claim():
                return call

    def _wake_one(self) -> None:
        try:
            worker = self.idle.pop()
        except IndexError:  # another call has woken the last idle worker
            return
        try:
            worker.wake()
        except BaseException:  # no more threads can be started
            self.idle.append(worker)
            raise

    def wake_for_rest(self) -> None:
        """Wake a worker if calls wait: the one that was woken for them perhaps takes none."""
        if self.calls and self.idle:
            with suppress(RuntimeError):  # if no thread can be started, a busy worker takes them
                self._wake_one()

    @property
    def queued(self) -> int:
        """How many calls wait; calls that were withdrawn are still in the deque."""
        try:
            return sum(call.queue is not None for call in self.calls.copy())
        except RuntimeError:  # without a GIL: another thread has changed the deque meanwhile
            return len(self.calls)

    def cancel_queued(self) -> None:
        """Cancel every call that waits."""
        with suppress(IndexError):
            while True:
                self.calls.popleft().cancel()


class Call(Generic[T]):
    """A function to run on a worker, once, under its caller's state.

    A worker that takes the call from its queue, a waiter that runs the call itself, and a caller
    that cancels the call may come at the same time. `claim` is True for exactly one of them. A
    subclass says where the result goes (`finish`, `cancel`).
    """

    kwargs = NO_KWARGS
    streams: tuple[CallerStream, ...] | None = None
    """The streams of the callers, if there are several; None: the streams of `state`."""
    synchronize = True
    """Whether the call ends only when its result is complete on its accelerator."""
    internal = False
    """Whether `fn` is aiopar's own code: it runs on the worker's thread, without `Worker.run`."""
    helpable = True
    """Whether a worker that waits for this call may run it inside the waiting call."""
    movable = False
    """Whether other workers of the device may run it, though it is in one worker's queue."""
    queue: CallQueue | None = None
    """The queue that holds the call; None before and after."""
    watch: CallWatch | None = None
    on_claimed: Callable[[], object] | None = None
    """Called when the call leaves its queue: there is room for another."""
    error: BaseException | None = None
    result: T | None = None
    left = False
    """Whether its caller has left while it ran: nobody waits for the result."""
    on_left: Callable[[], object] | None = None
    """Called when the caller leaves, from any thread. Its setter looks at `left` afterwards."""

    def __init__(
        self, fn: Callable[..., T], args: tuple[Any, ...], state: CallerState | None = None
    ) -> None:
        """Make a call under `state`; None: the state of the calling code is captured here."""
        self.fn = fn
        self.args = args
        self.state = CallerState() if state is None else state
        self.token = [None]

    def claim(self) -> bool:
        """Take the right to run or drop the call; True for one caller of this method."""
        try:
            self.token.pop()  # atomic, also without a GIL, and cheaper than a lock
        except IndexError:
            return False
        return True

    def blocks(self) -> None:
        """Note that the running call is about to wait for other calls."""

    def finish(self) -> None:
        """Pass `result` or `error` on; called once, from any thread."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Drop the call if nobody has claimed it, and tell its waiters."""
        raise NotImplementedError

    def leave(self) -> None:
        """Note that nobody waits for the running call any more."""
        if not self.left:
            self.left = True
            on_left = self.on_left  # read once: the call may end meanwhile
            if on_left is not None:
                on_left()

    def end(self) -> None:
        """End a call that has run and whose result is complete on the device."""
        # First: a caller that sees the result may expect its arguments to be freed.
        self.fn = self.args = self.kwargs = self.state = None  # type: ignore[assignment]
        if self.watch is not None:
            self.watch.tell("completed", self.error)
        self.finish()

    def drop(self) -> None:
        """End a call that was claimed in order to cancel it."""
        self.leave_queue()
        self.fn = self.args = self.kwargs = self.state = None  # type: ignore[assignment]  # ditto
        if self.watch is not None:
            self.watch.tell("completed", CancelledError())

    def leave_queue(self) -> None:
        """Take the claimed call out of its queue, and make room for another call there."""
        self.queue = None
        # Two threads may do this at once, which is harmless.
        on_claimed, self.on_claimed = self.on_claimed, None
        if on_claimed is not None:
            on_claimed()


class FutureCall(Call[T]):
    """A call whose result goes to a `Future`."""

    def __init__(
        self, fn: Callable[..., T], args: tuple[Any, ...], state: CallerState | None = None
    ) -> None:
        super().__init__(fn, args, state)
        self.future: Future[T] = Future()
        self.future.call = self  # a cycle until the call ends: waiters and cancellers need the call

    def claim(self) -> bool:
        return self.future.claim()

    def finish(self) -> None:
        if self.error is not None:
            self.future.set_exception(self.error)
            self.error = None
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]
        self.result = None

    def cancel(self) -> None:
        self.future.cancel()

    def drop(self) -> None:
        super().drop()
        self.future.call = None


class AwaitedCall(Call[T]):
    """A call that one task awaits, without a `Future`: faster than `FutureCall`."""

    awaiter: Awaiter
    """The wait of that task; set before the call is queued, later on the loop's thread only."""
    delivered = False
    """Whether the result has reached the loop's thread."""

    def finish(self) -> None:
        self.awaiter.waker.post(self.deliver)

    def deliver(self) -> None:
        """Resume the task; called on the loop's thread."""
        self.delivered = True
        self.awaiter.deliver()

    def cancel(self) -> None:
        if self.claim():
            self.drop()
            self.error = CancelledError("cancelled before it started")
            self.finish()
