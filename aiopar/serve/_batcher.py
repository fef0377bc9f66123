"""`Batcher`: single items in, batches through a function or a pool of replicas."""

import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import cycle, islice
from types import TracebackType
from typing import Any, Self

import anyio
import torch

from .._awaiter import awaiter_here
from .._call import check_callable
from .._caller import CallerState
from .._collate import collate
from .._default import executor_near, get_executor
from .._devices import capture_streams
from .._errors import ServiceClosed
from .._executor import DeviceExecutor
from ._compute import ComputeFunction, ComputeReplica
from ._observer import BatchObserver
from ._replica import Replica
from ._replica_pool import ReplicaPool
from ._request import Request
from ._runner import WorkerRunner
from ._scheduler import Scheduler
from ._settings import BatcherSettings, check_positive, name_for
from ._tally import BatcherStats
from ._timer import Cancel, call_later


class Batcher:
    """Runs single items in batches: `y = await batcher(item)`, from any number of tasks.

    Items that wait together go together, as soon as there is a free replica (or worker): a lone
    item at once, and the busier it gets, the larger the batches. Each caller gets its own output
    or its own error, whatever becomes of the others:

    - A batch that raises is split in halves until the bad item stands alone; only its caller gets
      the error, with a note. So `fn` must be repeatable: an item may be run up to 1 + log2(n)
      times. When four single items have failed with one type of error and nothing has succeeded,
      it is not split further: the function is broken.
    - `torch.OutOfMemoryError`: the batch is halved and tried again, and later batches of that key
      keep to the size that fitted; it grows back slowly.
    - A caller that is cancelled, or whose `timeout` passes, leaves the queue; in a batch that runs,
      only its own output is thrown away.
    - A full queue refuses at once (`Overloaded`).

    Args:
        fn: A plain function (or module) from a batch to the outputs for it, run on the workers of
            the executor that is current when the batcher is first used, under the state of who
            made the batcher; or a `ReplicaPool`.
        max_batch_size: The most items of a batch.
        max_queue_delay: Seconds that an item may wait for a batch to fill, even while a worker is
            free. 0: none.
        max_pending: The most items that may wait.
        max_wait: The longest wait, in seconds, that a new item may have before it, as estimated
            from the latest batches. None: as long as the queue is.
        concurrency: How many batches run at once. None: one, or, of a pool, one a replica.
        collate_fn: From a list of items to a batch, run on the worker. The default stacks nested
            tensors on a new dimension 0; `aiopar.serve.pad_collate` pads; `list` leaves a list.
        unbatch_fn: From outputs to a sequence of one for each item, run on the worker. None: as
            `aiopar.serve.unbatch` does it, nested tensors unbound on dimension 0, as views.
        batch_key: Of an item; only items with equal keys go together (a shape, an adapter, ...).
        cost: Of an item (its tokens, its bytes); items near in cost go together.
        max_batch_cost: The most that the items of a batch may cost in sum; an item that costs more
            is refused with `InvalidInput`.
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

    def __init__(
        self,
        fn: Callable[[Any], Any] | ReplicaPool,
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
        timeout: float | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(fn, ReplicaPool):
            check_callable(fn)
        self._fn = fn
        self.name = fn.name if isinstance(fn, ReplicaPool) and name is None else name_for(fn, name)
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
            timeout=timeout,
        )
        self._caller = CallerState()
        self._scheduler = Scheduler(self._settings)
        self._opened = False
        self._opening = anyio.Lock()
        self._executors: list[DeviceExecutor] = []
        """Those that it runs on; for metrics."""
        self._has_streams = False

    async def __call__(
        self,
        item: Any,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # a deadline, in the queue too
        priority: int = 0,
    ) -> Any:
        """The output for `item`, which goes with others in a batch.

        Args:
            item: What `collate_fn` takes a list of.
            timeout: Seconds until `DeadlineExceeded`; None: that of the batcher.
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
        """
        check_positive("timeout", timeout)
        if not self._opened:
            await self._open()
        request = self._request(item, priority)
        expiry: Cancel | None = None
        observers = self._scheduler.observers
        if observers is not None:
            observers.enqueue(request)
        try:
            expiry = self._put(request, self._settings.timeout if timeout is None else timeout)
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

    def _request(self, item: Any, priority: int) -> Request:
        settings = self._settings
        awaiter = awaiter_here()
        if awaiter is None:
            raise RuntimeError("a batcher is awaited in an event loop, and none runs here")
        request = Request(item, awaiter)
        if priority:
            request.priority = priority
        if settings.batch_key is not None:
            request.key = settings.batch_key(item)
        if settings.cost is not None:
            request.cost = settings.cost(item)
        if self._has_streams:
            request.streams = capture_streams()
        return request

    def _put(self, request: Request, timeout: float | None) -> Cancel | None:
        if timeout is None:
            self._scheduler.put(request)
            return None
        request.deadline = request.arrived + timeout
        self._scheduler.put(request)
        return call_later(timeout, partial(self._expire, request))

    def _expire(self, request: Request) -> None:
        request.expire()
        self._scheduler.discard(request)

    async def _open(self) -> None:
        async with self._opening:
            if self._opened:
                return
            fn = self._fn
            if isinstance(fn, ReplicaPool):
                await fn._open()
                replicas = islice(
                    cycle(fn.replicas), self._settings.concurrency or len(fn.replicas)
                )
                runners = [self._runner(fn, replica) for replica in replicas]
                fn._listeners.append(self._scheduler.look_again)
            else:
                executor = _executor_for(fn)
                compute = ComputeFunction(fn, self._settings)
                runners = [
                    WorkerRunner(self._scheduler, executor, compute, self._caller)
                    for _ in range(self._settings.concurrency or 1)
                ]
            self._has_streams = any(runner.has_streams for runner in runners)
            self._executors = [runner.executor for runner in runners]
            self._trace()
            self._scheduler.add_runners(runners)
            self._opened = True

    def _runner(self, pool: ReplicaPool, replica: Replica) -> WorkerRunner:
        compute = ComputeReplica(replica, self._settings)
        return WorkerRunner(
            self._scheduler, replica.executor, compute, self._caller, replica, pool._failed
        )

    def _trace(self) -> None:
        # Who has set a tracer provider has imported this; it is not ours to import.
        if "opentelemetry.trace" in sys.modules:
            from ._tracing import find_tracing

            tracing = find_tracing(self.name)
            if tracing is not None:
                self.add_observer(tracing)

    @property
    def ready(self) -> bool:
        """Whether it takes items: open, not closing, and a replica in service."""
        return self._opened and not self._scheduler.closing

    @property
    def alive(self) -> bool:
        """Whether it can ever serve again in this process."""
        return not isinstance(self._fn, ReplicaPool) or self._fn.alive

    def stats(self) -> BatcherStats:
        """What waits, what runs, and what has been."""
        return self._scheduler.stats()

    def add_observer(self, observer: BatchObserver) -> None:
        """Tell `observer` of every item that comes, and every batch that is taken, from now on."""
        self._scheduler.add_observer(observer)

    def remove_observer(self, observer: BatchObserver) -> None:
        """Tell it of no others."""
        self._scheduler.remove_observer(observer)

    async def aclose(
        self,
        *,
        drain: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  # of a wait that no cancellation ends
    ) -> None:
        """Take no more items, and wait for those that are there; once more does no harm.

        Args:
            drain: Run the items that wait; else their callers get `ServiceClosed`.
            timeout: Seconds after which all callers that still wait get `ServiceClosed`.
        """
        self._scheduler.close(error=None if drain else _closed())
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(timeout):
                await self._scheduler.drained
                return
            self._scheduler.close(error=_closed(), running=True)

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose(drain=exc_type is None)


def _closed() -> ServiceClosed:
    return ServiceClosed("the batcher was closed before there was a result")


def _executor_for(fn: Callable[[Any], Any]) -> DeviceExecutor:
    if isinstance(fn, torch.nn.Module):
        weight = next(fn.parameters(), None)
        if weight is not None:
            return executor_near(weight.device)
    return get_executor()
