"""`Batcher`: single items in, batches through a function or a pool of replicas."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from math import isfinite
from time import monotonic
from typing import Any, Self, TypeAlias, TypeVar
from weakref import WeakMethod

import anyio
import torch

from .._base.arguments import (
    as_int,
    as_number,
    check_int,
    check_number,
    returns_coroutine,
    short_repr,
)
from .._base.collate import collate
from .._base.devices import CallerStream, capture_streams
from .._base.thread_state import CallerState, check_no_transform
from ..errors import DeadlineExceeded, ReplicaUnavailable, ServiceClosed
from ..executor._current import executor_near, get_executor
from ..executor._executor import DeviceExecutor
from ..executor._loop_tasks import Cancel, call_later, within
from ..futures._future import thread_hooks
from ..futures._wakeup import awaiter_here, delivered, in_event_loop
from ._observer import BatchObserver, ItemInfo
from ._replica_pool import ReplicaPool
from ._request import Request
from ._runner import (
    AsyncBatching,
    AsyncRunner,
    ComputeFunction,
    ComputeGenerator,
    ComputeReplica,
    Runner,
    WorkerRunner,
)
from ._scheduler import LoopScheduler, Scheduler
from ._settings import BatcherSettings, Kind, condition, kind_of, name_for
from ._stats import BatcherStats, Rejection
from ._streaming import AsyncStreamRunner, OutputStream, StreamEntry, StreamRequest, StreamRunner


def run_in_own_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What `coroutine` comes to, on an event loop made for it; blocks."""
    # With a factory, so that the thread keeps the loop that is set for it, if any.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        outcome, error = runner.run(_outcome(coroutine))
    if error is None:
        return outcome
    try:
        raise error
    finally:
        # Its traceback holds this frame.
        del error, coroutine


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, Exception | None]:
    # Returned: raised in there, its traceback would hold frames of the runner, which hold the task
    # that holds the error.
    try:
        return await coroutine, None
    except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets it
        return None, error
    finally:
        del coroutine


@dataclass(slots=True, eq=False)
class Unqueued:
    """One that waits for its batcher to open; for observers, to whom this is an `ItemInfo`."""

    key: Hashable = None
    priority: int = 0
    cost: float = 1.0
    arrived: float = field(default_factory=monotonic)
    rejected: str | None = None


def refusal_of(error: BaseException) -> Rejection | None:
    """As what a request counts that was not taken, for this: as in the queue, had there been one.

    None: it was not refused, but something failed, or took too long.
    """
    if isinstance(error, ServiceClosed):
        return "closed"
    return "unavailable" if isinstance(error, ReplicaUnavailable) else None


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


def scheduler_for(kind: Kind, settings: BatcherSettings) -> Scheduler:
    """That which starts runners where those for this kind run."""
    return LoopScheduler(settings) if kind.on_loop else Scheduler(settings)


def runners_of(
    fn_or_pool: Callable[[Any], Any] | ReplicaPool,
    kind: Kind,
    settings: BatcherSettings,
    scheduler: Scheduler,
    caller: CallerState,
) -> list[Runner]:
    """Those of a pool, which is open; or, of a function, as many as `concurrency` says."""
    if isinstance(fn_or_pool, ReplicaPool):
        return _runners_of_pool(fn_or_pool, settings, scheduler, caller)
    fn = fn_or_pool
    executor, count = _executor_for(fn), settings.concurrency or 1
    if not kind.on_loop:
        # A worker for each, where it may grow: they may wait for something else than a core.
        executor._dispatcher.ensure(count)

    def runner() -> Runner:
        if isinstance(scheduler, LoopScheduler):
            make = AsyncStreamRunner if kind.streams else AsyncRunner
            return make(scheduler, fn, AsyncBatching(settings, executor), caller)
        if kind.streams:
            compute = ComputeGenerator(fn, settings, caller)
            return StreamRunner(scheduler, executor, compute, caller)
        return WorkerRunner(scheduler, executor, ComputeFunction(fn, settings), caller)

    return [runner() for _ in range(count)]


def _runners_of_pool(
    pool: ReplicaPool, settings: BatcherSettings, scheduler: Scheduler, caller: CallerState
) -> list[Runner]:
    """One a replica, or as many as `concurrency` says, on one after the other; told of changes."""
    replicas = islice(cycle(pool._replicas), settings.concurrency or len(pool._replicas))
    runners: list[Runner] = [
        WorkerRunner(
            scheduler,
            replica.executor,
            ComputeReplica(replica, settings),
            caller,
            replica,
            pool._failed,
        )
        for replica in replicas
    ]
    listener = WeakMethod(scheduler.runners_changed)
    pool._listeners.add(listener)
    scheduler.drained.add_done_callback(lambda _: pool._listeners.discard(listener))
    return runners


