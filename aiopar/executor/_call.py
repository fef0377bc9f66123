"""A call on its way to a worker: the function, and the state of who called it."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import Any, Generic, Protocol, TypeVar

import torch

from .._base.devices import CallerStream
from .._base.thread_state import CallerState
from .._base.tracebacks import awaitable_error
from ..futures._future import Future
from ..futures._wakeup import Waker, complete
from ._observer import CallInfo, CallWatch, ExecutorObserver

T = TypeVar("T")

NO_KWARGS: Mapping[str, Any] = {}


class Queue(Protocol):
    """What a call knows of the queue that it waits in."""

    device: torch.device
    stream: torch.Stream | None
    owner: object
    """The executor whose workers alone run what waits here; None: those of any may help."""

    def withdrawn(self) -> None:
        """A call that is still in the queue counts there no more: it was claimed by another."""


class Call(Generic[T]):
    """A function, its arguments and its caller's state; claimed by one party, then run.

    The worker that takes it from its queue, a waiter that helps and a caller that cancels may all
    come at once: `claim` is True for one of them.
    """

    # What most calls neither set nor read is a class attribute: it costs nothing to create.
    streams: tuple[CallerStream, ...] | None = None
    """The callers' streams, where those of `state` are not all; read by workers that launch."""
    internal = False
    """Whether `fn` is aiopar's own code, which runs on the worker's thread under no state."""
    synchronize = True
    helpable = True
    """Whether a worker that waits for it may run it within the call that waits."""
    movable = False
    """Whether a sibling of the worker in whose own queue it is may run it as well."""
    queue: Queue | None = None
    """Where it waits; None before and after."""

    def __init__(
        self, fn: Callable[..., T], args: tuple[Any, ...], state: CallerState | None = None
    ) -> None:
        """Capture the state of the caller, here and now, unless `state` has it already."""
        self.fn = fn
        self.args = args
        # What every call reads on its way is set, though most never change it: CPython 3.11 takes
        # several times as long to find what only the class has. So is what it is given later: the
        # instances of a class share their table of names only as long as few have been made, and
        # from then on each that is given another one has a dict made for itself.
        self.kwargs: Mapping[str, Any] = NO_KWARGS
        self.watch: CallWatch | None = None
        self.on_claimed: Callable[[], object] | None = None
        self.error: BaseException | None = None
        self.result: T | None = None
        self.queue = None
        self.state = CallerState() if state is None else state

    def observe(
        self, observer: ExecutorObserver, device: torch.device, *, worker: int | None
    ) -> None:
        """Tell `observer` of what becomes of it, from here: it is being queued."""
        fn = self.fn  # read once: a gang's member may be cancelled, and let go of it, at any moment
        if fn is not None:
            self.watch = CallWatch(observer, CallInfo(fn, device, worker))

    def claim(self) -> bool:
        """Whether the call is yours to run (or to drop); True once."""
        raise NotImplementedError

    def blocks(self) -> None:
        """It runs, and is about to wait for other calls."""

    def finish(self) -> None:
        """`result` or `error` is set: tell who waits."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Drop the call if nobody has claimed it, and tell who waits."""
        raise NotImplementedError

    def end(self) -> None:
        """It has run, and its result is complete on the device."""
        # First: nothing of it is held when who awaits it looks. To delete them takes twice as long,
        # as CPython keeps attributes in the order in which they were set.
        self.fn = self.args = self.state = None  # type: ignore[assignment]  # not run again
        self.kwargs = NO_KWARGS
        if self.watch is not None:
            self.watch.completed(self.error)
        self.finish()

    def drop(self) -> None:
        """It was claimed to be cancelled."""
        self.withdraw()
        self.fn = self.args = self.state = None  # type: ignore[assignment]  # not run again
        self.kwargs = NO_KWARGS
        if self.watch is not None:
            self.watch.completed(CancelledError())

    def withdraw(self) -> None:
        """It was claimed by somebody else than the worker in whose queue it still is."""
        # Atomic: canceller and worker may meet here, and one of them takes it off the count.
        queue = self.__dict__.pop("queue", None)
        if queue is not None:
            queue.withdrawn()
        self.leave_queue()

    def leave_queue(self) -> None:
        """It was claimed, and counts as queued no more: there is room for another."""
        # Read once, as canceller and worker may meet here too; to call it twice does no harm.
        on_claimed, self.on_claimed = self.on_claimed, None
        if on_claimed is not None:
            on_claimed()


class FutureCall(Call[T]):
    """A call whose outcome goes to a `Future`."""

    # Said again: from what `finish` sets them to, type checkers infer other types for this class.
    error: BaseException | None
    result: T | None

    def __init__(
        self, fn: Callable[..., T], args: tuple[Any, ...], state: CallerState | None = None
    ) -> None:
        Call.__init__(self, fn, args, state)  # by name: `super` takes a tenth as long as all of it
        self.future: Future[T] = Future()
        # A cycle, until the call is claimed or cancelled: waiters find the call through it.
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


class TokenCall(Call[T]):
    """A call without a future: who gets its token has claimed it."""

    def __init__(
        self, fn: Callable[..., T], args: tuple[Any, ...], state: CallerState | None = None
    ) -> None:
        super().__init__(fn, args, state)
        # Exactly one gets it: `pop` is atomic, also without a GIL, and cheaper than a lock.
        self.token = [None]

    def claim(self) -> bool:
        try:
            self.token.pop()
        except IndexError:
            return False
        return True


class LoopCall(TokenCall[T]):
    """A call that one task of one asyncio loop awaits: the cheapest way there and back."""

    waker: Waker
    waiter: "asyncio.Future[T]"
    """Belongs to the waker's loop, and is touched on its thread only."""

    def __init__(self, fn: Callable[..., T], args: tuple[Any, ...]) -> None:
        # What `super().__init__` does, for the one case that there is.
        self.fn = fn
        self.args = args
        self.kwargs = NO_KWARGS
        self.watch = self.on_claimed = self.error = None
        self.result = self.queue = None
        self.waker = self.waiter = None  # type: ignore[assignment]  # set before it is queued
        self.delivered = False
        self.state = CallerState()
        self.token = [None]

    def end(self) -> None:
        # What `super().end` does, for the one case that there is.
        self.fn = self.args = self.state = None  # type: ignore[assignment]  # not run again
        if self.watch is not None:
            self.watch.completed(self.error)
        self.waker.post(self)

    def cancel(self) -> None:
        if self.claim():
            self.drop()
            self.error = CancelledError("cancelled before it started")
            self.waker.post(self)

    def as_future_call(self) -> FutureCall[T]:
        """The same call, to be awaited outside of asyncio after all."""
        call = FutureCall(self.fn, self.args, self.state)
        call.streams, call.synchronize = self.streams, self.synchronize
        return call

    def deliver(self) -> None:
        """On the loop's thread: resume the task that waits."""
        # Set also when nobody waits: a task cancelled between completion and wake-up looks here
        # to see that there is nothing more to wait for.
        self.delivered = True
        error = None if self.error is None else awaitable_error(self.error)
        complete(self.waiter, self.result, error)
        self.result = self.error = None
