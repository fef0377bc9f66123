"""`ReplicaPool`: a kept replica of a module on every device, a whole batch to one of them."""

import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self
from weakref import WeakMethod

import anyio
import torch
from torch import nn

from .._base.arguments import check_int, check_number, listed, returns_coroutine, short_repr
from .._base.devices import Device, default_devices, is_device_error, parse_devices
from .._base.thread_state import CallerState
from .._base.tracebacks import in_words, logger, own_traceback
from ..errors import ReplicaFailed, ReplicaUnavailable, ServiceClosed
from ..executor._current import get_executor
from ..executor._executor import DeviceExecutor, check_executor
from ..executor._loop_tasks import Tasks, is_cancellation
from ..futures._future import Future, running_future
from ..futures._wakeup import in_event_loop
from ..nn._module_copy import check_module, check_replicable, walk
from ._replica import (
    FairLock,
    InFlight,
    PoolReplica,
    ReplicaSettings,
    bind,
    copies_of,
    loaded_copy,
    warmup_calls,
)
from ._settings import condition, name_for
from ._stats import PoolStats


class ReplicaSet:
    """The replicas of one pool. Who serves changes under a lock, and is read without.

    Attributes:
        module: What replicas are made of.
        replicas: All of them; none before `begin`.
        closing: Whether new calls are refused.
        listeners: Methods, called in the thread where it happens, after a replica has come into
            service or left it. What they are of is not kept.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module | None = module
        self.replicas: tuple[PoolReplica, ...] = ()
        self.closing = False
        self.listeners: set[WeakMethod[Callable[[], None]]] = set()
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether calls are taken, and there is a replica for them."""
        return not self.closing and any(map(_is_in_service, self.replicas))

    @property
    def alive(self) -> bool:
        """Whether there is a device that is not lost."""
        return not self.replicas or any(map(_is_not_retired, self.replicas))

    def check_open(self) -> None:
        """Raise if new calls are refused."""
        if self.closing:
            raise ServiceClosed("the pool is closed")

    def current(self) -> nn.Module:
        """What replicas are made of; raises if the pool was closed."""
        module = self.module
        if module is None:
            raise ServiceClosed("the pool is closed")
        return module

    def usable(self) -> PoolReplica:
        """One whose device is not lost: the worker that is free first, of one in service if any is.

        Raises:
            ReplicaUnavailable: There is none.
        """
        for is_usable in (_is_in_service, _is_not_retired):
            if found := [*filter(is_usable, self.replicas)]:
                return min(found, key=_load)
        raise ReplicaUnavailable("no replica is in service, nor ever will be: all are retired")

    def begin(self, copies: Mapping[PoolReplica, nn.Module]) -> None:
        """Serve with these replicas and their modules."""
        with self._lock:
            self.check_open()
            for replica, copy in copies.items():
                replica.install(copy)
            self.replicas = tuple(copies)
        self._tell()

    def pick(
        self, cause: BaseException | None = None, failed: PoolReplica | None = None
    ) -> PoolReplica:
        """The replica in service that has the fewest calls before it.

        Args:
            cause: What the call has failed with before.
            failed: Where. It may be back by now, and fail again: another is better.

        Raises:
            ReplicaUnavailable: There is none, by reason of `cause`.
            ServiceClosed: The pool was closed meanwhile.
        """
        if serving := [*filter(_is_in_service, self.replicas)]:
            return min(serving, key=lambda one: (one is failed, _load(one)))
        states = [replica.state for replica in self.replicas]
        if "closed" in states:
            raise ServiceClosed("the pool was closed before the call began")
        rebuilding, retired = states.count("rebuilding"), states.count("retired")
        raise ReplicaUnavailable(
            f"no replica is in service: {rebuilding} rebuilding, {retired} retired"
        ) from cause

    def replace(
        self, module: nn.Module, copies: Mapping[PoolReplica, nn.Module]
    ) -> list[PoolReplica]:
        """Serve with `copies` of another module, from the next call on, on all replicas.

        Called on a worker: it may be what frees the weights of before.

        Returns:
            Those that need a copy too, without which nothing is done: who serves, or, where nobody
            does, who may serve again. Empty: it is done.
        """
        with self._lock:
            self.check_open()
            lacking = [one for one in self.replicas if one.in_service and one not in copies]
            if not lacking and not copies:
                lacking = [one for one in self.replicas if one.state == "rebuilding"]
            if lacking:
                return lacking
            # Who is being rebuilt meanwhile, of the former module, finds this and begins again.
            self.module = module
            for replica, copy in copies.items():
                if _is_not_retired(replica):
                    replica.install(copy)
        self._tell()
        return []

    def reinstate(self, replica: PoolReplica, copy: nn.Module, module: nn.Module) -> bool:
        """Let a replica serve again, with a copy of `module`; False if that is out of date."""
        with self._lock:
            if replica.state != "rebuilding":
                return True  # retired, closed, or another module was put in place
            if self.module is not module:
                return False
            replica.install(copy)
            replica.rebuilds += 1
        self._tell()
        return True

    def take_out(self, replica: PoolReplica, error: BaseException) -> bool:
        """`error` came from `replica`; whether it is out of service now and to be rebuilt.

        A device error retires every replica on the device.
        """
        device_lost = is_device_error(error)
        with self._lock:
            if device_lost:
                lost = [one for one in self.replicas if _is_lost_with(one, replica.device)]
            elif replica.in_service and replica.module is getattr(error, "module", None):
                lost = [replica]
            else:
                lost = []  # of several calls that failed one was the first; it may even be back
            for one in lost:
                one.leave("retired" if device_lost else "rebuilding")
        if lost:
            _log(replica, lost, error)
            self._tell()
        return bool(lost) and not device_lost

    def let_go(self) -> None:
        """Nobody serves any more, and nothing keeps a module alive."""
        with self._lock:
            self.closing = True
            self.module = None
            for replica in self.replicas:
                if _is_not_retired(replica):
                    replica.leave("closed")
        self._tell()

    def _tell(self) -> None:
        for reference in tuple(self.listeners):
            listener = reference()
            if listener is not None:
                listener()
            else:
                self.listeners.discard(reference)


