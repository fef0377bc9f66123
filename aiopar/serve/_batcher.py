"""`Batcher`: runs single items in batches, through a function or a pool of replicas."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Sequence
from functools import partial
from itertools import cycle, islice
from math import isfinite
from time import monotonic
from typing import Any, Generic, Self, TypeAlias, overload
from weakref import WeakMethod

import torch

from .._base.arguments import (
    as_int,
    as_number,
    check_instance,
    check_int,
    check_number,
    check_timeout,
    returns_coroutine,
    short_repr,
    shown_as,
)
from .._base.collate import collate
from .._base.devices import CallerStream, capture_streams
from .._base.forking import ReentrantLock
from .._base.thread_state import CallerState, check_no_transform
from ..errors import DeadlineExceeded, ReplicaUnavailable, ServiceClosed
from ..executor._current import executor_near, get_executor
from ..executor._executor import DeviceExecutor
from ..executor._loop_tasks import Repeating, call_later
from ..executor._observer import Observers
from ..futures._future import thread_hooks
from ..futures._waiting import cancel_scope, heeding_ctrl_c
from ..futures._wakeup import awaiter_here, delivered, ki_protected
from ..nn._module_copy import Forward
from ._inferred import AnyFunction, In_contra, Out_co, Outputs, Unary
from ._observer import BatchObserver, all_batchers
from ._places import LoopPart, WorkerPart
from ._queue import RequestGroup
from ._replica import PoolReplica, call_module
from ._replica_pool import ReplicaPool
from ._request import Request
from ._runner import Runner
from ._scheduler import Scheduler
from ._settings import BatcherSettings, FunctionKind, condition, kind_of, name_for
from ._stats import BatcherStats
from ._streaming import OutputStream, StreamRequest

_CLOSED = "the batcher was closed before there was a result"

Streams: TypeAlias = tuple[CallerStream, ...]


class Batcher(Generic[In_contra, Out_co]):
    """Runs single items in batches: `y = await batcher(item)`, from any number of tasks.

    As soon as a worker (or replica) is free, the items that wait become a batch. A lone item runs
    at once; the higher the load, the larger the batches. Each caller gets the output or the error
    of its own item:

    - If a batch raises an `Exception` or `SystemExit`, it is split in halves until the bad item is
      alone. Only the caller of that item gets the error, with a note. So the function must be
      repeatable: an item may run up to 1 + log2(n) times. After four bad items, the items of a
      failed half run one by one. So a batch of n bad items takes about n calls. `OutputMismatch` is
      the function's fault: the batch is not split, and its callers share one error object.
    - `torch.OutOfMemoryError`: the batch is halved and tried again. Later batches of the same
      `batch_key` keep to the size that fitted; this size grows back slowly.
    - A caller that is cancelled, or whose `timeout` passes, leaves the queue. If the item's batch
      runs already, only the item's output is thrown away. A batch on the event loop is cancelled
      when its last caller leaves.
    - A full queue refuses items at once (`Overloaded`).

    Type checkers infer `Batcher[In, Out]`: the type of outputs from the annotations of the function
    or of the module's `forward`, and the type of items from those of `collate_fn`.

    `async with` or the first use opens the batcher. After it was closed, `async with` opens it
    again, in any event loop, as soon as its earlier batches have ended. `stats()` and learned batch
    sizes then begin anew. Observers stay.

    Args:
        fn_or_pool: Called with a batch; returns its outputs. A batch that is a mapping goes to a
            module, also in a pool, as `module(**batch)`, but to a function as `fn(batch)`. The
            function runs under the state of the code that made the batcher. A plain function or
            module runs on the workers of the executor that is current when the batcher is opened. A
            coroutine function is awaited on the event loop, and so is a `DataParallel`, which
            splits a batch over all its devices; workers collate the batches. A `ReplicaPool` gives
            each batch to one of its replicas. A generator function or async generator function
            yields outputs step by step, for `stream`.
        max_batch_size: The most items in a batch.
        max_queue_delay: Seconds that an item may wait for a batch to fill while a worker is free.
            An item with a timeout waits at most half of the timeout, and leaves the time of at
            least two batches before its deadline. 0: no wait.
        max_pending: The most items that may wait.
        max_wait: A new item is refused if it would wait longer than this many seconds, as estimated
            from the latest batches. None: no bound.
        concurrency: How many batches run at once. None: one, or one per replica of a pool. The
            default executor adds workers for these batches; an executor of your own runs as many
            batches as it has workers.
        collate_fn: Makes a batch of a list of items, on the worker. None: what
            `aiopar.serve.collate` does, which stacks nested tensors along a new dimension 0.
            `aiopar.serve.pad_collate` pads; `list` keeps a list.
        unbatch_fn: Makes a sequence of one output per item, on the worker. None: what
            `aiopar.serve.unbatch` does, which takes nested tensors apart along dimension 0.
        batch_key: Returns the key of an item. Only items with equal keys share a batch (a shape, an
            adapter, ...).
        cost: Returns the cost of an item (tokens, bytes). Items near in cost share a batch.
        max_batch_cost: The most that the items of a batch may cost together. An item that costs
            more is refused with `InvalidInput`.
        padded: Whether every item of a batch costs as much as the most expensive one, because
            `collate_fn` pads: `max_batch_cost` then bounds what is computed.
        timeout: Seconds until a caller gets `DeadlineExceeded`. A call may give its own.
        read_timeout: If all callers of a stream's batch have stopped reading for so many seconds,
            and other items wait or the batcher closes, these callers get `ReaderTooSlow`.
        name: The name in metrics and traces. None: the name of the function, of the module's class,
            or of the pool.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A bound is below 1 or a duration below 0; `max_batch_cost` without `cost`, or
            `padded` without `max_batch_cost`.

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
    pool: ReplicaPool[Any] | None
    """The pool that runs the batches, if there is one."""
    _replicas: Sequence[PoolReplica] | None = None
    """The replicas of the runners, empty without a pool; None while the batcher is not open."""

    # A type checker takes the first overload that fits. Modules come first: as callables, they
    # return `Any`. The first two overloads have no `unbatch_fn`, because they describe what the
    # default does.

    @overload  # a module
    def __init__(
        self,
        fn_or_pool: Forward[Outputs[Out_co]],
        *,
        max_batch_size: int = 32,
        max_queue_delay: float = 0.0,
        max_pending: int = 1024,
        max_wait: float | None = None,
        concurrency: int | None = None,
        collate_fn: Unary[list[In_contra], Any] | None = None,
        unbatch_fn: None = None,
        batch_key: Unary[In_contra, Hashable] | None = None,
        cost: Unary[In_contra, float] | None = None,
        max_batch_cost: float | None = None,
        padded: bool = False,
        timeout: float | None = None,
        read_timeout: float = 5.0,
        name: str | None = None,
    ) -> None: ...

    @overload  # a function or pool
    def __init__(
        self,
        fn_or_pool: AnyFunction[Out_co],
        *,
        max_batch_size: int = 32,
        max_queue_delay: float = 0.0,
        max_pending: int = 1024,
        max_wait: float | None = None,
        concurrency: int | None = None,
        collate_fn: Unary[list[In_contra], Any] | None = None,
        unbatch_fn: None = None,
        batch_key: Unary[In_contra, Hashable] | None = None,
        cost: Unary[In_contra, float] | None = None,
        max_batch_cost: float | None = None,
        padded: bool = False,
        timeout: float | None = None,
        read_timeout: float = 5.0,
        name: str | None = None,
    ) -> None: ...

    @overload  # outputs that are not known
    def __init__(
        self: "Batcher[Any, Any]",
        fn_or_pool: Callable[..., Any],
        *,
        max_batch_size: int = 32,
        max_queue_delay: float = 0.0,
        max_pending: int = 1024,
        max_wait: float | None = None,
        concurrency: int | None = None,
        collate_fn: Unary[list[Any], Any] | None = None,
        unbatch_fn: Callable[[Any], Sequence[Any]] | None = None,
        batch_key: Unary[Any, Hashable] | None = None,
        cost: Unary[Any, float] | None = None,
        max_batch_cost: float | None = None,
        padded: bool = False,
        timeout: float | None = None,
        read_timeout: float = 5.0,
        name: str | None = None,
    ) -> None: ...

    def __init__(
        self,
        fn_or_pool: Callable[..., Any],
        *,
        max_batch_size: int = 32,
        max_queue_delay: float = 0.0,
        max_pending: int = 1024,
        max_wait: float | None = None,
        concurrency: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        unbatch_fn: Callable[[Any], Sequence[Any]] | None = None,
        batch_key: Callable[[Any], Hashable] | None = None,
        cost: Callable[[Any], float] | None = None,
        max_batch_cost: float | None = None,
        padded: bool = False,
        timeout: float | None = None,
        read_timeout: float = 5.0,
        name: str | None = None,
    ) -> None:
        self._fn = fn_or_pool
        pool = self.pool = fn_or_pool if isinstance(fn_or_pool, ReplicaPool) else None
        self._kind = FunctionKind() if pool is not None else kind_of(fn_or_pool)
        self.name = pool.name if pool is not None and name is None else name_for(fn_or_pool, name)
        self._settings = BatcherSettings(
            max_batch_size=max_batch_size,
            max_queue_delay=max_queue_delay,
            max_pending=max_pending,
            max_wait=max_wait,
            concurrency=concurrency,
            collate_fn=collate if collate_fn is None else collate_fn,
            unbatch_fn=unbatch_fn,
            batch_key=batch_key,
            cost=cost,
            max_batch_cost=max_batch_cost,
            padded=padded,
            timeout=timeout,
            read_timeout=read_timeout,
        )
        self._caller = CallerState()
        self._observers: Observers[BatchObserver] = Observers(all_batchers, self.name)
        self._scheduler = self._new_scheduler()
        self._opening = ReentrantLock()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._settings, self._observers, on_loop=self._kind.on_loop)

    @short_repr
    def __repr__(self) -> str:
        state = condition(self._scheduler.closing, self._opened, self.ready)
        return f"{self.name!r}, {len(self._scheduler)} waiting, {state}"

    @returns_coroutine
    def __call__(
        self, item: In_contra, *, timeout: float | None = None, priority: int = 0
    ) -> Coroutine[Any, Any, Out_co]:
        """Return the output for `item`.

        A function on a worker calls `aiopar.wait(batcher(item))`.

        Args:
            item: One of the items that `collate_fn` gets a list of.
            timeout: Seconds until `DeadlineExceeded`; 0 or less: at once. None: the batcher's.
            priority: The lowest goes first, as in `queue.PriorityQueue`; items of equal priority
                go in order of arrival. No item starves: when 32 batches have passed over an item,
                the next batch is made for it.

        Raises:
            Overloaded: The queue is full, or the wait would be longer than `max_wait`.
            DeadlineExceeded: The output did not come in time. An item in the queue is then never
                computed.
            InvalidInput: The item costs more than a batch may.
            OutputMismatch: The function returned a wrong number of outputs.
            ReplicaUnavailable: No replica of the pool is in service.
            ServiceClosed: The batcher is closed or closing.
            TypeError: The function is a generator function (raised at once), or an argument has a
                wrong type.
            RuntimeError: Called within a transform of `torch.func` or a trace; raised at once.
        """
        if self._kind.streams:
            raise TypeError(
                f"{self.name!r} is a generator function: use "
                "`async for part in batcher.stream(item)`"
            )
        check_no_transform()
        # Captured now, because a task may begin the coroutine later.
        streams = capture_streams()
        return shown_as(self._call(item, timeout, priority, streams), "Batcher.__call__")

    @ki_protected
    async def _call(
        self,
        item: Any,
        timeout: float | None,  # noqa: ASYNC109  # a deadline, in the queue too
        priority: int,
        streams: Streams,
    ) -> Any:
        timeout = self._checked_timeout(timeout)
        awaiter = awaiter_here()
        if awaiter is None:
            # `aiopar.wait` drives this coroutine, in a worker or in a program without a loop.
            if self.pool is not None:
                await self._open()  # raises, because a pool needs a loop that goes on
            return run_in_own_loop(self._call(item, timeout, priority, streams))
        request = Request(item, awaiter, self._scheduler.group)
        try:
            if not self._opened:
                timeout = await self._open_for(request, timeout)
            self._queue(request, timeout, priority, streams)
            # The loop may run inside a call on the worker that the batch needs.
            thread_hooks.about_to_block()
            await awaiter
            output = request.outcome()
        except GeneratorExit:
            self._leave_soon(request)
            raise
        except BaseException as error:
            self._leave(request, error)
            raise
        else:
            self._leave(request, None)
            return output
        finally:
            # An error's traceback holds this frame; the request and its awaiter may hold the error.
            del request, awaiter

    def _queue(
        self, request: Request, timeout: float | None, priority: int, streams: Streams
    ) -> None:
        """Queue a request."""
        scheduler, settings = self._scheduler, self._settings
        try:
            # The user's functions are called here, and what they return is checked: the queue
            # compares costs and priorities under its lock.
            if priority != 0:
                request.priority = as_int("priority", priority)
            if settings.batch_key is not None:
                request.group = _group_of(scheduler, settings.batch_key(request.item))
            if settings.cost is not None:
                request.cost = _checked_cost(settings.cost(request.item))
        finally:
            self._tell_observers(request)  # also if the key or the cost failed
        request.streams = streams
        if timeout is None:
            scheduler.put(request)
        else:
            request.deadline = request.arrived + timeout
            scheduler.put(request)
            request.cancel_at_end(call_later(timeout, partial(self._expire, request)))

    def _tell_observers(self, request: Request) -> None:
        observers = self._scheduler.observers.current
        if observers is not None:
            observers.tell("enqueue", request)
            request.at_end = (*request.at_end, partial(observers.tell, "completed", request))

    def _checked_timeout(self, given: float | None) -> float | None:
        if given is None:
            return self._settings.timeout
        # A negative timeout is allowed, because the caller's own deadline may have passed.
        timeout = as_number("timeout", given)
        return 0.0 if timeout < 0 else check_number("timeout", timeout, zero=True)

    async def _open_for(
        self,
        request: Request,
        timeout: float | None,  # noqa: ASYNC109
    ) -> float | None:
        """Open the batcher, which may take long, and return the rest of the timeout."""
        try:
            with cancel_scope(timeout) as scope:
                await self._open()
            if scope.cancelled_caught:
                raise DeadlineExceeded(f"the batcher was not open after {timeout:.3g} s")
        except BaseException as error:
            self._tell_observers(request)
            if isinstance(error, ServiceClosed):
                self._scheduler.reject(request, "closed")
            elif isinstance(error, ReplicaUnavailable):
                self._scheduler.reject(request, "unavailable")
            raise
        now = monotonic()
        if timeout is not None:
            timeout = max(0.0, timeout - (now - request.arrived))
        request.arrived = now
        request.group = self._scheduler.group  # opening may make a new scheduler
        return timeout

    def _expire(self, request: Request) -> None:
        # The place in the queue is free before the caller gets the error.
        request.skipped = self._scheduler.discard(request) or request.skipped
        request.expire()

    def _leave_soon(self, request: Request) -> None:
        """End `request`, whose coroutine was closed, perhaps by the garbage collector.

        This thread may hold any lock, so the request leaves the queue later, on its loop.
        """
        request.abandon()
        leave = partial(self._leave, request, GeneratorExit())
        request.awaiter.waker.post(leave)
        if request.awaiter.waker.finished:  # the loop was closed
            leave()

    def _leave(self, request: Request, error: BaseException | None) -> None:
        """End `request`: its caller has the output, or leaves because of `error`."""
        if error is not None or request.streams_outputs:
            request.abandon()
            self._scheduler.discard(request)
        at_end, request.at_end = request.at_end, ()
        for end in at_end:
            end(error)

    def stream(
        self, item: In_contra, *, timeout: float | None = None, priority: int = 0, buffer: int = 16
    ) -> OutputStream[Out_co]:
        """Return the output for `item` part by part: `async for part in batcher.stream(item)`.

        For a generator function or an async generator function. It gets a batch, and yields outputs
        for the whole batch, step by step. Items wait, share a batch, expire and are refused as in
        `await batcher(item)`. The batch runs, and counts for `concurrency`, until the generator
        ends or no caller reads any more. Each step of a generator is a call of its own on one
        worker, which is free between steps.

        The next step runs when any caller has fewer than `buffer` parts to read. So the batch is as
        fast as its fastest reader, and a slow reader slows no other reader. A caller with more than
        `64 * buffer` unread parts loses its stream (`ReaderTooSlow`). If no caller has room, the
        generator waits, and parts never pile up. Callers that all stop reading lose their streams
        only if they hold up other items (`read_timeout`). When no caller is left (each has left
        `async with`, was cancelled, ...) the generator is closed. A batch that fails before its
        first part is split as any other batch. An error after the first part is raised to all
        callers, after the parts that they have not read.

        Args:
            item: One of the items that `collate_fn` gets a list of.
            timeout: Seconds until `DeadlineExceeded`, for the whole output. None: the batcher's.
            priority: As for `await batcher(item)`.
            buffer: How many unread parts a caller has room for; at most 64 times as many wait.

        Returns:
            An async iterator for one event loop. `async with` queues the item on entering and
            leaves the batch on leaving. It raises what `await batcher(item)` raises, and
            `ReaderTooSlow`.

        Raises:
            TypeError: The function is not a generator function, or an argument has a wrong type.
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
        if not self._kind.streams:
            raise TypeError(
                f"{self.name!r} has one output an item: use `await batcher(item)`; only a "
                "generator function streams"
            )
        check_no_transform()
        timeout = self._checked_timeout(timeout)
        buffer = check_int("buffer", buffer, at_least=1)
        streams = capture_streams()
        begin = partial(self._begin_stream, item, timeout, priority, buffer, streams)
        return OutputStream(begin, self._leave)

    @ki_protected
    async def _begin_stream(
        self,
        item: Any,
        timeout: float | None,  # noqa: ASYNC109  # a deadline, in the queue too
        priority: int,
        buffer: int,
        streams: Streams,
    ) -> StreamRequest:
        awaiter = awaiter_here()
        if awaiter is None:
            raise RuntimeError("a stream is read in an event loop, and none runs here")
        request = StreamRequest(item, awaiter, self._scheduler.group, buffer)
        try:
            if not self._opened:
                timeout = await self._open_for(request, timeout)
            self._queue(request, timeout, priority, streams)
        except BaseException as error:
            self._leave(request, error)
            raise
        return request

    @property
    def _opened(self) -> bool:
        """Whether the batcher has runners for the present replicas of its pool."""
        replicas, pool = self._replicas, self.pool
        return replicas is not None and (pool is None or replicas is pool._replicas)

    @ki_protected
    async def _open(self) -> None:
        if self._scheduler.closing:
            raise ServiceClosed("the batcher is closed")
        if self.pool is not None:
            await self.pool._open()
        with self._opening:  # the first calls may come from several loops, in several threads
            if self._opened:
                return
            replicas = () if self.pool is None else self.pool._replicas
            self._scheduler.use_runners(self._make_runners(replicas))
            self._replicas = replicas

    def _make_runners(self, replicas: Sequence[PoolReplica]) -> list[Runner]:
        """Make `concurrency` runners; by default one, or one per replica of a pool."""
        fn, kind = self._fn, self._kind
        if isinstance(fn, ReplicaPool):
            return self._make_pool_runners(fn, replicas)
        count = self._settings.concurrency or 1
        executor = _executor_for(fn)
        dispatcher = executor._dispatcher
        if isinstance(fn, torch.nn.Module):
            fn = partial(call_module, fn)
        if not kind.on_loop:
            # If the executor can grow, each batch gets a worker: a batch may wait for other things
            # than a core.
            dispatcher.ensure(count)
            if kind.streams:
                what, instead = "a Batcher of a generator function", "use a DeviceExecutor"
                dispatcher.check_shares_memory(what, instead)
            fn = dispatcher.keep(fn)
        make_part = LoopPart if kind.on_loop else WorkerPart
        options = (make_part, fn, self._settings, kind, executor, self._caller)
        return [Runner(self._scheduler, *options) for _ in range(count)]

    def _make_pool_runners(
        self, pool: ReplicaPool[Any], replicas: Sequence[PoolReplica]
    ) -> list[Runner]:
        scheduler, runners = self._scheduler, list[Runner]()
        present = [*scheduler.runners]  # a replica that stays keeps its runner, which may be busy
        if not present:
            listeners, listener = pool._listeners, WeakMethod(scheduler.runners_changed)
            listeners.add(listener)
            scheduler.drained.add_done_callback(lambda _: listeners.discard(listener))
        options = (WorkerPart, pool, self._settings, self._kind)
        for replica in islice(cycle(replicas), self._settings.concurrency or len(replicas)):
            runner = next((one for one in present if one.replica is replica), None)
            if runner is not None:
                present.remove(runner)
            else:
                executor = replica.pool_executor._on_worker(replica.worker)
                where = (executor, self._caller, replica, pool._failed)
                runner = Runner(scheduler, *options, *where)
            runners.append(runner)
        return runners

    @property
    def ready(self) -> bool:
        """Whether the batcher takes items: it is open, not closing, and a replica is in service."""
        return self._opened and self._scheduler.in_service and not self._scheduler.closing

    @property
    def _executors(self) -> list[DeviceExecutor]:
        """The executors of its runners, for metrics."""
        return [runner.executor for runner in self._scheduler.runners]

    @property
    def _seconds_busy(self) -> float:
        """The shortest time that a replica or runner has run its batch; 0.0 for streams."""
        if self.pool is not None:
            return self.pool._seconds_busy
        now, runners = monotonic(), self._scheduler.runners
        began = [batch.began or now for one in runners if (batch := one.batch) is not None]
        if self._kind.streams or len(began) < len(runners):
            return 0.0
        return now - max(began, default=now)

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called since the batcher was opened."""
        return self._scheduler.closing

    @property
    def alive(self) -> bool:
        """Whether the batcher can ever serve again in this process."""
        return self.pool is None or self.pool.alive

    def stats(self) -> BatcherStats:
        """Return the statistics of this moment."""
        return self._scheduler.stats()

    def add_observer(self, observer: BatchObserver) -> None:
        """Tell `observer` of every item and every batch from now on.

        Raises:
            TypeError: `observer` is not a `BatchObserver`.
        """
        check_instance("observer", observer, BatchObserver)
        self._observers.add(observer)

    def remove_observer(self, observer: BatchObserver) -> None:
        """Stop telling `observer`; nothing happens if it was not added."""
        self._observers.remove(observer)

    @ki_protected
    async def aclose(
        self,
        *,
        drain: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  # the batcher has work after the timeout
    ) -> None:
        """Refuse new items and wait for the items that are there. It may be called again.

        `async with` opens the batcher again.

        Args:
            drain: Run the items that wait, and let streams go on to their end. False: their callers
                get `ServiceClosed`. A stream that is not read ends after `read_timeout`.
            timeout: Seconds until all callers that still wait get `ServiceClosed`. Coroutines are
                then cancelled and awaited; batches on workers run to their end. A cancellation of
                `aclose` does the same.
        """
        timeout = check_timeout(timeout)
        scheduler = self._scheduler
        if drain:
            scheduler.close()
        else:
            scheduler.close(error=ServiceClosed(_CLOSED), running=self._kind.streams)
        may_wait = self._kind.on_loop  # a coroutine that is being closed must not
        stall_check = Repeating(self._settings.read_timeout, scheduler.end_stalled)
        try:
            with cancel_scope(timeout), heeding_ctrl_c():
                await scheduler.drained
                await delivered()  # posted outcomes reach the callers first
                if self.pool is not None:  # the callback of `drained` may still run
                    self.pool._listeners.discard(WeakMethod(scheduler.runners_changed))
        except GeneratorExit:
            may_wait = False
            raise
        finally:
            stall_check.cancel()
            if not scheduler.drained.done():
                scheduler.close(error=ServiceClosed(_CLOSED), running=True)
                if may_wait:
                    with cancel_scope(shield=True):
                        await scheduler.drained

    async def __aenter__(self) -> Self:
        closed = self._scheduler
        if closed.closing:
            closed.close()  # ends the batches of event loops that were closed meanwhile
            await closed.drained
            with self._opening:
                if self._scheduler is closed:  # else another task has made it new
                    self._scheduler, self._replicas = self._new_scheduler(), None
        await self._open()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        await self.aclose(drain=exc_type is None)


