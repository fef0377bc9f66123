"""Workers, as executors see them: the protocol, its statistics, the choice of one."""

import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakMethod

import torch

from .._base.thread_state import CallerState
from ..errors import WorkerLost
from ..futures._future import Future
from ._call import Call
from ._streams import Launches

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Where the calls of a worker run, if not in this process.

    Attributes:
        name: The kind of host, the index of its worker and the device: `"process:0/cpu"`.
        node: The machine.
        pid: The process on that machine.
    """

    name: str
    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """The counts of one worker.

    Attributes:
        device: The device of the worker.
        queued: Calls that have not started. Each worker that shares a queue counts an equal part of
            its calls.
        running: Calls that have started and not ended, also those that wait for other calls or for
            their kernels.
        completed: Calls that returned.
        failed: Calls that raised.
        busy_seconds: How long the worker has run calls, altogether.
        host: The process or actor that runs its calls. None: a thread of this process, or none yet.
    """

    device: torch.device
    queued: int
    running: int
    completed: int
    failed: int
    busy_seconds: float
    host: HostInfo | None = None


MOST_LOSSES = 4
"""How often a module is called again after a loss of its host. Its input may be the cause."""


async def retry_lost(call: Callable[[], Awaitable[T]]) -> T:
    """Await `call()`, and a new one if its host was lost: at most `MOST_LOSSES` times."""
    for _ in range(MOST_LOSSES):
        with suppress(WorkerLost):
            return await call()
    return await call()


class Worker(Protocol):
    """A worker, as executors see it. Only `WorkerPool` names a kind of worker."""

    device: torch.device
    index: int
    shares_memory: bool
    """Whether its calls run in this process: they see the caller's modules and tensors, not copies;
    results can be ordered on the device; a generator can run step by step."""
    launches: Launches | None
    """The launches of its calls on accelerators; None without accelerators."""
    ended: Future[None]
    """Done when the worker was stopped and its last call has ended."""
    on_idle: Callable[[], object] | None
    """Called when the worker may have become idle."""
    on_host_lost: "set[WeakMethod[Callable[[Worker, WorkerLost], None]]]"
    """Called with the worker and the reason when its host was lost, if the loss is seen at once."""

    @property
    def label(self) -> str:
        """Its device, and its host if it has one: for notes and metrics."""

    @property
    def alive(self) -> bool:
        """Whether its threads run; they may still run for an instant when `ended` is done."""

    @property
    def ready(self) -> bool:
        """Whether its host runs, or it needs none. A call that fails without a host has not run."""

    @property
    def load(self) -> float:
        """How many calls are queued or running; calls that wait for other calls do not count."""

    @property
    def seconds_in_call(self) -> float:
        """How long its present call has run; 0.0 if it runs none, or the call waits for others."""

    @property
    def idle(self) -> bool:
        """Whether it has no running or waiting call, and its own queue is empty."""

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        state: CallerState,
    ) -> Any:
        """Return `fn(*args, **kwargs)`, run under a caller's state, on a thread of this worker.

        Every user function runs here: the function of a call or of a batch, the module of a
        replica. A result of a type in `NOT_BEGUN` is a TypeError: its code would run elsewhere.
        """

    def keep(self, value: T, *, replica: bool = False) -> T:
        """What stands for a module or function in the arguments of `run`, on every worker.

        Each host gets one copy, which may not see later changes of `value`. If `value` stands for a
        value already, hosts make another copy. The copy of a module for a `replica` is moved to the
        device of its host, and its weights require no gradients.
        """

    def expect_launches(self) -> None:
        """Prepare for calls that launch on accelerators, also on a CPU worker."""

    def put(self, call: Call[Any]) -> None:
        """Queue a call for this worker only; never blocks."""

    def leave(self) -> None:
        """Leave the queue that this worker shares, unless no other worker serves that queue."""

    def cancel_queued(self) -> None:
        """Cancel every call that has not started."""

    def kill(self, *, left_only: bool = False) -> None:
        """End its host at once if a call runs there: the call raises `WorkerLost`; never blocks.

        Without a host this does nothing: no thread can be interrupted. If its executor is being
        closed, no other host is started. `left_only`: only if the caller has left.
        """

    def stop(self) -> None:
        """End when the queue is empty; returns at once; may be called twice."""

    def join(self) -> None:
        """Wait until the worker has ended, unless this is one of its threads."""

    def stats(self) -> WorkerStats:
        """Its counts at this moment."""


class HasLoad(Protocol):
    """Anything that has a load."""

    @property
    def load(self) -> float:
        """How much work it has."""


L = TypeVar("L", bound=HasLoad)


def least_loaded(candidates: Iterable[L], without: Collection[L] = ()) -> L | None:
    """The candidate with the smallest load that is not in `without`; None if there is none.

    The calling worker wins a tie, else the first candidate: a call usually waits for the calls that
    it makes, and its own worker can run them inside it, without a switch of threads.
    """
    best, lowest, own = None, 0.0, current_worker()
    for candidate in candidates:
        if without and candidate in without:
            continue
        load = candidate.load
        if best is None or load < lowest or (load == lowest and candidate is own):
            best, lowest = candidate, load
    return best


class ServingThread(Protocol):
    """A thread that serves a worker."""

    @property
    def worker(self) -> Worker: ...

    @property
    def innermost(self) -> Call[Any] | None:
        """The call whose function this thread runs; None in callbacks after a call."""


class _Current(threading.local):
    thread: ServingThread | None = None


_current = _Current()


def set_current_thread(thread: ServingThread | None) -> None:
    """Note that the calling thread is `thread`, which serves a worker from now on."""
    _current.thread = thread


def current_worker() -> Worker | None:
    """The worker that the calling thread serves; None on any other thread."""
    thread = _current.thread
    return None if thread is None else thread.worker


def current_call() -> Call[Any] | None:
    """The call that the calling code is part of; None outside calls."""
    thread = _current.thread
    return None if thread is None else thread.innermost