def _is_in_service(replica: PoolReplica) -> bool:
    return replica.in_service


def _is_not_retired(replica: PoolReplica) -> bool:
    return replica.state != "retired"


def _load(replica: PoolReplica) -> float:
    return replica.worker.load


def _is_lost_with(replica: PoolReplica, device: torch.device) -> bool:
    return replica.device == device and replica.state in ("ready", "rebuilding")


def _log(replica: PoolReplica, lost: list[PoolReplica], error: BaseException) -> None:
    # In words: a record that kept the error would keep the weights in its traceback.
    cause = error.__cause__ if isinstance(error, ReplicaFailed) else None
    what = in_words(error if cause is None else cause)
    if is_device_error(error):
        indices = ", ".join(str(one.index) for one in lost)
        logger.error("device %s is lost, with replicas %s: %s", replica.device, indices, what)
    else:
        logger.error("replica %d on device %s is rebuilt: %s", replica.index, replica.device, what)


LONGEST_DELAY = 60.0


def retry_delays() -> Iterator[float]:
    """Seconds between the tries to rebuild a replica: 1, 2, 4, ... 60, 60, ..."""
    delay = 1.0
    while True:
        yield delay
        delay = min(2 * delay, LONGEST_DELAY)


class Upkeep:
    """The tasks of one pool, on the event loop that opens it; calls under the state of who does.

    They are no part of any call: who gives up waiting for the pool to open leaves it to the others.
    """

    def __init__(self, replicas: ReplicaSet) -> None:
        self._set = replicas
        self._lock = threading.Lock()
        self._opened_by: tuple[Tasks, CallerState] | None = None
        self._opening: Future[None] | None = None
        self._running = InFlight()

    def open(
        self, caller: CallerState, bind: Callable[[CallerState], Sequence[PoolReplica]]
    ) -> Future[None]:
        """Begin to make the replicas ready, unless that is under way; called on a loop's thread.

        Returns:
            Done when they serve, when that was given up, or with the error that it failed with.
        """
        self._forget_lost()
        with self._lock:
            if self._opening is not None:
                return self._opening
            replicas = bind(caller)
            tasks = Tasks(caller)
            self._opened_by = tasks, caller
            opening = self._opening = running_future()
        begin = partial(self._begin, opening, caller, replicas)
        tasks.spawn(begin, partial(self._opened, opening))
        return opening

    async def _begin(
        self, opening: Future[None], caller: CallerState, replicas: Sequence[PoolReplica]
    ) -> None:
        with self._running:
            try:
                copies = await self.prepare(caller, self._set.current(), replicas)
                self._set.begin(copies)
            except BaseException as error:  # whatever it is, they get it who wait
                if is_cancellation(error):
                    raise
                self._opened(opening, own_traceback(error))
            finally:
                del opening  # it holds the error, whose traceback leads here

    def _opened(self, opening: Future[None], error: BaseException | None = None) -> None:
        with self._lock:
            if self._opening is not opening:
                return
            self._opening = None  # who comes after a failure tries again
        if error is None:
            opening.set_result(None)
        else:
            opening.set_exception(error)

    def _forget_lost(self) -> None:
        """If the loop was closed that has opened it: what ran there never ends."""
        with self._lock:
            if self._opened_by is None or not self._opened_by[0].finished:
                return
            opening, self._opening, self._running = self._opening, None, InFlight()
        if opening is not None:
            opening.set_result(None)  # who waits for it on another loop looks again

    async def prepare(
        self, caller: CallerState, module: nn.Module, replicas: Sequence[PoolReplica]
    ) -> dict[PoolReplica, nn.Module]:
        """Copies of `module`, warmed up where they are to serve.

        One replica after the other: those that serve, go on but for one.
        """
        devices = [replica.device for replica in replicas]
        copies = await replicas[0].call(caller, copies_of, module, devices)
        for replica, copy in zip(replicas, copies, strict=True):
            try:
                await replica.call(caller, replica.prepare, copy)
            except Exception as error:
                if is_device_error(error):
                    self.failed(replica, error)
                raise
        return dict(zip(replicas, copies, strict=True))

    def failed(self, replica: PoolReplica, error: BaseException) -> None:
        """Take `replica` out of service and rebuild it; from any thread."""
        if self._set.take_out(replica, error) and self._opened_by is not None:
            tasks, caller = self._opened_by
            tasks.spawn(partial(self._rebuild, caller, replica), _nothing)

    async def _rebuild(self, caller: CallerState, replica: PoolReplica) -> None:
        with self._running:
            for delay in retry_delays():
                try:
                    while not await self._renew(caller, replica):
                        pass  # the pool has got another module meanwhile
                    return
                except GeneratorExit:  # its loop was closed
                    raise
                except BaseException as error:  # whatever it is, it may get better
                    if is_cancellation(error):
                        raise
                    if replica.state != "rebuilding":
                        return
                    logger.error("%r: next try in %g s", replica, delay, exc_info=error)
                await anyio.sleep(delay)

    async def _renew(self, caller: CallerState, replica: PoolReplica) -> bool:
        if self._set.closing:
            return True
        module = self._set.current()
        copies = await self.prepare(caller, module, [replica])
        return self._set.reinstate(replica, copies[replica], module)

    async def stop(self) -> None:
        """Give up what is under way."""
        self._forget_lost()
        if self._opened_by is not None:
            tasks, _ = self._opened_by
            tasks.cancel()
        await self._running.ended()


