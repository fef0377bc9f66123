"""`Batcher`: runs single items in batches, through a function or a pool of replicas."""

from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import nullcontext
from itertools import cycle, islice
from typing import Any, overload

import torch

from .._base.arguments import (
    returns_coroutine,
)
from .._base.collate import collate
from .._base.inputs import function_of_batch
from ..executor._current import executor_near, get_executor
from ..executor._executor import DeviceExecutor
from ..nn._module_copy import Forward
from ._base_batcher import BaseBatcher
from ._inferred import AnyFunction, In_contra, Out_co, Outputs, Unary
from ._places import LoopPart, WorkerPart
from ._replica import PoolReplica
from ._replica_pool import ReplicaPool
from ._runner import BatchRunner, Runner
from ._scheduler import Scheduler
from ._settings import BatcherSettings, FunctionKind, fixed_sizes, kind_of
from ._streaming import OutputStream


class Batcher(BaseBatcher[In_contra, Out_co]):
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
            module, also in a pool, as `module(**batch)` if `forward` takes these names. A function
            gets it as `fn(batch)`. Both run under the state of the code that made the batcher, a
            module also under `torch.no_grad`. A plain function or module runs on the workers of the
            executor that is current when the batcher is opened. A coroutine function is awaited on
            the event loop, and so is a `DataParallel`, which splits a batch over all its devices;
            workers collate the batches. A `ReplicaPool` gives each batch to one of its replicas. A
            generator function or async generator function yields outputs step by step, for
            `stream`.
        max_batch_size: The most items in a batch. None: the largest of `batch_sizes`, or 32.
        batch_sizes: The sizes that the function may see, such as `(1, 2, 4, 8, 16, 32)`: the last
            item of a batch is repeated up to the next size, and its extra outputs are dropped. So a
            compiler or a CUDA graph meets few shapes. Each replica of a pool runs the pool's
            `warmup` in every size before it gets a batch. `max_batch_cost`, statistics and
            observers count real items. None: no padding.
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
            `padded` without `max_batch_cost`; `max_batch_size` is not the largest of `batch_sizes`.

    Example:
        >>> import asyncio, aiopar, torch
        >>> async def main():
        ...     async with aiopar.Batcher(lambda batch: batch.sum(1)) as batcher:  # (n, 3) -> (n,)
        ...         items = [torch.ones(3), torch.arange(3.0)]
        ...         return await asyncio.gather(*[batcher(item) for item in items])
        >>> asyncio.run(main())
        [tensor(3.), tensor(3.)]
    """

    # A type checker takes the first overload that fits. Modules come first: as callables, they
    # return `Any`. The first two overloads have no `unbatch_fn`, because they describe what the
    # default does.

    @overload  # a module
    def __init__(
        self,
        fn_or_pool: Forward[Outputs[Out_co]],
        *,
        max_batch_size: int | None = None,
        batch_sizes: Iterable[int] | None = None,
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
        max_batch_size: int | None = None,
        batch_sizes: Iterable[int] | None = None,
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
        max_batch_size: int | None = None,
        batch_sizes: Iterable[int] | None = None,
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
        max_batch_size: int | None = None,
        batch_sizes: Iterable[int] | None = None,
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
        pool = fn_or_pool if isinstance(fn_or_pool, ReplicaPool) else None
        kind = FunctionKind() if pool is not None else kind_of(fn_or_pool)
        batch_sizes, max_batch_size = fixed_sizes(batch_sizes, max_batch_size)
        settings = BatcherSettings(
            max_batch_size=max_batch_size,
            batch_sizes=batch_sizes,
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
        if max_batch_cost is not None and cost is None:
            raise ValueError("max_batch_cost needs cost, a function from an item to its cost")
        # As in a pool. But the module is the caller's own: what it keeps under inference mode (a
        # cache) could never be used in training.
        is_module = isinstance(fn_or_pool, torch.nn.Module)
        with torch.no_grad() if is_module else nullcontext():
            super().__init__(fn_or_pool, name, pool, kind, settings)  # captures the state

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self._settings, self._observers, on_loop=self._kind.on_loop)

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
        return self._called(item, timeout, priority)

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
        return self._streamed(item, timeout, priority, buffer)

    def _make_runners(self, replicas: Sequence[PoolReplica]) -> list[Runner]:
        """Make `concurrency` runners; by default one, or one per replica of a pool."""
        fn, kind = self._fn, self._kind
        if isinstance(fn, ReplicaPool):
            return self._make_pool_runners(fn, replicas)
        count = self._settings.concurrency or 1
        executor = _executor_for(fn)
        dispatcher = executor._dispatcher
        fn = function_of_batch(fn)
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
        return [BatchRunner(self._scheduler, *options) for _ in range(count)]

    def _make_pool_runners(
        self, pool: ReplicaPool[Any], replicas: Sequence[PoolReplica]
    ) -> list[Runner]:
        scheduler, runners = self._scheduler, list[Runner]()
        present = [*scheduler.runners]  # a replica that stays keeps its runner, which may be busy
        self._follow(pool)
        options = (WorkerPart, pool, self._settings, self._kind)
        for replica in islice(cycle(replicas), self._settings.concurrency or len(replicas)):
            runner = next((one for one in present if one.replica is replica), None)
            if runner is not None:
                present.remove(runner)
            else:
                executor = replica.pool_executor._on_worker(replica.worker)
                where = (executor, self._caller, replica, pool._failed)
                runner = BatchRunner(scheduler, *options, *where)
            runners.append(runner)
        return runners

    @property
    def _seconds_busy(self) -> float:
        # A stream may last as long as its readers want.
        return 0.0 if self._kind.streams else super()._seconds_busy


def _executor_for(fn: Callable[[Any], Any]) -> DeviceExecutor:
    """The executor of a module's device, or the current one."""
    if isinstance(fn, torch.nn.Module):
        weight = next(fn.parameters(), None)
        if weight is not None:
            return executor_near(weight.device)
    return get_executor()
