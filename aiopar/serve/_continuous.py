"""`ContinuousBatcher`: batching per step; requests join and leave a running batch."""

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, overload
from weakref import WeakMethod

import torch

from .._base.arguments import described, returns_coroutine
from ..executor._current import executor_near, get_executor
from ..executor._executor import DeviceExecutor
from ._base_batcher import BaseBatcher
from ._continuous_scheduler import ContinuousScheduler
from ._inferred import In_contra, Out_co, Part_co
from ._replica import PoolReplica
from ._replica_pool import ReplicaPool
from ._runner import Runner
from ._settings import BatcherSettings, FunctionKind
from ._stats import ContinuousStats
from ._step_run import StepRunner
from ._stepper import AnyStepper, Stepper, check_stepper
from ._streaming import OutputStream


class ContinuousBatcher(BaseBatcher[In_contra, Out_co], Generic[In_contra, Part_co, Out_co]):
    """Batching per step: `async for part in batcher.stream(item)`, from any number of tasks.

    For models that work in steps: language models, recurrent decoders, diffusion samplers, search.
    A `Stepper` takes one step for all requests that run. Between two steps new requests join, and
    requests that are done leave. So no request waits for the end of another one. A step needs no
    event loop: a busy loop slows no step.

    What `Batcher` promises about queue, priorities, deadlines, cancelled callers, the state of the
    caller, observers, opening and closing holds here too. What differs:

    - A full queue refuses new items; it never ends a stream that runs. `aclose` lets running
      streams go on to their end.
    - A request whose reader has `buffer` unread parts takes no step until the reader reads. It
      slows no other request. If other items need its place, the reader gets `ReaderTooSlow` after
      `read_timeout`.
    - If `step` raises, the batcher steps halves of the batch until the bad request is alone. The
      other requests go on. If the stepper is not `resumable`, the whole batch fails.
    - After `torch.OutOfMemoryError` the newest half of the requests waits until there is room, if
      the stepper is `resumable`. The batcher keeps the batch size that fitted, and later tries
      larger ones.
    - If a worker (a process, an actor, a replica) is lost, a request that has sent no part starts
      again elsewhere. A stream that has sent parts fails with `WorkerLost`, or goes on if the
      stepper has `resume`.
    - At most 32 later items join before an item, whatever their priorities.

    Type checkers infer the types of items and parts from the stepper's annotations. They cannot
    infer the type of results: annotate `batcher: ContinuousBatcher[In, Part, Out]`.

    Args:
        stepper_or_pool: A stepper, or a `ReplicaPool`. A stepper runs on one worker of the executor
            that is current when the batcher is opened. If the stepper has an attribute `device`, it
            runs on a worker of that device. With a pool, each replica has a stepper of its own.
            After new weights, running requests keep the old weights, and newcomers get the new.
        stepper: A function that makes the stepper of a replica from the replica's module, on the
            replica's worker. Only with a pool.
        max_batch_size: The most requests in a batch (of each replica).
        max_batch_cost: The most that the requests of a batch may hold together; the stepper's
            `held` says what each holds. Newcomers leave a tenth of it free. If the batch grows
            beyond it, the newest request is preempted: stopped, and stepped again when there is
            room. None: no bound.
        max_pending: The most items that may wait.
        max_wait: A new item is refused if its estimated wait is longer than this many seconds.
            None: no bound.
        timeout: Seconds until a caller gets `DeadlineExceeded`. A call may give another timeout.
        read_timeout: Seconds without a read after which a stalled reader loses its place, if items
            wait for a place or the batcher closes.
        name: The name in metrics and traces. None: the name of the stepper's class, or of the pool.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A bound is below 1 or a duration below 0; a pool without `stepper`, or `stepper`
            without a pool; `max_batch_cost` for a stepper without `held`.

    Example:
        >>> import asyncio, aiopar
        >>> class Countdown:
        ...     def start(self, item):
        ...         return {"left": item}
        ...     def step(self, states):
        ...         for state in states:
        ...             state["left"] -= 1
        ...         return [s["left"] if s["left"] else aiopar.Done("lift-off") for s in states]
        >>> async def main():
        ...     async with aiopar.ContinuousBatcher(Countdown()) as batcher:
        ...         parts = [part async for part in batcher.stream(3)]
        ...         return parts, await asyncio.gather(batcher(2), batcher(5))
        >>> asyncio.run(main())
        ([2, 1], ['lift-off', 'lift-off'])
    """

    _scheduler: ContinuousScheduler

    @overload
    def __init__(
        self,
        stepper_or_pool: Stepper[In_contra, Any, Part_co],
        *,
        stepper: None = None,
        max_batch_size: int = 16,
        max_batch_cost: float | None = None,
        max_pending: int = 1024,
        max_wait: float | None = None,
        timeout: float | None = None,
        read_timeout: float = 5.0,
        name: str | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        stepper_or_pool: ReplicaPool[Any],
        *,
        stepper: Callable[[Any], Stepper[In_contra, Any, Part_co]],
        max_batch_size: int = 16,
        max_batch_cost: float | None = None,
        max_pending: int = 1024,
        max_wait: float | None = None,
        timeout: float | None = None,
        read_timeout: float = 5.0,
        name: str | None = None,
    ) -> None: ...

    def __init__(
        self,
        stepper_or_pool: Any,
        *,
        stepper: Callable[[Any], AnyStepper] | None = None,
        max_batch_size: int = 16,
        max_batch_cost: float | None = None,
        max_pending: int = 1024,
        max_wait: float | None = None,
        timeout: float | None = None,
        read_timeout: float = 5.0,
        name: str | None = None,
    ) -> None:
        pool = stepper_or_pool if isinstance(stepper_or_pool, ReplicaPool) else None
        self._make = _maker(stepper_or_pool, stepper, bounded=max_batch_cost is not None)
        self._device = None if pool is not None else getattr(stepper_or_pool, "device", None)
        settings = BatcherSettings(
            max_batch_size=max_batch_size,
            max_pending=max_pending,
            max_wait=max_wait,
            max_batch_cost=max_batch_cost,
            timeout=timeout,
            read_timeout=read_timeout,
        )
        super().__init__(stepper_or_pool, name, pool, FunctionKind(streams=True), settings)

    def _new_scheduler(self) -> ContinuousScheduler:
        return ContinuousScheduler(self._settings, self._observers)

    @returns_coroutine
    def __call__(
        self, item: In_contra, *, timeout: float | None = None, priority: int = 0
    ) -> Coroutine[Any, Any, Out_co]:
        """Return the result for `item`: `Done.result` of the stepper.

        Args:
            item: The argument of the stepper's `start`.
            timeout: Seconds until `DeadlineExceeded`; 0 or less: at once. None: the timeout of the
                batcher.
            priority: The lowest goes first; items of equal priority go in order of arrival.

        Raises:
            Overloaded: The queue is full, or the wait would be longer than `max_wait`.
            DeadlineExceeded: The result did not come in time.
            InvalidInput: The item needs more than `max_batch_cost`.
            ReplicaUnavailable: No replica of the pool is in service.
            ServiceClosed: The batcher is closed or closing.
            WorkerLost: The worker was lost too often.
            TypeError: An argument has a wrong type.
            RuntimeError: Called within a transform of `torch.func` or a trace; raised at once.
        """
        return self._called(item, timeout, priority)

    def stream(
        self, item: In_contra, *, timeout: float | None = None, priority: int = 0, buffer: int = 16
    ) -> OutputStream[Part_co]:
        """Return the parts for `item`: `async for part in batcher.stream(item)`.

        Args:
            item: The argument of the stepper's `start`.
            timeout: Seconds until `DeadlineExceeded`, for the whole output. None: the timeout of
                the batcher.
            priority: As for `await batcher(item)`.
            buffer: How many unread parts the caller has room for.

        Returns:
            An async iterator for one event loop. Used in `async with`, it queues the item at once,
            and leaves the batch at the end of the block. The iterator raises the errors of `await
            batcher(item)`, and `ReaderTooSlow`. It raises `WorkerLost` also after its first part.

        Raises:
            TypeError: An argument has a wrong type.
            ValueError: `buffer` is below 1.
        """
        return self._streamed(item, timeout, priority, buffer)

    def stats(self) -> ContinuousStats:
        """Return the statistics of this moment."""
        return self._scheduler.stats()

    # Runners.

    def _make_runners(self, replicas: Sequence[PoolReplica]) -> list[Runner]:
        scheduler, pool = self._scheduler, self.pool
        if pool is None:
            where = self._executor(), self._caller
            return [StepRunner(scheduler, self._make, self._settings, *where)]
        self._follow(pool)
        present = {(one.replica, one.module): one for one in self._runners}
        runners: list[Runner] = []
        for replica in replicas:
            runner = present.get((replica, replica.module))
            if runner is None:
                executor = replica.pool_executor._on_worker(replica.worker)
                on_replica = executor, self._caller, replica, pool._failed
                runner = StepRunner(scheduler, self._make, self._settings, *on_replica)
            runners.append(runner)
        return runners

    def _executor(self) -> DeviceExecutor:
        if self._device is None:
            return get_executor()
        return executor_near(torch.device(self._device))

    @property
    def _runners(self) -> list[StepRunner]:
        return [one for one in self._scheduler.runners if isinstance(one, StepRunner)]

    @property
    def _listener(self) -> WeakMethod[Callable[[], None]]:
        return WeakMethod(self._pool_changed)

    def _pool_changed(self) -> None:
        pool = self.pool
        if pool is None or self._replicas is None:
            return
        with self._opening:
            self._replicas = pool._replicas
            self._scheduler.use_runners(self._make_runners(self._replicas))


def _maker(
    stepper_or_pool: Any, stepper: Callable[[Any], AnyStepper] | None, *, bounded: bool
) -> Callable[..., AnyStepper]:
    """Check the first arguments of a batcher; return the function that makes its steppers."""
    if isinstance(stepper_or_pool, ReplicaPool):
        if stepper is None:
            raise ValueError(
                "a ContinuousBatcher of a pool needs stepper=, which makes a stepper from a module"
            )
        if not callable(stepper):
            raise TypeError(
                f"stepper must make a stepper from a module, as its class does, "
                f"not {described(stepper)}"
            )
        return stepper
    if stepper is not None:
        raise ValueError("stepper= is for a pool; give the stepper itself as the first argument")
    check_stepper(stepper_or_pool, bounded=bounded)
    return partial(_same, stepper_or_pool)


def _same(stepper: AnyStepper) -> AnyStepper:
    return stepper
