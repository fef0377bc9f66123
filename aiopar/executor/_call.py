"""A call on its way to a worker: a function, its arguments and its caller's state."""

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import Any, Generic, Protocol, TypeVar

import torch

from .._base.devices import CallerStream
from .._base.thread_state import CallerState
from ..futures._future import Future
from ..futures._wakeup import Awaiter
from ._observer import CallWatch

T = TypeVar("T")

NO_KWARGS: Mapping[str, Any] = {}


class Queue(Protocol):
    """The queue that holds a call, as the call sees it."""

    device: torch.device
    stream: torch.Stream | None
    owner: object
    """The executor whose workers run the calls of this queue; None: any worker may help."""

    def withdrawn(self) -> None:
        """Stop counting a call of this queue that was claimed from outside."""


class Call(Generic[T]):
    """A function to run on a worker, once, under its caller's state.

    A worker that takes the call from its queue, a waiter that runs the call itself, and a caller
    that cancels the call may come at the same time. `claim` is True for exactly one of them. A
    subclass says where the result goes (`finish`, `cancel`).
    """

    streams: tuple[CallerStream, ...] | None = None
    """The streams of all callers, if there are several callers; None: the streams of `state`."""
    synchronize = True
    """Whether the call ends only when its result is complete on its accelerator."""
    internal = False
    """Whether `fn` is aiopar's own code: it runs on the worker's thread, without `Worker.run`."""
    helpable = True
    """Whether a worker that waits for this call may run it inside the waiting call."""
    movable = False
    """Whether other workers of the device may run it, though it is in one worker's queue."""
    queue: Queue | None = None
    """The queue that holds the call; None before and after."""
    left = False
    """Whether its caller has left while it ran: nobody waits for the result."""
    on_left: Callable[[], object] | None = None
    """Called when the caller leaves, from any thread. Look at `left` after setting it."""

    def __init__(
        self, fn: Callable[..., T], args: tuple[Any, ...], state: CallerState | None = None
    ) -> None:
        """Make a call under `state`; None: the state of the calling code is captured here."""
        self.fn = fn
        self.args = args
        self.kwargs = NO_KWARGS
        self.state = CallerState() if state is None else state
        self.token = [None]
        self.watch: CallWatch | None = None
        self.on_claimed: Callable[[], object] | None = None
        """Called when the call leaves its queue: there is room for another."""
        self.error: BaseException | None = None
        self.result: T | None = None

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
        if self.left:
            return
        self.left = True
        on_left = self.on_left  # read once: the call may end meanwhile
        if on_left is not None:
            on_left()

    def end(self) -> None:
        """End a call that has run and whose result is complete on the device."""
        # First: when a caller sees the result, the call holds nothing any more.
        self.fn = self.args = self.kwargs = self.state = None  # type: ignore[assignment]
        if self.watch is not None:
            self.watch.completed(self.error)
        self.finish()

    def drop(self) -> None:
        """End a call that was claimed in order to cancel it."""
        self.withdraw()
        self.fn = self.args = self.kwargs = self.state = None  # type: ignore[assignment]  # ditto
        if self.watch is not None:
            self.watch.completed(CancelledError())

    def withdraw(self) -> None:
        """Take a call off the count of its queue; its claimer is no worker of that queue."""
        # Atomic: if a canceller and a worker come here at once, one of them corrects the count.
        # From then on others read the class's None.
        queue = self.__dict__.pop("queue", None)
        if queue is not None:
            queue.withdrawn()
        self.leave_queue()

    def leave_queue(self) -> None:
        """Make room for another call, because this one was claimed."""
        # Read once: a canceller and a worker may come here at once. Two calls do no harm.
        on_claimed, self.on_claimed = self.on_claimed, None
        if on_claimed is not None:
            on_claimed()


class FutureCall(Call[T]):
    """A call whose result goes to a `Future`."""

    # Declared again, because type checkers infer other types from the assignments in `finish`.
    error: BaseException | None
    result: T | None

    def __init__(
        self, fn: Callable[..., T], args: tuple[Any, ...], state: CallerState | None = None
    ) -> None:
        super().__init__(fn, args, state)
        self.future: Future[T] = Future()
        # A cycle until the call has ended: those who wait, or leave, find the call through it.
        self.future.call = self

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
    """The wait of that task; set before the call is queued, then on its loop's thread only."""
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
