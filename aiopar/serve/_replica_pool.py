"""`ReplicaPool`: a kept replica of a module per device; each batch goes whole to one of them."""

import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from functools import partial
from operator import attrgetter
from typing import Any, Generic, Self, TypeVar
from weakref import WeakMethod

import anyio
import torch
from torch import nn

from .._base.arguments import (
    check_int,
    check_timeout,
    listed,
    returns_coroutine,
    short_repr,
    shown_as,
)
from .._base.devices import Device, default_devices, is_device_error, parse_devices
from .._base.forking import ReentrantLock, live_methods
from .._base.thread_state import CallerState
from .._base.tracebacks import in_words, logger, own_traceback
from ..errors import ReplicaUnavailable, ServiceClosed, WorkerLost
from ..executor._current import get_executor
from ..executor._executor import DeviceExecutor, check_executor
from ..executor._loop_tasks import Tasks, is_cancellation
from ..executor._worker import Worker, least_loaded, retry_lost
from ..futures._future import Future, running_future
from ..futures._semaphore import Semaphore
from ..futures._waiting import cancel_scope, heeding_ctrl_c
from ..futures._wakeup import in_event_loop, ki_protected
from ..nn._module_copy import Forward, check_module, check_replicable, walk
from ._replica import (
    REBUILDING,
    Arguments,
    ModuleCall,
    OutOfService,
    PoolReplica,
    ReplicaFailed,
    ReplicaSettings,
    all_replicas,
    compile_options,
    copies_of,
    loaded_copy,
    warmup_calls,
)
from ._settings import condition, name_for
from ._stats import PoolStats

_LONGEST_DELAY = 60.0  # seconds between two tries to rebuild a replica, at most

Out_co = TypeVar("Out_co", covariant=True)


