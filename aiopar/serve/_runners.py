"""Which scheduler and runners a `Batcher` has, for the kind of function that it was given."""

from collections.abc import Callable
from itertools import cycle, islice
from typing import Any
from weakref import WeakMethod

import torch

from .._caller import CallerState
from .._default import executor_near, get_executor
from .._executor import DeviceExecutor
from ._async_runner import AsyncBatching, AsyncRunner
from ._async_stream_runner import AsyncStreamRunner
from ._compute import ComputeFunction, ComputeGenerator, ComputeReplica
from ._kind import Kind
from ._loop_scheduler import LoopScheduler
from ._replica_pool import ReplicaPool
from ._runner import WorkerRunner
from ._schedule import Runner
from ._scheduler import Scheduler
from ._settings import BatcherSettings
from ._stream_runner import StreamRunner


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