def _nothing() -> None:
    """What follows when a rebuild has ended."""


class ReplicaPool:
    """Kept replicas of a module, each of which takes whole batches: `y = await pool(batch)`.

    Where `DataParallel` splits a batch over all devices, a pool sends each batch to one of them,
    the least loaded: for a service, where there is always a next batch. Every replica has one
    worker to itself, on which all its calls run. `torch.nn.parallel` has no such thing.

    - *Weights* are changed without a pause, by `load_state_dict` and `swap`: an answer comes wholly
      from the old or wholly from the new ones.
    - *A replica that fails* `max_failures` times in a row, and then on the warm-up input too (so
      that it is not the input), is taken out. Its call is tried once more on another replica. It is
      rebuilt in the background: copied afresh from the pool's module, warmed up, and put back; if
      that fails, it is tried again after 1, 2, 4, ... 60 s. What is broken in the pool's module
      itself, a rebuild brings back: then only new weights help. Without a warm-up input a replica
      is never blamed.
    - *After a device error* (`torch.AcceleratorError`) all replicas on that device are retired for
      good: a process cannot get a lost device back. Their calls are tried once more elsewhere.

    The replicas on one device share their parameters, with `module` too if it is there: an edit of
    these in place shows at once. Buffers, and what `forward` sets on `self`, each has for itself.
    The module is used in the mode that it is in: call `eval()` before.

    The pool is opened by `async with`, or by its first use, and belongs to the event loop that
    opens it: what it does in the background is done there, under the state of who opened it. Calls
    may come from any loop.

    Args:
        module: The module. It is not changed, and kept until the pool is closed or has another.
        devices: One replica an entry; repeats are allowed. None: those of `executor`; without one,
            every accelerator, or, where there is none, the CPU once for each core (at least twice).
        executor: Where the replicas run. None: the executor that is current when the pool is
            opened. It is not closed with the pool.
        warmup: What every replica runs before it is ready: a batch, a tuple of positional
            arguments, or a list of several such.
        inference_mode: Whether the module runs under `torch.inference_mode`; else under the grad
            mode of the caller, for gradients of inputs: weights of replicas require none.
        max_failures: After how many failures in a row a replica is tried on the warm-up input.
        name: What it is called in metrics. None: as the class of the module.

    Raises:
        TypeError: An argument is of a wrong type, or the module cannot be replicated (see
            `replicate`).
        ValueError: There is no such device, `executor` has too few workers there, `max_failures` is
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
        module: nn.Module,
        devices: Iterable[Device] | None = None,
        *,
        executor: DeviceExecutor | None = None,
        warmup: Any = None,
        inference_mode: bool = True,
        max_failures: int = 1,
        name: str | None = None,
    ) -> None:
        _check_module(module)
        max_failures = check_int("max_failures", max_failures, at_least=1)
        self.devices: tuple[torch.device, ...] = _parse_devices(devices, executor)
        self.name: str = name_for(module, name)
        if executor is not None:
            executor._dispatcher.groups_on(self.devices)  # raises where workers lack
        self._executor = executor
        self._settings = ReplicaSettings(warmup_calls(warmup), inference_mode, max_failures)
        self._set = ReplicaSet(module)
        self._upkeep = Upkeep(self._set)
        self._changing = FairLock()
        self._calls = InFlight()

    @short_repr
    def __repr__(self) -> str:
        state = condition(self._set.closing, bool(self._set.replicas), self.ready)
        return f"{self.name!r} on {listed(self.devices)}, {state}"

    @returns_coroutine
    def __call__(self, *inputs: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """The module's output for a batch, on the device of the replica that it went to.

        The caller's state is captured here; the replica is chosen when it is awaited. Inputs are
        moved to its device. Cancelled, a call that has not started is dropped, and one that runs is
        awaited first.

        Raises, when awaited: what the module raises, with a note that names replica and device.

        Raises:
            ReplicaUnavailable: No replica is in service (when awaited).
            ServiceClosed: The pool is closed (when awaited).
        """
        return self._call(CallerState(), inputs, kwargs)

    async def _call(
        self, caller: CallerState, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        cause: BaseException | None = None
        failed: PoolReplica | None = None
        with self._calls:
            await self._open(caller)
            try:
                while True:
                    replica = self._set.pick(cause, failed)
                    output, lost = await self._attempt(replica, caller, inputs, kwargs)
                    if lost is None:
                        return output
                    error = lost.__cause__ if isinstance(lost, ReplicaFailed) else lost
                    if error is None:
                        continue  # it went out of service while the call was in its queue
                    if cause is not None:
                        raise error
                    cause, failed = error, replica
            finally:
                # An error's traceback holds this frame, which must not hold the error.
                cause = lost = error = None

    async def _attempt(
        self,
        replica: PoolReplica,
        caller: CallerState,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Exception | None]:
        """The output; or None, and the error that tells of a lost replica, which is dealt with."""
        with replica.in_flight:
            try:
                return await replica.call(caller, replica.answer, inputs, kwargs, True), None
            except Exception as error:
                if not isinstance(error, ReplicaFailed) and not is_device_error(error):
                    raise
                self._failed(replica, error)
                return None, error

    def _failed(self, replica: PoolReplica, error: BaseException) -> None:
        """A `ReplicaFailed` or device error came from `replica`; called from any thread."""
        self._upkeep.failed(replica, error)

    async def _open(self, caller: CallerState | None = None) -> None:
        """Make the replicas ready, unless they are; who comes meanwhile waits for it.

        Raises:
            ServiceClosed: The pool is closed.
        """
        self._set.check_open()
        while not self._set.replicas:
            if not in_event_loop():
                raise RuntimeError("open the pool in an event loop first: `async with pool`")
            await self._upkeep.open(caller or CallerState(), self._bind)
            self._set.check_open()

    def _bind(self, caller: CallerState) -> tuple[PoolReplica, ...]:
        executor = self._executor or caller.context().run(get_executor)
        return bind(executor, self.devices, self._settings)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> Coroutine[Any, Any, Any]:
        """Serve with other weights: `swap` to a copy of the module that has loaded `state_dict`.

        Mirrors `torch.nn.Module.load_state_dict`. Differences: it is awaited; no module is changed
        but the copy, and if anything fails, nothing is; there is no `assign`, values are copied.

        Args:
            state_dict: Parameters and buffers, on any device.
            strict: Whether its keys must be those of the module.

        Returns:
            `missing_keys` and `unexpected_keys`, as in torch.

        Raises:
            TypeError: `state_dict` is no mapping.
            RuntimeError: It does not fit the module (torch's message).
            ReplicaUnavailable: Every replica is retired.
            ServiceClosed: The pool is closed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"expected a state_dict, got {type(state_dict).__name__}")
        return self._load_state_dict(CallerState(), state_dict, strict)

    async def _load_state_dict(
        self, caller: CallerState, state_dict: Mapping[str, Any], strict: bool
    ) -> Any:
        await self._open(caller)
        async with self._changing.held():
            replica, module = self._set.usable(), self._set.current()
            loaded, keys = await replica.call(caller, loaded_copy, module, state_dict, strict)
            await self._replace(caller, loaded)
        return keys

    def swap(self, module: nn.Module) -> Coroutine[Any, Any, None]:
        """Serve with another module: replicas of it are made, warmed up, and put in place.

        Calls that have started end with the module they started with; when this returns, every
        call that starts gets the new one, whichever replica it goes to. Replicas are made aside and
        warmed up one after the other on their workers, between calls. If one of them fails,
        everything stays as it is. Swaps that come together are done one after the other.

        Args:
            module: It is not changed, and kept as the one before was.

        Raises, when awaited: what the new module raises in the warm-up.

        Raises:
            TypeError: It is no module, or cannot be replicated.
            ValueError: It is lazy and not initialised.
            ReplicaUnavailable: Every replica is retired (when awaited).
            ServiceClosed: The pool is closed (when awaited).
        """
        _check_module(module)
        return self._swap(CallerState(), module)

    async def _swap(self, caller: CallerState, module: nn.Module) -> None:
        await self._open(caller)
        async with self._changing.held():
            await self._replace(caller, module)

    async def _replace(self, caller: CallerState, module: nn.Module) -> None:
        copies: dict[PoolReplica, nn.Module] = {}
        # More than once where a replica comes back meanwhile, with the weights of before.
        while lacking := await self._set.usable().call(caller, self._set.replace, module, copies):
            copies |= await self._upkeep.prepare(caller, module, lacking)

    @property
    def _replicas(self) -> tuple[PoolReplica, ...]:
        """All replicas, in the order of `devices`; none before the pool is open."""
        return self._set.replicas

    @property
    def _executors(self) -> list[DeviceExecutor]:
        """Those that its replicas run on; for metrics."""
        return [replica.executor for replica in self._set.replicas]

    @property
    def _listeners(self) -> set[WeakMethod[Callable[[], None]]]:
        """Called without arguments, from any thread, when a replica came into service or left."""
        return self._set.listeners

    @property
    def ready(self) -> bool:
        """Whether a call would be taken: open, not closing, and a replica in service."""
        return self._set.ready

    @property
    def alive(self) -> bool:
        """False when every device is retired: only another process can serve again."""
        return self._set.alive

    def stats(self) -> PoolStats:
        """What every replica has done, and how it is, now."""
        return PoolStats(tuple(replica.stats() for replica in self._set.replicas))

    async def aclose(
        self,
        *,
        drain: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  # what is done after it is the pool's
    ) -> None:
        """Take no more calls, wait for those that are there, and let go of all weights.

        Once more does no harm. The executor is not closed.

        Args:
            drain: Whether to wait for calls in flight. Otherwise those that have not started raise
                `ServiceClosed`, and those that run end as they would.
            timeout: How many seconds to wait, at most.
        """
        if timeout is not None:
            timeout = check_number("timeout", timeout, zero=True)
        self._set.closing = True
        try:
            with anyio.move_on_after(timeout):
                await self._upkeep.stop()
                if drain:
                    await self._calls.ended()
                    for replica in self._set.replicas:
                        await replica.in_flight.ended()  # a batcher's batches are no calls
        finally:
            self._set.let_go()

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except Exception:
            raise
        except BaseException:  # cancelled: it would be opened for nobody
            await self._upkeep.stop()
            raise
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        await self.aclose(drain=exc_type is None)


def _check_module(module: nn.Module) -> None:
    check_module(module)
    check_replicable(module, walk(module))


def _parse_devices(
    devices: Iterable[Device] | None, executor: DeviceExecutor | None
) -> tuple[torch.device, ...]:
    check_executor(executor)
    if devices is not None:
        return parse_devices(devices)
    return default_devices() if executor is None else executor.devices
