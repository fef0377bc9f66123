"""The executor that calls without one use: the process's default, or the context's."""

import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, TypeVarTuple

import torch

from .._base.devices import Device, default_devices
from .._base.forking import after_fork_in_child
from ._executor import DeviceExecutor
from ._pool import Dispatcher, WorkerPool

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _DefaultExecutor(DeviceExecutor):
    """The process's own: it grows a worker for each `(device, k-th repeat)` asked of it."""

    def __init__(self) -> None:
        pool = WorkerPool(
            default_devices(),
            max_pending=None,
            num_threads=None,
            thread_name_prefix="aiopar",
            grows=True,
        )
        self._dispatcher = Dispatcher(pool, synchronize=True)


class _Process:
    """What there is one of in a process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.executor: _DefaultExecutor | None = None

    def default_executor(self) -> DeviceExecutor:
        """Made when it is first asked for, and again when somebody has shut it down."""
        with self.lock:
            if self.executor is None or self.executor._dispatcher.pool.closed:
                self.executor = _DefaultExecutor()
            return self.executor


_process = _Process()
_current: ContextVar[DeviceExecutor | None] = ContextVar("aiopar_executor", default=None)


def get_executor() -> DeviceExecutor:
    """The current executor: that of the innermost `use_executor`, else the process's default.

    The default has a worker for every accelerator (or CPU core, where there is none), grows when
    a parallel call needs more workers of a device, and is closed at interpreter exit. Calls that
    ask for no device stay on the devices that it began with. After `os.fork` the child gets a new
    one; so does who asks after somebody shut it down.

    Example:
        >>> import aiopar
        >>> aiopar.get_executor().submit(pow, 2, 3).result()
        8
    """
    return _current.get() or _process.default_executor()


def executor_near(device: torch.device) -> DeviceExecutor:
    """The current executor's workers on `device`, or all of them if it has none there."""
    executor = get_executor()
    try:
        return executor.on(device)
    except ValueError:
        return executor


@contextmanager
def use_executor(executor: DeviceExecutor) -> Iterator[DeviceExecutor]:
    """Make `executor` the current one in this context (and in the calls made from it).

    Args:
        executor: The one to use; closing it stays with who made it.

    Yields:
        `executor`.

    Raises:
        TypeError: It is not a `DeviceExecutor`.

    Example:
        >>> import aiopar
        >>> with aiopar.DeviceExecutor(["cpu"]) as executor, aiopar.use_executor(executor):
        ...     aiopar.get_executor() is executor
        True
    """
    if not isinstance(executor, DeviceExecutor):
        raise TypeError(f"expected a DeviceExecutor, got {type(executor).__name__}")
    token = _current.set(executor)
    try:
        yield executor
    finally:
        _current.reset(token)


def run_sync(
    fn: Callable[[*Ts], T],
    /,
    *args: *Ts,
    device: Device | None = None,
    abandon_on_cancel: bool = False,
) -> Coroutine[Any, Any, T]:
    """Await `fn(*args)` on a worker of the current executor, off the event loop.

    `DeviceExecutor.run_sync` of the current executor; named and cancelled as
    `anyio.to_thread.run_sync`, but on a worker that keeps its device, stream and thread settings,
    and at a fraction of the cost.

    Args:
        fn: A function; keyword arguments go in by `functools.partial`.
        args: Its arguments.
        device: Where to run it; None: on the least loaded worker.
        abandon_on_cancel: On cancellation do not wait for a call that runs.

    Raises:
        TypeError: `fn` is not callable, or is a coroutine function; or `device` is no device.
        ValueError: There is no such device, or the current executor has no worker on it.
        ExecutorShutdown: A `RuntimeError`: the current executor is shut down.

    Example:
        >>> import asyncio, aiopar, torch
        >>> asyncio.run(aiopar.run_sync(torch.arange, 3))
        tensor([0, 1, 2])
    """
    executor = get_executor()
    if device is not None:
        executor = executor.on(device)
    return executor.run_sync(fn, *args, abandon_on_cancel=abandon_on_cancel)


@after_fork_in_child
def _forget_after_fork() -> None:
    # The threads stayed in the parent, and the lock may have been held by one of them.
    _process.lock = threading.Lock()
    _process.executor = None
