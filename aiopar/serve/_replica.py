"""A replica of a `ReplicaPool`: a copy of a module on one device, run by one worker."""

import copy
import math
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from time import monotonic, perf_counter
from typing import Any, Final, Literal, TypeAlias, TypeVar, TypeVarTuple
from weakref import ref

import torch
from torch import Tensor, nn

from .._base.devices import current_stream, is_accelerator, is_device_error, share_memory
from .._base.forking import ReentrantLock, Registry, live_methods
from .._base.inputs import call_module
from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once
from .._base.tree import map_tensors, tensors
from ..errors import InvalidInput, ServiceClosed, WorkerLost
from ..executor._call import NO_KWARGS, AwaitedCall
from ..executor._executor import DeviceExecutor, await_call
from ..executor._worker import Worker
from ..futures._future import thread_hooks
from ..futures._semaphore import Semaphore
from ..nn._module_copy import PARTS, all_tensors, give_attributes, replicate_sync, synchronize
from ..nn._scatter_gather import move, move_tree
from ._stats import ReplicaState, ReplicaStats

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


# Copies of modules.


def copies_of(module: nn.Module, replicas: "Sequence[PoolReplica]", fresh: bool) -> list[nn.Module]:
    """Copy `module` for each replica.

    Copies on one device share their parameters, also with `module` if `module` is there. Each copy
    has its own buffers. If the workers have hosts, one object stands for the copies on all hosts.
    Unless `fresh`, `module` must be this object already.
    """
    if not replicas[0].worker.shares_memory:
        if fresh:
            module = replicas[0].worker.keep(module, replica=True)
        return [module] * len(replicas)
    devices = [replica.worker.device for replica in replicas]
    with torch.inference_mode(False), torch.no_grad():
        # The first copy of `replicate_sync` has the buffers of `module`, so it is not used.
        _, *copies = replicate_sync(module, [devices[0], *devices], detach=True)
        for copied in copies:
            synchronize(all_tensors(copied))
    return copies


def loaded_copy(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool
) -> tuple[nn.Module, Any]:
    """A deep copy of `module` that has loaded `state_dict`, and the result of `load_state_dict`."""
    with torch.inference_mode(False):
        loaded = _deep_copy(module)
        for made, original in zip(all_tensors(loaded), all_tensors(module), strict=False):
            give_attributes(made, original)  # torch's deepcopy of a parameter drops them
        keys = loaded.load_state_dict(state_dict, strict)
    synchronize(all_tensors(loaded))
    return loaded, keys


def _deep_copy(module: nn.Module) -> nn.Module:
    """A deep copy; attributes that cannot be copied are shared: a lock, a tensor with a graph."""
    try:
        return copy.deepcopy(module)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001, S110  # any error of the attributes' own classes
        pass  # the traceback is dropped here, and with it the partial copy
    modules, shared = {id(one): one for one in module.modules()}, dict[int, Any]()
    for one in modules.values():
        for name, value in vars(one).items():
            try:
                if name not in PARTS:
                    copy.deepcopy(value, modules.copy())  # the value may refer to modules
            except Exception:  # noqa: BLE001  # any error of the value's own class
                shared[id(value)] = value
    return copy.deepcopy(module, shared)


# The warm-up.

# Held while a module may compile: Dynamo and Inductor are not thread-safe.
_compile_lock = ReentrantLock()

Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments."""


def resized(arguments: Arguments, size: int) -> Arguments:
    """`arguments` as a batch of `size` rows: the rows of its tensors are repeated or cut."""
    rows = next((each.shape[0] for each in tensors(arguments) if each.ndim), 0)

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.ndim or tensor.shape[0] != rows:
            return tensor
        return tensor[torch.arange(size, device=tensor.device) % rows]

    return arguments if rows == 0 else map_tensors(resize, arguments)


def compile_options(given: bool | Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The options of `torch.compile` that the argument `compile` asks for; None: no compilation."""
    if isinstance(given, bool):
        return {} if given else None
    if not isinstance(given, Mapping):
        raise TypeError(
            "compile must be a bool or a dict of options of torch.compile, not "
            f"{type(given).__name__}"
        )
    options = signature(torch.compile).parameters.keys() - {"model"}
    if unknown := given.keys() - options:
        raise ValueError(f"compile: torch.compile has no option {min(unknown)!r}")
    return dict(given)