class ReplicaPool(Generic[Out_co]):
    """Kept replicas of a module; each takes whole batches: `y = await pool(batch)`.

    `DataParallel` splits a batch over all devices. A pool sends each batch to the least loaded
    device, which suits a service, where other batches keep the other devices busy. Each replica has
    a worker of its own, which runs all its calls. `torch.nn.parallel` has no such class.

    - *Weights* are replaced without a pause by `load_state_dict` and `swap`. Each answer comes
      wholly from the old or wholly from the new weights.
    - *A broken replica* is rebuilt: copied again from the pool's module, warmed up and put back in
      the background. A replica is broken when `max_failures` calls in a row have failed, and then
      the warm-up input fails too. The last of these calls is tried once more on another replica. A
      failed rebuild is tried again after 1, 2, 4, ... 60 seconds. If the pool's module itself is
      broken, only new weights help. Without a warm-up input no replica counts as broken. If the
      warm-up input succeeds, the calls had bad inputs. The next warm-up then comes after ten times
      the duration of this one, at the earliest.
    - *After a device error* (`torch.AcceleratorError`) all replicas on that device are retired: a
      process cannot get a lost device back. Their calls are tried once more on other devices.

    Replicas on one device share their parameters, also with `module` if `module` is there: an
    in-place edit of the parameters shows at once. Each replica has its own buffers, and its own
    attributes that `forward` sets. The module keeps its training mode: call `eval()` before.

    `async with` or the first use opens the pool. The pool belongs to the event loop that opens it:
    its background work runs there, under the state of the task that opened it. Calls may come from
    any event loop. `async with` opens a closed pool again, in any event loop, with new replicas of
    its latest module. Their statistics start at 0.

    Args:
        module: The module. The pool does not change it, and keeps it until it gets new weights.
        devices: One replica per entry; repeats are allowed. None: the devices of `executor`.
            Without an executor: every accelerator, or, without accelerators, the CPU once per core
            (at least twice).
        executor: Where the replicas run; the pool does not close it. None: the executor that is
            current when the pool is opened.
        warmup: What every replica runs before it is ready: a batch (perhaps a mapping, as in a
            call), a tuple of positional arguments, or a list of these. For a batcher with
            `batch_sizes`, the rows of their tensors are repeated or cut to each size.
        compile: Whether each replica runs compiled code: True, or the options of `torch.compile`,
            such as `{"dynamic": False}`. Replicas compile one at a time, each on its worker, before
            they serve, in the warm-up: so give `warmup`. Each input may be compiled there, also
            beyond Dynamo's limit of recompilations. CPU workers of the executor then always use
            equal shares of the cores, because code is compiled for a number of threads.
        inference_mode: Whether the module runs under `torch.inference_mode`. If False, it runs
            under the caller's grad mode, for gradients of inputs; weights of replicas require no
            gradients.
        max_failures: The number of consecutive failures after which the warm-up input is tried.
        name: The name in metrics. None: the name of the module's class.

    Raises:
        TypeError: An argument has a wrong type, or the module cannot be replicated (see
            `replicate`).
        ValueError: A device does not exist, `executor` has too few workers there, `max_failures` is
            below 1, or a lazy module is not initialised.

    Example:
        >>> import asyncio, aiopar, torch
        >>> async def main():
        ...     model = torch.nn.Linear(4, 2).eval()
        ...     x = torch.ones(8, 4)  # (batch=8, 4)
        ...     async with aiopar.ReplicaPool(model, ["cpu", "cpu"], warmup=x) as pool:
        ...         y = await pool(x)  # (batch=8, 2)
        ...         await pool.load_state_dict(torch.nn.Linear(4, 2).state_dict())
        ...         return y.shape, [replica.state for replica in pool.stats().replicas]
        >>> asyncio.run(main())
        (torch.Size([8, 2]), ['ready', 'ready'])
    """

    def __init__(
        self,
        module: Forward[Out_co],
        devices: Iterable[Device] | None = None,
        *,
        executor: DeviceExecutor | None = None,
        warmup: Any = None,
        compile: bool | Mapping[str, Any] = False,  # noqa: A002  # the name in torch
        inference_mode: bool = True,
        max_failures: int = 1,
        name: str | None = None,
    ) -> None:
        checked = _check_module(module)
        check_executor(executor)
        max_failures = check_int("max_failures", max_failures, at_least=1)
        self._devices = None if devices is None else parse_devices(devices)
        self._executor = executor
        # A pool is new (no replicas), opening (`_opening`), open (replicas), closing or closed
        # (`_closing`). `async with` makes a closed pool new.
        self._replicas: tuple[PoolReplica, ...] = ()
        self.name: str = name_for(module, name)
        if executor is not None:
            executor._dispatcher.groups_on(self.devices)  # raises if it has too few workers
        self._settings = ReplicaSettings(
            warmup_calls(warmup), inference_mode, max_failures, compile_options(compile)
        )
        self._module = checked  # replicas are copies of it
        self._hosted: nn.Module | None = None  # stands for the copies of the module on all hosts
        self._closing = False
        # The fields above change under this lock, and so do the states of replicas.
        # Re-entrant: a module that is dropped under the lock may have a destructor.
        self._lock = ReentrantLock()
        # When a replica comes into service or leaves it, the thread of that change ends this future
        # and calls the listeners.
        self._changed: Future[None] = running_future()
        self._listeners: set[WeakMethod[Callable[[], None]]] = set()
        # Opening and rebuilding are tasks of the loop that opens the pool.
        self._tasks: Tasks | None = None
        self._opening: Future[None] | None = None  # done when the pool is open
        self._background = Semaphore(math.inf)  # a permit per task
        self._installing = Semaphore(1)  # held to copy the module and put the copies in place

    @short_repr
    def __repr__(self) -> str:
        state = condition(self._closing, bool(self._replicas), self.ready)
        return f"{self.name!r} on {listed(self.devices)}, {state}"

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each replica."""
        if self._replicas:
            return tuple(one.worker.device for one in self._replicas)
        if self._devices is not None:
            return self._devices
        return default_devices() if self._executor is None else self._executor.devices

    @property
    def ready(self) -> bool:
        """Whether the pool takes calls: it is open, not closing, and a replica is in service."""
        return not self._closing and any(one.in_service for one in self._replicas)

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called since the pool was opened."""
        return self._closing

    @property
    def alive(self) -> bool:
        """False if every device is lost: only another process can serve again."""
        replicas = self._replicas
        return not replicas or any(one.state != "retired" for one in replicas)

    def stats(self) -> PoolStats:
        """A snapshot of every replica."""
        return PoolStats(tuple(replica.stats() for replica in self._replicas))

    @property
    def _executors(self) -> list[DeviceExecutor]:
        return [replica.pool_executor for replica in self._replicas]

    @property
    def _seconds_busy(self) -> float:
        """The shortest time that a replica in service has run its present call."""
        times = [one.worker.seconds_in_call for one in self._replicas if one.in_service]
        return min(times, default=0.0)

    # Calls.

    @returns_coroutine
    def __call__(self, *inputs: Any, **kwargs: Any) -> Coroutine[Any, Any, Out_co]:
        """Return the module's output for a batch, on the device of the replica that ran the batch.

        The caller's state is captured now. The replica is chosen when the coroutine is awaited.
        Inputs are moved to the replica's device. A mapping that is the only input becomes keyword
        arguments if `forward` takes these names; else it is one argument. A call that is cancelled
        before its start is dropped; the end of a running call is awaited first. An error of the
        module is raised with notes that name replica and device, and the types and shapes of the
        inputs.

        Raises:
            ReplicaUnavailable: No replica is in service (when awaited).
            ServiceClosed: The pool is closed (when awaited).
        """
        return shown_as(self._call(CallerState(), (inputs, kwargs)), "ReplicaPool.__call__")

    @ki_protected
    async def _call(self, caller: CallerState, arguments: Arguments) -> Any:
        await self._open(caller)
        return await retry_lost(partial(self._try_twice, caller, arguments))

    async def _try_twice(self, caller: CallerState, arguments: Arguments) -> Any:
        """Return the output of a replica; of another one, if the first is broken or lost."""
        cause: BaseException | None = None  # the error of the first try
        failure: BaseException | None = None
        try:
            while True:
                changed = self._changed  # read first: a change may come after the look
                replica = self._pick(cause)
                if replica is None:
                    await changed
                    continue
                async with replica.in_flight:
                    try:
                        run = caller, ModuleCall.run, arguments
                        return await replica.call(caller, replica.answer, *run)
                    except Exception as error:
                        failure = error.__cause__ if isinstance(error, ReplicaFailed) else error
                        if failure is error and not is_device_error(error):
                            raise
                        self._failed(replica, error)
                # Without a failure the replica went out of service before the call began.
                if failure is not None:
                    if cause is not None or isinstance(failure, WorkerLost):
                        raise failure
                    cause = failure
        finally:
            # The traceback of an error refers to this frame.
            cause = failure = None

    # New weights.

    @returns_coroutine
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Coroutine[Any, Any, Any]:
        """Serve with other weights: `swap` to a copy of the module that has loaded `state_dict`.

        Mirrors `torch.nn.Module.load_state_dict`. Differences: it is awaited. If anything fails,
        the pool stays as it is. There is no `assign`: values are copied.

        Args:
            state_dict: Parameters and buffers, on any device.
            strict: Whether the keys must be those of the module.

        Returns:
            `missing_keys` and `unexpected_keys`, as in torch.

        Raises:
            TypeError: `state_dict` is not a mapping.
            RuntimeError: `state_dict` does not fit the module (torch's message).
            ReplicaUnavailable: Every replica is retired.
            ServiceClosed: The pool is closed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"expected a state_dict, got {type(state_dict).__name__}")
        call = self._replace(CallerState(), None, state_dict, strict)
        return shown_as(call, "ReplicaPool.load_state_dict")

    @returns_coroutine
    def swap(self, module: nn.Module) -> Coroutine[Any, Any, None]:
        """Serve with another module: copy it, warm the copies up, then put them in place.

        Calls that have started end with the old module. When `swap` returns, every later call gets
        the new module on every replica. The copies are warmed up one after the other on the
        workers, between calls. If a warm-up fails, `swap` raises the module's own error, and the
        pool stays as it is. Concurrent swaps are done one after the other.

        Args:
            module: The new module. The pool does not change it, and keeps it until the next `swap`.

        Raises:
            TypeError: `module` is not a module, or cannot be replicated.
            ValueError: `module` is lazy and not initialised.
            ReplicaUnavailable: Every replica is retired (when awaited).
            ServiceClosed: The pool is closed (when awaited).
        """
        _check_module(module)
        return shown_as(self._replace(CallerState(), module), "ReplicaPool.swap")

    async def _replace(self, caller: CallerState, module: nn.Module | None, *load: Any) -> Any:
        """Serve with `module`; None: with a copy of the present module, made by `loaded_copy`."""
        keys = None
        await self._open(caller)
        self._forget_closed_loop()
        async with self._installing:
            self._check_open()
            if module is None:
                loaded = await self._candidates()[0].call(caller, loaded_copy, self._module, *load)
                module, keys = loaded
            # A replica that is being rebuilt gets the new module by its rebuild. If no replica
            # serves, all replicas get the module here.
            copies = await self._prepare(caller, module, self._candidates())
            # On a worker, because this call may free the old weights.
            await self._candidates()[0].call(caller, self._install, module, copies)
        return keys

    async def _prepare(
        self,
        caller: CallerState,
        module: nn.Module,
        replicas: Sequence[PoolReplica],
        *,
        fresh: bool = True,
    ) -> dict[PoolReplica, nn.Module]:
        """Copy `module` for these replicas, and warm the copies up, one after the other.

        Args:
            caller: The state that the module runs under.
            module: The module; or the object that stands for its copies on hosts, to make more
                copies.
            replicas: At least one replica. The other replicas can serve meanwhile.
            fresh: Whether hosts get copies that no host has had.
        """
        copies = await replicas[0].call(caller, copies_of, module, replicas, fresh)
        for replica, copied in zip(replicas, copies, strict=True):
            try:
                # If the host was lost, the same worker tries again: it starts a new host first.
                await retry_lost(partial(replica.call, caller, replica.prepare, copied, caller))
            except Exception as error:
                if is_device_error(error):
                    self._failed(replica, error)
                raise
        return dict(zip(replicas, copies, strict=True))

    # Opening and rebuilding.

    @ki_protected
    async def _open(self, caller: CallerState | None = None) -> None:
        """Make the replicas ready, or wait until another task has done so."""
        self._check_open()
        while not self._replicas:
            if not in_event_loop():
                raise RuntimeError("open the pool in an event loop first: `async with pool`")
            await self._start_opening(caller or CallerState())
            self._check_open()

    async def _open_for(self, sizes: Set[int]) -> None:
        """Open; each replica then runs the warm-up input in these batch sizes before it serves."""
        with self._lock:
            new = sizes - self._settings.batch_sizes
            self._settings.batch_sizes |= sizes
        await self._open()
        if not new and all(sizes <= one.warmed_up for one in self._replicas if one.in_service):
            return
        caller = CallerState()
        self._forget_closed_loop()
        async with self._installing:
            for replica in self._replicas:
                module = replica.module  # None: the next copy is warmed up in these sizes
                if module is not None and not sizes <= replica.warmed_up:
                    await retry_lost(partial(replica.call, caller, replica.prepare, module, caller))

    def _start_opening(self, caller: CallerState) -> Future[None]:
        """Return a future that is done when the pool is open; start to open it unless a task does.

        A task of its own opens the pool, so a cancelled caller does not stop it for other callers.
        """
        self._forget_closed_loop()
        with self._lock:
            if self._opening is not None:
                return self._opening
            executor = self._executor or caller.context().run(get_executor)
            # Pools that share an executor take different workers as long as there are enough.
            taken = [replica.worker for replica in all_replicas]
            workers = executor._one_for_each(self.devices, taken)
            numbered = enumerate(workers)
            replicas = [PoolReplica(n, executor, one, self._settings) for n, one in numbered]
            pool = executor._dispatcher.pool
            pool.followers.add(WeakMethod(self._follow, pool.followers.discard))
            if self._settings.compile is not None:
                pool.equalize_shares()
            tasks = self._tasks = Tasks(caller)
            opening = self._opening = running_future()
        open_replicas = partial(self._open_replicas, opening, replicas)
        tasks.spawn(open_replicas, partial(self._opening_ended, opening))
        return opening

    async def _open_replicas(self, opening: Future[None], replicas: Sequence[PoolReplica]) -> None:
        async with self._background:
            try:
                module = self._module
                self._install(module, await self._prepare(CallerState(), module, replicas))
            except BaseException as error:  # the waiting callers raise it
                if is_cancellation(error):
                    raise
                self._opening_ended(opening, own_traceback(error))
            finally:
                del opening  # it holds the error, whose traceback refers to this frame

    def _opening_ended(self, opening: Future[None], error: BaseException | None = None) -> None:
        with self._lock:
            if self._opening is not opening:
                return
            self._opening = None  # after an error the next use tries again
        if error is None:
            opening.set_result(None)
        else:
            opening.set_exception(error)

    def _forget_closed_loop(self) -> None:
        """If the loop that opened the pool is closed, drop its tasks, which will never end."""
        with self._lock:
            if self._tasks is None or not self._tasks.finished:
                return
            opening = self._opening
            self._background, self._installing = Semaphore(math.inf), Semaphore(1)
        if opening is not None:
            self._opening_ended(opening)  # callers in other loops open the pool again

    def _failed(self, replica: PoolReplica, error: BaseException) -> None:
        """Take a replica out of service after a `ReplicaFailed`, or all replicas on a lost device.

        Called from any thread.
        """
        state: OutOfService = "rebuilding"
        if is_device_error(error):
            state = "retired"
        elif isinstance(error.__cause__, WorkerLost):
            state = "returning"
        with self._lock:
            out: list[PoolReplica] = []
            if state == "retired":
                same = [one for one in self._replicas if one.worker.device == replica.worker.device]
                out += [one for one in same if one.state not in ("retired", "closed")]
            # Else an earlier error took the replica out; it may even be rebuilt already.
            elif replica.module is not None and replica.module is getattr(error, "module", None):
                out.append(replica)
            for one in out:
                one.take_out(state)
        if out:
            _log(replica, out, error)
            self._notify()
            if state != "retired" and self._tasks is not None:
                fresh = state == "rebuilding"
                self._tasks.spawn(partial(self._rebuild, replica, fresh=fresh))

    def _host_lost(self, worker: Worker, how: WorkerLost) -> None:
        """Take the replica on `worker`, whose host was lost, out of service; from any thread."""
        for replica in self._replicas:
            module = replica.module
            if replica.worker is worker and module is not None:
                error = ReplicaFailed("its host was lost", module)
                error.__cause__ = how
                self._failed(replica, error)

    async def _rebuild(self, replica: PoolReplica, *, fresh: bool) -> None:
        """Put a replica into service again; for `fresh` see `_prepare`."""
        caller, delay = CallerState(), 1.0
        async with self._background:
            while True:
                try:
                    if not replica.worker.shares_memory:
                        # An empty call starts a lost host. This may take long, and a swap must not
                        # wait for it.
                        await replica.call(caller, bool)
                    async with self._installing:
                        if replica.state not in REBUILDING:
                            return  # the pool has retired or closed it, or a swap has rebuilt it
                        module = self._module
                        source = self._hosted or module
                        copies = await self._prepare(caller, source, [replica], fresh=fresh)
                        self._install(module, copies)
                        replica.rebuilds += 1
                        return
                except BaseException as error:  # a module may raise any error
                    if isinstance(error, GeneratorExit) or is_cancellation(error):
                        raise  # the loop was closed, or `aclose` cancels this task
                    if replica.state not in REBUILDING:
                        return
                    logger.error("%r: next try in %g s", replica, delay, exc_info=error)
                    replica.take_out("rebuilding")
                    self._notify()
                await anyio.sleep(delay)
                delay = min(2 * delay, _LONGEST_DELAY)

    async def _follow(self) -> None:
        """Have replicas on the present workers of the executor, which was resized."""
        async with self._installing:
            replicas = self._replicas
            if not replicas or self._closing:
                return
            executor = replicas[0].pool_executor
            workers = list(executor._dispatcher.workers)
            stay = [one for one in replicas if one.worker in workers]
            gone = [one for one in replicas if one.worker not in workers]
            module, copies = self._module, dict[PoolReplica, nn.Module]()
            served, index = [one.worker for one in stay], replicas[-1].index
            free = [worker for worker in workers if worker not in served]
            if free and (self._devices is None or not stay):
                numbered = enumerate(free, index + 1)
                new = [PoolReplica(n, executor, one, self._settings) for n, one in numbered]
                copies = await self._prepare(CallerState(), self._hosted or module, new)
            with self._lock:
                if self._closing:
                    return
                self._replicas = (*stay, *copies)
                for one in gone:
                    one.take_out("retired")  # calls in its queue go to other replicas
            self._install(module, copies)
            for one in gone:
                await one.in_flight.wait_idle()

    def _cancel_background(self) -> None:
        self._forget_closed_loop()
        if self._tasks is not None:
            self._tasks.cancel()

    @ki_protected
    async def aclose(
        self,
        *,
        drain: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  # the pool closes after the timeout
    ) -> None:
        """Refuse new calls, wait for the calls in flight, then drop the replicas.

        `aclose` may be called again. The executor is not closed. The module is kept: `async with`
        opens the pool again.

        Args:
            drain: Whether to wait for calls in flight. If False, calls that have not started raise
                `ServiceClosed`, and running calls end as usual.
            timeout: The longest wait, in seconds.
        """
        timeout = check_timeout(timeout)
        with self._lock:
            self._closing = True
            # `async with` may open the pool again before `aclose` ends.
            replicas = self._replicas
        try:
            with cancel_scope(timeout), heeding_ctrl_c():
                self._cancel_background()
                await self._background.wait_idle()
                # In a loop, because a call that fails on a replica goes to another replica.
                while drain and (busy := [one for one in replicas if one.in_flight.held]):
                    await busy[0].in_flight.wait_idle()
        finally:
            with self._lock:
                for replica in replicas:
                    if replica.state != "retired":
                        replica.take_out("closed")
            self._notify()

    async def __aenter__(self) -> Self:
        if self._closing:
            self._forget_closed_loop()
            async with self._installing:  # a swap that has begun fails first
                with self._lock:
                    if self._closing:  # else another task has made the pool new
                        self._closing, self._replicas = False, ()
        try:
            await self._open()
        except BaseException as error:
            if not isinstance(error, Exception):  # cancelled: no caller waits for the pool
                self._cancel_background()
                if not isinstance(error, GeneratorExit):  # a closed coroutine must not wait
                    await self._background.wait_idle()
            raise
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        await self.aclose(drain=exc_type is None)

    # The replicas, and which of them are in service.

    def _check_open(self) -> None:
        if self._closing:
            raise ServiceClosed("the pool is closed")

    def _pick(self, cause: BaseException | None) -> PoolReplica | None:
        """Return the least loaded replica in service, for a call that has failed with `cause`.

        None: no replica is in service, but one returns soon.
        """
        replica = least_loaded(one for one in self._replicas if one.in_service)
        if replica is not None or any(one.state == "returning" for one in self._replicas):
            return replica
        states = [replica.state for replica in self._replicas]
        if "closed" in states:
            raise ServiceClosed("the pool was closed before the call began")
        retired = states.count("retired")
        raise ReplicaUnavailable(
            f"no replica is in service: {len(states) - retired} rebuilding, {retired} retired"
        ) from cause

    def _candidates(self) -> list[PoolReplica]:
        """The replicas in service, the least loaded first; without any, those being rebuilt."""
        usable = [one for one in self._replicas if one.state != "retired"]
        if not usable:
            raise ReplicaUnavailable("no replica can serve again: all are retired")
        return sorted([one for one in usable if one.in_service] or usable, key=attrgetter("load"))

    def _install(self, module: nn.Module, copies: Mapping[PoolReplica, nn.Module]) -> None:
        """Serve with these copies of `module` from the next call on."""
        with self._lock:
            self._check_open()
            self._module = module
            self._replicas = self._replicas or tuple(copies)
            for replica, copied in copies.items():
                self._hosted = None if replica.worker.shares_memory else copied
                if replica.state != "retired":
                    listeners = replica.worker.on_host_lost
                    listeners.add(WeakMethod(self._host_lost, listeners.discard))
                    replica.install(copied)
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            changed, self._changed = self._changed, running_future()
        changed.set_result(None)
        for listener in live_methods(self._listeners):
            listener()


def _check_module(module: object) -> nn.Module:
    checked = check_module(module)
    check_replicable(checked, walk(checked))
    return checked


def _log(replica: PoolReplica, out: list[PoolReplica], error: BaseException) -> None:
    cause = error.__cause__ if isinstance(error, ReplicaFailed) else error
    what = f"replica {replica.index} on device {replica.worker.device} is rebuilt"
    if is_device_error(error):
        indices = ", ".join(str(one.index) for one in out)
        what = f"device {replica.worker.device} is lost, with replicas {indices}"
    # As text: a log record that keeps the error would keep the weights in its traceback.
    logger.error("%s: %s", what, in_words(error if cause is None else cause))