def _executor_for(fn: Callable[[Any], Any]) -> DeviceExecutor:
    if isinstance(fn, torch.nn.Module):
        weight = next(fn.parameters(), None)
        if weight is not None:
            return executor_near(weight.device)
    return get_executor()


_CLOSED = "the batcher was closed before there was a result"


class Batcher:
    """Runs single items in batches: `y = await batcher(item)`, from any number of tasks.

    Items that wait together go together, as soon as there is a free replica (or worker): a lone
    item at once, and the busier it gets, the larger the batches. Each caller gets its own output
    or its own error, whatever becomes of the others:

    - A batch that raises an `Exception` is split in halves until the bad item stands alone; only
      its caller gets the error, with a note. So what is called must be repeatable: an item may be
      run up to 1 + log2(n) times. When four single items have failed with one type of error, not
      `InvalidInput`, and nothing has succeeded, it is not split further: the function is broken.
    - `torch.OutOfMemoryError`: the batch is halved and tried again, and later batches of that key
      keep to the size that fitted; it grows back slowly.
    - A caller that is cancelled, or whose `timeout` passes, leaves the queue; in a batch that runs,
      only its own output is thrown away. A batch awaited on the loop is cancelled with its last.
    - A full queue refuses at once (`Overloaded`).

    Args:
        fn_or_pool: What is called with a batch and comes to the outputs for it, under the state of
            who made the batcher. A plain function (or module) runs on the workers of the executor
            that is current when the batcher is first used; a coroutine function or a
            `DataParallel`, which splits a batch over all its devices, is awaited on the event loop,
            with batches made on those workers. A `ReplicaPool` gives each batch to one of its
            replicas. A generator function, also an async one, yields step by step, for `stream`.
        max_batch_size: The most items of a batch.
        max_queue_delay: Seconds that an item may wait for a batch to fill, even while a worker is
            free. Never longer than half of its `timeout`, nor so long that less than two batch
            times are left before its deadline. 0: none.
        max_pending: The most items that may wait.
        max_wait: The longest wait, in seconds, that a new item may have before it, as estimated
            from the latest batches. None: as long as the queue is.
        concurrency: How many batches run at once. None: one, or, of a pool, one a replica. For that
            the process's own executor grows; one that you have made runs as many as it has workers.
        collate_fn: From a list of items to a batch, run on the worker. The default stacks nested
            tensors on a new dimension 0; `aiopar.serve.pad_collate` pads; `list` leaves a list.
        unbatch_fn: From outputs to a sequence of one for each item, run on the worker. None: as
            `aiopar.serve.unbatch` does it, nested tensors unbound on dimension 0, as views.
        batch_key: Of an item; only items with equal keys go together (a shape, an adapter, ...).
        cost: Of an item (its tokens, its bytes); items near in cost go together.
        max_batch_cost: The most that the items of a batch may cost in sum; an item that costs more
            is refused with `InvalidInput`.
        padded: Whether each item of a batch counts as much as the dearest of them, because
            `collate_fn` pads the others to it: `max_batch_cost` then bounds what is computed.
        timeout: Seconds after which a caller gets `DeadlineExceeded`, unless it gives its own.
        name: What it is called in metrics and traces. None: as the function, the class of the
            module, or the pool.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: A bound is below 1, a duration below 0, ...

    Example:
        >>> import asyncio, aiopar, torch
        >>> async def main():
        ...     async with aiopar.Batcher(lambda batch: batch.sum(1)) as batcher:  # (n, 3) -> (n,)
        ...         items = [torch.ones(3), torch.arange(3.0)]
        ...         return await asyncio.gather(*[batcher(item) for item in items])
        >>> asyncio.run(main())
        [tensor(3.), tensor(3.)]
    """

    name: str
    pool: ReplicaPool | None
    """That which it gives its batches to, if it has one."""
    _opened = False
    _executors: Sequence[DeviceExecutor] = ()
    """Those that it runs on; for metrics."""

    def __init__(
        self,
        fn_or_pool: Callable[[Any], Any] | ReplicaPool,
        *,
        max_batch_size: int = 32,
        max_queue_delay: float = 0.0,
        max_pending: int = 1024,
        max_wait: float | None = None,
        concurrency: int | None = None,
        collate_fn: Callable[[list[Any]], Any] = collate,
        unbatch_fn: Callable[[Any], Sequence[Any]] | None = None,
        batch_key: Callable[[Any], Hashable] | None = None,
        cost: Callable[[Any], float] | None = None,
        max_batch_cost: float | None = None,
        padded: bool = False,
        timeout: float | None = None,
        name: str | None = None,
    ) -> None:
        self._fn = fn_or_pool
        pool = self.pool = fn_or_pool if isinstance(fn_or_pool, ReplicaPool) else None
        self._kind = Kind.FUNCTION if pool is not None else kind_of(fn_or_pool)
        self._streams = self._kind.streams
        self.name = pool.name if pool is not None and name is None else name_for(fn_or_pool, name)
        self._settings = BatcherSettings(
            max_batch_size=max_batch_size,
            max_queue_delay=max_queue_delay,
            max_pending=max_pending,
            max_wait=max_wait,
            concurrency=concurrency,
            collate_fn=collate_fn,
            unbatch_fn=unbatch_fn,
            batch_key=batch_key,
            cost=cost,
            max_batch_cost=max_batch_cost,
            padded=padded,
            timeout=timeout,
        )
        self._caller = CallerState()
        self._scheduler = scheduler_for(self._kind, self._settings)
        self._requests = Requests(self._settings, self._scheduler)
        self._opening = threading.Lock()

    @short_repr
    def __repr__(self) -> str:
        state = condition(self._scheduler.closing, self._opened, self.ready)
        return f"{self.name!r}, {len(self._scheduler._queue)} waiting, {state}"

    @returns_coroutine
    def __call__(
        self, item: Any, *, timeout: float | None = None, priority: int = 0
    ) -> Coroutine[Any, Any, Any]:
        """The output for `item`, which goes with others in a batch.

        A function that runs on a worker gets it by `aiopar.wait(batcher(item))`.

        Args:
            item: What `collate_fn` takes a list of.
            timeout: Seconds until `DeadlineExceeded`, which 0 or less is at once; None: that of the
                batcher.
            priority: Lower goes first, as in `queue.PriorityQueue`; equal ones in the order of
                their arrival. Nobody starves: when 32 batches have passed over an item, the next
                is made for it.

        Raises:
            Overloaded: The queue is full, or the wait would be longer than `max_wait`.
            DeadlineExceeded: There was no output in time; if it was still in the queue, it is never
                computed.
            InvalidInput: The item costs more than a batch may.
            OutputMismatch: The function returned another number of outputs than of items.
            ReplicaUnavailable: No replica of the pool is in service.
            ServiceClosed: The batcher is closed, or about to be.
            TypeError: The function is a generator function (at once), or an argument is of a wrong
                type.
            RuntimeError: It is called from within a transform of `torch.func`, at once.
        """
        if self._streams:
            raise TypeError(
                f"{self.name!r} is {self._kind.value}: use `async for part in batcher.stream(item)`"
            )
        check_no_transform()
        return self._call(item, timeout, priority, self._requests.streams())

    async def _call(
        self,
        item: Any,
        timeout: float | None,  # noqa: ASYNC109  # a deadline, in the queue too
        priority: int,
        streams: Streams,
    ) -> Any:
        timeout = self._requests.timeout(timeout)
        if not self._opened:
            timeout = await self._requests.opened(self._open, timeout)
        request = self._requests.make(Request, item, priority, streams)
        if request is None:
            # Driven by `aiopar.wait`, in a worker or in a program without a loop.
            return run_in_own_loop(self._call(item, timeout, priority, streams))
        expiry: Cancel | None = None
        observers = self._scheduler.observers
        if observers is not None:
            observers.enqueue(request)
        try:
            # First, as it may fail: a call may run this loop, and hold the worker that is needed.
            thread_hooks.about_to_block()
            expiry = self._requests.put(request, timeout)
            await request.awaiter
            output = request.outcome()
        except BaseException as error:
            if not request.done:
                request.abandon()
                self._scheduler.discard(request)
            if observers is not None:
                observers.completed(request, error)
            raise
        else:
            if observers is not None:
                observers.completed(request, None)
            return output
        finally:
            if expiry is not None:
                expiry()
            # An error's traceback holds this frame, which must not hold what holds the error.
            del request, expiry

    def stream(
        self, item: Any, *, timeout: float | None = None, priority: int = 0, buffer: int = 16
    ) -> OutputStream:
        """The output for `item`, part by part: `async for part in batcher.stream(item)`.

        For a generator function, or an async one, which gets a batch and yields, step by step,
        outputs for all of it. Items wait, go together, expire and are refused as by
        `await batcher(item)`; the batch then goes on until its generator ends, or until nobody
        reads any more, and counts as running (`concurrency`) until then. Each step of a generator
        is a call of its own on one worker, which is free between steps.

        The next step is made while everybody who reads has room for another part: a slow consumer
        slows its batch, and parts never pile up. Who stops (leaves `async with`, breaks, is
        cancelled, comes to the deadline) slows it no more; when none is left the generator is
        closed. A batch that fails before its first part is split, as any other; after that its
        error is raised to all of them, behind the parts that they have not read.

        Args:
            item: What `collate_fn` takes a list of.
            timeout: Seconds until `DeadlineExceeded`, for all of the output; None: that of the
                batcher.
            priority: As for `await batcher(item)`.
            buffer: The most parts that may wait to be read.

        Returns:
            An async iterator, to be read in one event loop; `async with` queues the item on
            entering, and leaves the batch on leaving. It raises as `await batcher(item)` does.

        Raises:
            TypeError: The function is none of these; or an argument is of a wrong type.
            ValueError: `buffer` is below 1.

        Example:
            >>> import asyncio, aiopar, torch
            >>> def count_down(batch):  # (n,)
            ...     while (batch > 0).any():
            ...         batch = batch - 1
            ...         yield batch
            >>> async def main():
            ...     async with aiopar.Batcher(count_down) as batcher:
            ...         return [part.item() async for part in batcher.stream(torch.tensor(3))]
            >>> asyncio.run(main())
            [2, 1, 0]
        """
        if not self._streams:
            raise TypeError(
                f"{self.name!r} has one output an item: use `await batcher(item)`; only a "
                "generator function streams"
            )
        check_no_transform()
        timeout = self._requests.timeout(timeout)
        buffer = check_int("buffer", buffer, at_least=1)
        streams = self._requests.streams()
        return OutputStream(partial(self._begin_stream, item, timeout, priority, buffer, streams))

    async def _begin_stream(
        self,
        item: Any,
        timeout: float | None,  # noqa: ASYNC109  # a deadline, in the queue too
        priority: int,
        buffer: int,
        streams: Streams,
    ) -> StreamEntry:
        if not self._opened:
            timeout = await self._requests.opened(self._open, timeout)
        request = self._requests.make(StreamRequest, item, priority, streams)
        if request is None:
            raise RuntimeError("a stream is read in an event loop, and none runs here")
        request.buffer = buffer
        observers = self._scheduler.observers
        if observers is not None:
            observers.enqueue(request)
        try:
            expiry = self._requests.put(request, timeout)
        except BaseException as error:
            if observers is not None:
                observers.completed(request, error)
            raise
        return StreamEntry(request, self._scheduler.discard, expiry, observers)

    async def _open(self) -> None:
        scheduler = self._scheduler
        if scheduler.closing:
            raise ServiceClosed("the batcher is closed")
        if self.pool is not None:
            await self.pool._open()
        with self._opening:  # the first uses may be in several loops, of several threads
            if self._opened:
                return
            runners = runners_of(self._fn, self._kind, self._settings, scheduler, self._caller)
            self._executors = [runner.executor for runner in runners]
            self._requests.capture = self._executors[0]._dispatcher.pool.capture
            scheduler.add_runners(runners)
            self._opened = True

    @property
    def ready(self) -> bool:
        """Whether it takes items: open, not closing, and a replica in service."""
        return self._opened and self._scheduler.in_service and not self._scheduler.closing

    @property
    def alive(self) -> bool:
        """Whether it can ever serve again in this process."""
        return self.pool is None or self.pool.alive

    def stats(self) -> BatcherStats:
        """What waits, what runs, and what has been."""
        return self._scheduler.stats()

    def add_observer(self, observer: BatchObserver) -> None:
        """Tell `observer` of every item that comes, and every batch that is taken, from now on.

        Raises:
            TypeError: It is no `BatchObserver`.
        """
        self._scheduler.add_observer(observer)

    def remove_observer(self, observer: BatchObserver) -> None:
        """Tell it of no others."""
        self._scheduler.remove_observer(observer)

    async def aclose(
        self,
        *,
        drain: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  # what is done after it is the batcher's
    ) -> None:
        """Take no more items, and wait for those that are there; once more does no harm.

        Args:
            drain: Run the items that wait, and let streams go on to their end; else their callers
                get `ServiceClosed`. A stream that is neither read nor closed never ends.
            timeout: Seconds after which all callers that still wait get `ServiceClosed`. Coroutines
                are cancelled then, and waited for; what runs on a worker runs on. A cancellation
                before that does the same.
        """
        if timeout is not None:
            timeout = check_number("timeout", timeout, zero=True)
        if drain:
            self._scheduler.close()
        else:
            self._scheduler.close(error=ServiceClosed(_CLOSED), running=self._streams)
        try:
            with anyio.move_on_after(timeout):
                await self._scheduler.drained
                await delivered()  # what it has come to is on its way to the callers
                if self.pool is not None:  # that callback, on a worker, may be yet to come
                    self.pool._listeners.discard(WeakMethod(self._scheduler.runners_changed))
        finally:
            if not self._scheduler.drained.done():
                self._scheduler.close(error=ServiceClosed(_CLOSED), running=True)
                if self._kind.on_loop:
                    with anyio.CancelScope(shield=True):
                        await self._scheduler.drained

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        await self.aclose(drain=exc_type is None)