def warmup_calls(warmup: Any) -> tuple[Arguments, ...]:
    """The arguments of each call of the argument `warmup`."""
    if warmup is None:
        return ()
    calls = warmup if isinstance(warmup, list) else [warmup]
    return tuple((call if isinstance(call, tuple) else (call,), NO_KWARGS) for call in calls)


# Replicas.

_CHECK_PAUSE = 10.0
"""How long failed calls cause no further warm-up, in multiples of the last warm-up's duration.

So clients that send bad inputs again and again take little of a replica's time.
"""


class OutsideModule(Exception):  # no user sees it
    """The cause was raised by a function of the batcher, not by the module of the replica."""


class ReplicaFailed(RuntimeError):
    """A replica cannot answer, and the input is not the reason. A pool or its batcher handles it.

    The cause is the module's error for the input, and the module has failed for the warm-up input
    too. Or the cause is a `WorkerLost`. Without a cause, the replica was out of service, and the
    input was not run.

    Attributes:
        module: The module that failed; the replica may have another module since.
    """

    def __init__(self, message: str, module: object) -> None:
        super().__init__(message)
        self.module = module


@dataclass(slots=True)
class ReplicaSettings:
    """The arguments of a `ReplicaPool` that its replicas need, and the sizes of its batches."""

    warmup: tuple[Arguments, ...]
    inference_mode: bool
    max_failures: int
    compile: Mapping[str, Any] | None
    """The options of `torch.compile`; None: modules are not compiled."""
    batch_sizes: frozenset[int] = frozenset()
    """The sizes of the batches of all batchers that ask for fixed sizes."""


OutOfService: TypeAlias = Literal["rebuilding", "returning", "retired", "closed"]
REBUILDING: Final = ("rebuilding", "returning")


