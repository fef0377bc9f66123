"""The current executor: the process's default, or the one set by `use_executor`."""

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


class _Process:
    """The default executor of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.executor: DeviceExecutor | None = None

    def default_executor(self) -> DeviceExecutor:
        """The default executor; a new one at first, and after the last one was shut down."""
        with self.lock:
            if self.executor is None or self.executor._dispatcher.pool.closed:
                pool = WorkerPool(default_devices(), grows=True)
                self.executor = DeviceExecutor._of(Dispatcher(pool))
            return self.executor


_process = _Process()
_current: ContextVar[DeviceExecutor | None] = ContextVar("aiopar_executor", default=None)


def get_executor() -> DeviceExecutor:
    """The current executor: that of the innermost `use_executor`, else the process's default.

    The default executor has a worker for every accelerator (or CPU core, if there is none). It
    grows when a parallel call needs more workers of a device, and is closed at interpreter exit.
    Calls that ask for no device stay on its first devices. A new one is made after `os.fork` in the
    child, and after somebody has shut it down.

    Example:
        >>> import aiopar
        >>> aiopar.get_executor().submit(pow, 2, 3).result()
        8
    """
    return _current.get() or _process.default_executor()


def executor_near(device: torch.device) -> DeviceExecutor:
    """The current executor's workers on `device`, or all its workers if none is there."""
    executor = get_executor()
    try:
        return executor.on(device)
    except ValueError:
        return executor


@contextmanager
def use_executor(executor: DeviceExecutor) -> Iterator[DeviceExecutor]:
    """Make `executor` the current one in this context, and in the calls made from it.

    Args:
        executor: An executor; it is not closed at the end.

    Yields:
        `executor`.

    Raises:
        TypeError: `executor` is not a `DeviceExecutor`.

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

    `DeviceExecutor.run_sync` of the current executor. Mirrors `anyio.to_thread.run_sync`, also in
    how it is cancelled. Differences: it runs on a worker, which keeps its device, stream and thread
    settings, and costs less.

    Args:
        fn: A function; use `functools.partial` for keyword arguments.
        args: Its arguments.
        device: The device to run on; None: the least loaded worker.
        abandon_on_cancel: On cancellation, do not wait for a call that runs.

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
    # The threads stayed in the parent, and one of them may have held the lock.
    _process.lock = threading.Lock()
    _process.executor = None