def _group_of(scheduler: Scheduler, key: Hashable) -> RequestGroup:
    try:
        hash(key)
    except TypeError:
        raise TypeError(
            f"batch_key must return what can be hashed, not {type(key).__name__}"
        ) from None
    return scheduler.group_of(key)


def _checked_cost(cost: float) -> float:
    try:
        finite = isfinite(cost)
    except TypeError:
        raise TypeError(f"cost must return a number, not {type(cost).__name__}") from None
    if not finite or cost < 0:
        raise ValueError(f"cost must be finite and at least 0, got {cost}")
    return float(cost)


def _executor_for(fn: Callable[[Any], Any]) -> DeviceExecutor:
    """The executor of a module's device, or the current one."""
    if isinstance(fn, torch.nn.Module):
        weight = next(fn.parameters(), None)
        if weight is not None:
            return executor_near(weight.device)
    return get_executor()


def run_in_own_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run `coroutine` on an event loop made for it; blocks."""
    # With a factory, the thread keeps the loop that `asyncio.set_event_loop` has set for it.
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
    # The error is returned: if it were raised here, its traceback would hold frames of the runner,
    # which hold the task that holds the error.
    try:
        return await coroutine, None
    except Exception as error:  # noqa: BLE001  # the caller gets every error
        return None, error
    finally:
        del coroutine
