"""One replica of a `ReplicaPool`: a module on a device, and the one worker it runs on."""

import copy
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import torch
from torch import Tensor, nn

from .._base.devices import current_stream, is_accelerator, is_device_error, share_memory
from .._base.forking import Registry
from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once
from .._base.tree import map_tensors
from ..errors import InvalidInput, ReplicaFailed, ServiceClosed
from ..executor._call import FutureCall
from ..executor._executor import DeviceExecutor, run_anywhere
from ..executor._worker import Worker
from ..futures._future import Future, running_future, thread_hooks
from ..nn._module_copy import PARTS, all_tensors, replicate_sync, synchronize
from ..nn._scatter_gather import move
from ._stats import ReplicaState, ReplicaStats


def copies_of(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """A replica for each of `devices`.

    Parameters are shared by those on one device, with `module` too if it is there. Buffers are
    their own: replica 0 of `replicate` would have those of `module`, so it is not one of them.
    """
    with torch.inference_mode(False), torch.no_grad():
        _, *copies = replicate_sync(module, [devices[0], *devices], detach=True)
        for made in copies:
            synchronize(all_tensors(made))
    return copies


def loaded_copy(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool
) -> tuple[nn.Module, Any]:
    """A deep copy with other weights; and what `load_state_dict` says of its keys.

    Attributes that cannot be copied (a lock, a tensor with a graph) are shared, as replicas do.
    """
    with torch.inference_mode(False):
        loaded = _deep_copy(module)
        keys = loaded.load_state_dict(state_dict, strict)
    synchronize(all_tensors(loaded))
    return loaded, keys


def _deep_copy(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001, S110  # of the user's own classes too
        pass  # and what was copied until then is let go of
    modules = {id(one): one for one in module.modules()}
    shared = {
        id(value): value
        for one in modules.values()
        for name, value in vars(one).items()
        if name not in PARTS and not _is_copyable(value, modules)
    }
    return copy.deepcopy(module, shared)


def _is_copyable(value: Any, modules: dict[int, nn.Module]) -> bool:
    """Whether it can be, but for the `modules` that it may refer to: these are copied."""
    try:
        copy.deepcopy(value, modules.copy())
    except Exception:  # noqa: BLE001  # ditto
        return False
    return True


Arguments: TypeAlias = tuple[Any, ...]

_compiling = threading.Lock()
_alone: ContextVar[bool] = ContextVar("aiopar_compiling_alone", default=False)


def warmup_calls(warmup: Any) -> tuple[Arguments, ...]:
    """The positional arguments of each call that `warmup` stands for."""
    if warmup is None:
        return ()
    several = warmup if isinstance(warmup, list) else [warmup]
    return tuple(one if isinstance(one, tuple) else (one,) for one in several)


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Run the body, which may compile, while no other replica of the process compiles.

    Dynamo and Inductor are not thread-safe. Where Dynamo is not loaded, nobody has to wait.
    """
    # A pool that is opened by a module which is being warmed up has its turn already.
    if "torch._dynamo" not in sys.modules or _alone.get():
        yield
        return
    if not _compiling.acquire(blocking=False):
        # Who has it may wait for a call in the queue of this worker.
        thread_hooks.about_to_block()
        _compiling.acquire()
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)
        _compiling.release()


class FairLock:
    """A lock for tasks, in the order in which they came; of any event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Future[None] | None = None

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Wait for it, and have it for the body."""
        over = running_future()
        with self._lock:
            before, self._last = self._last, over
        if before is not None:
            try:
                await before
            except BaseException:
                # Cancelled: the next one has it when this one would have had it.
                before.add_done_callback(lambda _: over.set_result(None))
                raise
        try:
            yield
        finally:
            over.set_result(None)


class InFlight:
    """How many bodies of `with` run, in any threads and tasks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._idle: Future[None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._count -= 1
            idle = None
            if not self._count:
                idle, self._idle = self._idle, None
        if idle is not None:
            idle.set_result(None)

    @property
    def count(self) -> int:
        """How many there are, now."""
        return self._count

    async def ended(self) -> None:
        """Wait for a moment in which there are none."""
        with self._lock:
            if not self._count:
                return
            if self._idle is None:
                self._idle = running_future()
            idle = self._idle
        await idle


T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How the replicas of one pool run."""

    warmup: tuple[Arguments, ...]
    inference_mode: bool
    max_failures: int


class PoolReplica:
    """A module on one device. Whether and with which module it serves, its pool decides.

    Attributes:
        index: Its place in the pool's `devices`.
        device: Where its module is, and its inputs are moved to.
        executor: A view on the one worker that all its calls run on.
        module: What it runs; None while it is out of service.
    """

    def __init__(self, index: int, executor: DeviceExecutor, settings: ReplicaSettings) -> None:
        self.index = index
        self.executor = executor
        self.worker: Worker = executor._dispatcher.workers[0]
        self.device = self.worker.device
        self.module: nn.Module | None = None
        self._broken: nn.Module | None = None  # until the pool takes it out
        self.state: ReplicaState = "rebuilding"
        self.rebuilds = 0
        self.in_flight = InFlight()
        """Calls that wait for it or run on it."""
        self._settings = settings
        # A call that waits for others hands its worker on: two may end at a time.
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._completed = self._failed = 0
        self._busy_seconds = 0.0
        _bound.add(self)

    def __repr__(self) -> str:
        return f"<replica {self.index} on {self.device}, {self.state}>"

    @property
    def in_service(self) -> bool:
        """Whether it answers."""
        return self.module is not None

    def call(
        self, caller: CallerState, fn: Callable[[*Ts], T], *args: *Ts
    ) -> Coroutine[Any, Any, T]:
        """Await `fn(*args)` on its worker, under the state of `caller`."""
        call = FutureCall(fn, args, caller)
        dispatcher = self.executor._dispatcher
        call.synchronize = dispatcher.synchronize
        return run_anywhere(call, dispatcher.pool, [self.worker], abandon_on_cancel=False)

    def install(self, module: nn.Module) -> None:
        """Serve with `module` from the next call on."""
        with self._lock:
            self.state = "ready"
            self._failures = 0
            self.module, self._broken = module, None

    def leave(self, state: ReplicaState) -> None:
        """Serve no more, and let go of the module."""
        with self._lock:
            self.state = state
            self.module = self._broken = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output; on its worker. Raises as `run` does."""
        return self.run(inputs, kwargs, probe=True)

    def run(self, inputs: Sequence[Any], kwargs: Mapping[str, Any], *, probe: bool) -> Any:
        """The module's output; on its worker.

        Args:
            inputs: Positional arguments, moved to its device.
            kwargs: Keyword arguments, likewise.
            probe: Whether to find out whose fault it is when `max_failures` calls in a row have
                failed, by the warm-up input.

        Raises:
            ReplicaFailed: It is the replica's fault, or it is out of service.
            ServiceClosed: The pool is closed.
        """
        with self.in_flight:
            return self.answer(inputs, kwargs, probe)

    def answer(self, inputs: Sequence[Any], kwargs: Mapping[str, Any], probe: bool) -> Any:
        """`run` for a call that is counted as in flight."""
        # Read once: all of an answer comes from this module, whatever is installed meanwhile.
        module = self.module
        if module is None or module is self._broken:
            raise self._out_of_service(module)
        began, answered = perf_counter(), False
        try:
            output = self._forward(module, inputs, kwargs)
            answered = True
        except Exception as error:
            add_note_once(error, f"in replica {self.index} on device {self.device}")
            self._judge(module, error, probe)
            raise
        finally:
            self._count(perf_counter() - began, answered)
        return output

    def _out_of_service(self, module: nn.Module | None) -> Exception:
        if self.state == "closed":
            return ServiceClosed("the pool was closed before the call began")
        return ReplicaFailed(f"replica {self.index} is out of service", module)

    def _forward(self, module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with torch.inference_mode() if self._settings.inference_mode else nullcontext():
            named = {name: self._here(value) for name, value in kwargs.items()}
            return module(*map(self._here, inputs), **named)

    def _here(self, value: Any) -> Any:
        # Mostly a tensor: to look at it as a tree takes ten times as long.
        if isinstance(value, Tensor):
            return move(value, self.device)
        return map_tensors(partial(move, device=self.device), value)

    def _count(self, seconds: float, answered: bool) -> None:
        with self._lock:
            self._busy_seconds += seconds
            if answered:
                self._completed += 1
                self._failures = 0
            else:
                self._failed += 1

    def _judge(self, module: nn.Module, error: Exception, probe: bool) -> None:
        """Raise `ReplicaFailed` if it is not the input that is to blame for `error`."""
        if isinstance(error, torch.OutOfMemoryError | InvalidInput) or is_device_error(error):
            return  # of which none says anything about the module
        with self._lock:
            self._failures += 1
            suspect = self._failures >= self._settings.max_failures
        if not (suspect and probe and self._settings.warmup):
            return
        try:
            self.warm_up(module)
        except torch.OutOfMemoryError:
            return  # what the failed call had on the device may still be there
        except Exception as found:
            if is_device_error(found):
                raise
            self._give_up(module)
            message = f"replica {self.index} on device {self.device} fails on the warm-up as well"
            raise ReplicaFailed(message, module) from error
        self._failures = 0

    def _give_up(self, module: nn.Module) -> None:
        """What is next in the queue need not be run before it is given to another replica."""
        with self._lock:
            if self.module is module:  # it may have another by now
                self._broken = module

    def warm_up(self, module: nn.Module) -> None:
        """Run `module` on the warm-up input; on its worker."""
        for inputs in self._settings.warmup:
            self._forward(module, inputs, {})
        if is_accelerator(self.device):
            current_stream(self.device).synchronize()  # kernels may fail late

    def prepare(self, module: nn.Module) -> None:
        """Make a fresh copy ready to serve here; on its worker."""
        if is_accelerator(self.device):
            # Its memory belongs to the stream that it was copied on. When it is let go of, calls
            # of this worker may still read it.
            stream = current_stream(self.device)
            share_memory(all_tensors(module), stream)
        try:
            with compiling_alone():
                self.warm_up(module)
        except Exception as error:
            add_note_once(error, f"in the warm-up of replica {self.index} on device {self.device}")
            raise

    def stats(self) -> ReplicaStats:
        """A snapshot."""
        with self._lock:
            return ReplicaStats(
                index=self.index,
                device=str(self.device),
                state=self.state,
                in_flight=self.in_flight.count,
                completed=self._completed,
                failed=self._failed,
                rebuilds=self.rebuilds,
                busy_seconds=self._busy_seconds,
            )


_bound: Registry[PoolReplica] = Registry()


def bind(
    executor: DeviceExecutor, devices: Sequence[torch.device], settings: ReplicaSettings
) -> tuple[PoolReplica, ...]:
    """Replicas without modules, each with a worker of `executor` to itself.

    Pools that share an executor take other workers than each other while there are any.

    Raises:
        ValueError: It has too few workers on a device.
    """
    busy = [replica.worker for replica in _bound]
    chosen: list[Worker] = []
    dispatcher = executor._dispatcher
    for group in dispatcher.groups_on(devices):
        chosen.append(min((w for w in group if w not in chosen), key=busy.count))
    workers = list(dispatcher.workers)
    views = [executor.on(worker=workers.index(worker)) for worker in chosen]
    return tuple(PoolReplica(index, view, settings) for index, view in enumerate(views))
