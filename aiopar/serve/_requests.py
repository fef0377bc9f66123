"""What callers ask of a `Batcher`, on its way into the queue."""

from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from math import isfinite
from typing import Any, TypeAlias, TypeVar

from .._awaiter import awaiter_here
from .._checks import as_int, as_number, check_number
from .._devices import CallerStream, capture_streams
from .._errors import DeadlineExceeded
from .._wakeup import in_event_loop
from ._observer import ItemInfo
from ._request import Request
from ._scheduler import Scheduler
from ._settings import BatcherSettings
from ._timer import Cancel, call_later, within
from ._unqueued import Unqueued, refusal_of

R = TypeVar("R", bound=Request)
Streams: TypeAlias = tuple[CallerStream, ...]


class Requests:
    """Makes requests of items, and has them queued; on the threads of their callers' loops.

    All of a user's is called and checked here (keys, costs, priorities), before the queue's lock
    is taken.
    """

    def __init__(self, settings: BatcherSettings, scheduler: Scheduler) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self.capture: Callable[[], Streams] | None = capture_streams
        """As that of the pool where batches are made, once it is known: when the batcher opens."""

    def timeout(self, given: float | None) -> float | None:
        """That of a call, checked; None: the batcher's."""
        if given is None:
            return self._settings.timeout
        # Below 0 as well: that is what is left of a caller's own deadline which has passed.
        timeout = as_number("timeout", given)
        return 0.0 if timeout < 0 else check_number("timeout", timeout, zero=True)

    async def opened(
        self,
        open_batcher: Callable[[], Awaitable[object]],
        timeout: float | None,  # noqa: ASYNC109  # what is left of it goes on
    ) -> float | None:
        """Await that for a request; what is left of its timeout: a pool may be long to warm up."""
        request = Unqueued()
        try:
            if timeout is None or not in_event_loop():  # a pool opens in a loop only, and says so
                await open_batcher()
                return timeout
            left = await within(timeout, open_batcher)
            if left is None:
                raise DeadlineExceeded(f"the batcher was not open after {timeout:.3g} s")
            return left
        except BaseException as error:
            if (cause := refusal_of(error)) is not None:
                self._scheduler.reject(request, cause)
            self._ended(request, error)
            raise

    def _ended(self, request: ItemInfo, error: BaseException) -> None:
        """Tell observers of a request that does not come so far as to be queued."""
        observers = self._scheduler.observers
        if observers is not None:
            observers.enqueue(request)
            observers.completed(request, error)

    def streams(self) -> Streams:
        """On which the caller has launched its item: now, for a task of it may begin later."""
        return () if self.capture is None else self.capture()

    def make(self, kind: type[R], item: Any, priority: int, streams: Streams) -> R | None:
        """A request for `item` by the running task; None where no event loop runs."""
        settings = self._settings
        awaiter = awaiter_here()
        if awaiter is None:
            return None
        request = kind(item, awaiter)
        # The queue compares these under its lock: what cannot be compared must not come there.
        if priority != 0:
            request.priority = as_int("priority", priority)
        try:
            if settings.batch_key is not None:
                request.key = _checked_key(settings.batch_key(item))
            if settings.cost is not None:
                request.cost = _checked_cost(settings.cost(item))
        except BaseException as error:
            self._ended(request, error)
            raise
        if streams:
            request.streams = streams
        return request

    def put(self, request: Request, timeout: float | None) -> Cancel | None:
        """Queue it, unless it is refused; what is returned takes its deadline back."""
        if timeout is None:
            self._scheduler.put(request)
            return None
        request.deadline = request.arrived + timeout
        self._scheduler.put(request)
        return call_later(timeout, partial(self._expire, request))

    def _expire(self, request: Request) -> None:
        # First: whoever is told of it finds its place in the queue free.
        in_queue = self._scheduler.discard(request)
        request.expire(in_queue=in_queue)


def _checked_key(key: Hashable) -> Hashable:
    """`key`; TypeError unless it can be hashed."""
    try:
        hash(key)
    except TypeError:
        raise TypeError(
            f"batch_key must return what can be hashed, not {type(key).__name__}"
        ) from None
    return key


def _checked_cost(cost: float) -> float:
    """`cost`; TypeError or ValueError unless it is a finite number of at least 0."""
    try:
        finite = isfinite(cost)
    except TypeError:
        raise TypeError(f"cost must return a number, not {type(cost).__name__}") from None
    if not finite or cost < 0:
        raise ValueError(f"cost must be finite and at least 0, got {cost}")
    return float(cost)