class PoolReplica:
    """A copy of the pool's module on one device. The pool decides when the replica serves.

    Its states::

        rebuilding, or returning (a new host starts for a lost one)  ->  ready (in service)
        ready  ->  rebuilding (it is broken), returning
        any    ->  retired (its device is lost), closed (the pool is closed)

    Attributes:
        index: Its index in the pool's `devices`.
        pool_executor: The executor of the pool.
        worker: The worker that runs all its calls.
        module: The copy that it serves with; None when the pool has taken it out of service.
        state: See above. Statistics show `returning` as `rebuilding`.
        rebuilds: How often it was rebuilt.
        in_flight: A permit per call that waits for the replica or runs on it.
    """

    def __init__(
        self, index: int, pool_executor: DeviceExecutor, worker: Worker, settings: ReplicaSettings
    ) -> None:
        self.index = index
        self.pool_executor = pool_executor
        self.worker = worker
        self.module: nn.Module | None = None
        self.state: ReplicaState | OutOfService = "rebuilding"
        self.rebuilds = 0
        self.in_flight = Semaphore(math.inf)
        self._settings = settings
        options = settings.compile
        self._code = None if options is None else worker.keep(CompiledCode(options))
        # A call that waits for other calls lets another thread run them: two calls may end at once.
        # Re-entrant: a module that is dropped under the lock may have a destructor.
        self._lock = ReentrantLock()
        self._consecutive_failures = 0
        self.warmed_up: frozenset[int] = frozenset()
        """The batch sizes that its latest copy has run."""
        self._next_check = 0.0  # the warm-up input is not run before this time, by `monotonic`
        self._completed = self._failed = 0
        self._busy_seconds = 0.0
        all_replicas.add(self)

    def __repr__(self) -> str:
        return f"<replica {self.index} on {self.worker.label}, {self.state}>"

    @property
    def in_service(self) -> bool:
        """Whether the pool sends calls to it."""
        return self.state == "ready"

    @property
    def load(self) -> float:
        """The load of its worker."""
        return self.worker.load

    def call(
        self, caller: CallerState, fn: Callable[[*Ts], T], *args: *Ts
    ) -> Coroutine[Any, Any, T]:
        """Run `fn(*args)`, the pool's own code, on its worker and the streams of `caller`."""
        call, dispatcher = AwaitedCall(fn, args, caller), self.pool_executor._dispatcher
        call.internal, call.synchronize = True, dispatcher.synchronize
        return await_call(call, dispatcher.pool, [self.worker], abandon_on_cancel=False)

    def install(self, module: nn.Module) -> None:
        """Serve with `module` from the next call on."""
        with self._lock:
            self._consecutive_failures, self._next_check = 0, 0.0
            self.module, self.state = module, "ready"

    def take_out(self, state: OutOfService) -> None:
        """Stop serving and drop the module."""
        with self._lock:
            self.state, self.module = state, None

    def run_batch(self, caller: CallerState, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return `fn(call, *args)` for a batch of a `Batcher`. Called on the worker.

        Args:
            caller: The state that `fn` runs under.
            fn: Runs on the host of the worker. `call` is the `ModuleCall` of this replica. An error
                that is not the module's is raised as `OutsideModule`.
            args: The other arguments.

        Raises:
            ReplicaFailed: The replica is broken or out of service.
            ServiceClosed: The pool is closed.
        """
        self.in_flight.try_acquire()
        try:
            return self.answer(caller, fn, args)
        finally:
            self.in_flight.release()
            del args  # an error's traceback holds this frame

    def answer(self, caller: CallerState, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """As `run_batch`, for a caller that holds a permit of `in_flight`."""
        # Read once: the whole answer comes from this module, whatever is installed meanwhile.
        module = self.module
        if module is None or not self.in_service:
            if self.state == "closed":
                raise ServiceClosed("the pool was closed before the call began")
            raise ReplicaFailed(f"replica {self.index} is out of service", module)
        return self.run(module, caller, fn, args)

    def run(
        self,
        module: nn.Module,
        caller: CallerState,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        failure_of: Callable[[Any], BaseException | None] = lambda _: None,
    ) -> Any:
        """As `answer`, with a module that the replica serves with, or has served with.

        An output for which `failure_of` returns an error counts as a failure, and is returned.
        """
        began, completed = perf_counter(), False
        output: Any = None
        failure: BaseException | None = None
        foreign: BaseException | None = None
        try:
            output = self.worker.run(fn, (self._call(module), *args), NO_KWARGS, caller)
            failure = failure_of(output)
            completed = failure is None
        except OutsideModule as outside:
            foreign, outside.__cause__ = outside.__cause__, None
        except (Exception, SystemExit) as error:
            add_note_once(error, f"in {self.where}")
            if isinstance(error, WorkerLost):
                # The listeners are told here, because a caller that has left handles no error.
                for on_host_lost in live_methods(self.worker.on_host_lost):
                    on_host_lost(self.worker, error)
                raise ReplicaFailed(f"{self.where} has lost its host", module) from error
            self._check_health(module, caller, error)
            raise
        finally:
            with self._lock:
                self._busy_seconds += perf_counter() - began
                self._completed += completed
                self._failed += not completed
                if completed:
                    self._consecutive_failures = 0
            del args, fn  # an error's traceback holds this frame
        try:
            if foreign is not None:
                raise foreign
            if failure is not None:
                self._check_health(module, caller, failure)
            return output
        finally:
            del foreign, failure, output

    def _call(self, module: nn.Module) -> "ModuleCall":
        return ModuleCall(module, self.worker.device, self._settings.inference_mode)

    @property
    def where(self) -> str:
        """Which replica it is, for messages."""
        return f"replica {self.index} on device {self.worker.label}"

    def _check_health(self, module: nn.Module, caller: CallerState, error: BaseException) -> None:
        """Count a failed call; raise `ReplicaFailed` if `module` fails on the warm-up input too."""
        if isinstance(error, torch.OutOfMemoryError | InvalidInput) or is_device_error(error):
            return  # these say nothing about the module
        with self._lock:
            self._consecutive_failures += 1
            suspect = self._consecutive_failures >= self._settings.max_failures
            began = monotonic()
            if not (suspect and self._settings.warmup and began >= self._next_check):
                return
            self._next_check = math.inf
        try:
            self.warm_up(module, caller, min(self.warmed_up, default=None))
        except torch.OutOfMemoryError:
            return  # the failed call's tensors may still be in memory
        except (Exception, SystemExit) as warmup_error:
            if is_device_error(warmup_error):
                raise
            with self._lock:
                if self.module is module:  # no other module was installed meanwhile
                    self.state = "rebuilding"  # calls in its queue go to another replica
            raise ReplicaFailed(f"{self.where} fails on the warm-up as well", module) from error
        finally:
            ended = monotonic()
            self._next_check = ended + _CHECK_PAUSE * (ended - began)
        self._consecutive_failures = 0

    def warm_up(self, module: nn.Module, caller: CallerState, *sizes: int | None) -> None:
        """Run `module` on the warm-up inputs in these batch sizes; called on its worker."""
        call = self._call(module)
        run = ModuleCall.run if self._code is None else ModuleCall.compile_and_run
        for arguments in self._settings.warmup:
            for size in sizes:
                given = arguments if size is None else resized(arguments, size)
                self.worker.run(run, (call, *given), NO_KWARGS, caller)
        if self.worker.shares_memory and is_accelerator(self.worker.device):
            current_stream(self.worker.device).synchronize()  # kernels fail late

    def prepare(self, module: nn.Module, caller: CallerState) -> None:
        """Make a fresh copy ready to serve; called on the replica's worker."""
        if self.worker.shares_memory and is_accelerator(self.worker.device):
            # The copy's memory belongs to another stream. When it is freed, calls of this worker
            # may still read it.
            share_memory(all_tensors(module), current_stream(self.worker.device))
        sizes = self._settings.batch_sizes
        may_compile = self._code is not None or "torch._dynamo" in sys.modules
        if may_compile and not _compile_lock.acquire(blocking=False):
            # The holder of the lock may wait for a call in the queue of this worker.
            thread_hooks.about_to_block()
            _compile_lock.acquire()
        try:
            if self._code is not None:
                arguments = self._code, module
                self.worker.run(CompiledCode.give_to, arguments, NO_KWARGS, caller)
            self.warm_up(module, caller, *(sorted(sizes) or (None,)))
            self.warmed_up = sizes
        except Exception as error:
            add_note_once(error, f"in the warm-up of {self.where}")
            raise
        finally:
            if may_compile:
                _compile_lock.release()

    def stats(self) -> ReplicaStats:
        """A snapshot."""
        with self._lock:
            return ReplicaStats(
                index=self.index,
                device=self.worker.label,
                state="rebuilding" if self.state == "returning" else self.state,
                in_flight=self.in_flight.held,
                completed=self._completed,
                failed=self._failed,
                rebuilds=self.rebuilds,
                busy_seconds=self._busy_seconds,
            )


@dataclass(slots=True)
class ModuleCall:
    """Calls a module on its device; runs on the host of a worker."""

    module: nn.Module  # or what stands for it (`Worker.keep`)
    device: torch.device  # inputs are moved there
    inference_mode: bool

    def __call__(self, batch: Any) -> Any:
        """Call the module with a batch."""
        return self.run((batch,), NO_KWARGS)

    def run(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the module with these arguments."""
        with torch.inference_mode() if self.inference_mode else nullcontext():
            place = partial(_moved, device=self.device)
            return call_module(self.module, inputs, kwargs, place)

    def compile_and_run(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """As `run`, for the warm-up: compile, even if Dynamo's limit of recompilations is hit."""
        from torch._dynamo import config

        with config.patch(recompile_limit=config.accumulated_recompile_limit):
            self.run(inputs, kwargs)
            return self.run(inputs, kwargs)  # CUDA graphs are recorded in the second run


class CompiledCode:
    """The compiled code of one replica, for each class of its modules; on the host of its worker.

    The copies that a replica gets one after the other share the code. Replicas do not: two threads
    that look for code of one function at the same time may not find it, and Dynamo compiles again.

    Args:
        options: Those of `torch.compile`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._forwards: dict[type[nn.Module], Callable[..., Any]] = {}

    def give_to(self, module: nn.Module) -> None:
        """Let `module` run compiled code, which its first calls make."""
        kind = type(module)
        if kind not in self._forwards:
            self._forwards[kind] = self._compiled(kind)
        # `Module.compile` would make a reference cycle.
        compiled, this = self._forwards[kind], ref(module)

        def forward(*inputs: Any, **kwargs: Any) -> Any:
            return compiled(this(), *inputs, **kwargs)

        forward.__signature__ = signature(module.forward)  # type: ignore[attr-defined]  # `call_module` reads it
        module.forward = forward

    def _compiled(self, kind: type[nn.Module]) -> Callable[..., Any]:
        def forward(module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
            return kind.forward(module, *inputs, **kwargs)

        # Dynamo keeps compiled code by code object, and what it knows of shapes by name.
        name = f"{kind.__module__}.{kind.__qualname__}"
        forward.__code__ = forward.__code__.replace(co_name=name)
        # In copies, because `torch.compile` takes entries out of its `options`.
        options: dict[str, Any] = {
            key: dict(one) if isinstance(one, dict) else one for key, one in self._options.items()
        }
        return torch.compile(forward, **options)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):  # the usual case, much quicker than a tree
        return move(value, device)
    return move_tree(value, device)


all_replicas: Registry[PoolReplica] = Registry()  # of all pools in the process
