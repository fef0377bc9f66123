"""The current executor: the process's default, or the one set by `use_executor`."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, TypeVarTuple

import torch

from .._base.arguments import check_instance, returns_coroutine
from .._base.devices import Device, default_devices
from .._base.forking import ReentrantLock
from ._executor import DeviceExecutor
from ._pool import Dispatcher, WorkerPool

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


# Re-entrant: a destructor or signal handler that interrupts `_get_default` may call it, too.
_lock = ReentrantLock()
_default: DeviceExecutor | None = None
_current: ContextVar[DeviceExecutor | None] = ContextVar("aiopar_executor", default=None)


def _get_default() -> DeviceExecutor:
    """The default executor. It is made at its first use, after a shutdown and in a forked child.

    While the default executor drains, its running calls still get it.
    """
    global _default  # noqa: PLW0603  # one for the process
    with _lock:
        if _default is None or not _default._dispatcher.pool.open:
            pool = WorkerPool(default_devices(), grows=True)
            _default = DeviceExecutor._of(Dispatcher(pool))
        return _default


def get_executor() -> DeviceExecutor:
    """The current executor: that of the innermost `use_executor`, else the process's default.

    The default executor has a worker for every accelerator, or for every CPU core if there is no
    accelerator. It grows when a parallel call needs more workers of a device. A call that names no
    device runs on the first devices. At interpreter exit the queued calls run. A forked child makes
    a new default executor, and so does a process that has shut its last one down.

    Example:
        >>> import aiopar
        >>> aiopar.get_executor().submit(pow, 2, 3).result()
        8
    """
    return _current.get() or _get_default()


def executor_near(device: torch.device) -> DeviceExecutor:
    """The current executor's workers on `device`; all its workers if none is on `device`.

    If its workers are other processes, the default executor is used in its place.
    """
    executor = get_executor()
    if not executor._dispatcher.shares_memory:
        executor = _get_default()
    try:
        return executor.on(device)
    except ValueError:
        return executor


@contextmanager
def use_executor(executor: DeviceExecutor) -> Iterator[DeviceExecutor]:
    """Make `executor` the current one in this context, and in the calls made from it.

    Args:
        executor: The executor. `use_executor` does not close it.

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
    check_instance("executor", executor, DeviceExecutor)
    token = _current.set(executor)
    try:
        yield executor
    finally:
        _current.reset(token)


@returns_coroutine
def run_sync(
    fn: Callable[[*Ts], T],
    /,
    *args: *Ts,
    device: Device | None = None,
    abandon_on_cancel: bool = False,
) -> Coroutine[Any, Any, T]:
    """Await `fn(*args)` on a worker of the current executor, off the event loop.

    This is `DeviceExecutor.run_sync` of the current executor. It mirrors
    `anyio.to_thread.run_sync`, also when it is cancelled. Differences: the call runs on a worker,
    which keeps its device, stream and thread settings, and costs less.

    Args:
        fn: A function; use `functools.partial` for keyword arguments.
        args: Its arguments.
        device: The device to run on. None: the device of the least loaded worker.
        abandon_on_cancel: Whether a cancelled `await` leaves a running call instead of waiting for
            it.

    Raises:
        TypeError: `fn` is not callable, or is a coroutine function or a generator function; or
            `device` is no device. When awaited: `fn` returned a coroutine or a generator.
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
