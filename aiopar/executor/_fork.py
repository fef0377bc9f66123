"""`fork` and `wait`, eager and parallel."""

from collections.abc import Callable, Coroutine
from functools import partial
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch

from .._base.arguments import check_callable
from .._base.tree import first_tensor
from ..errors import BlockingWaitError
from ..futures._future import Future
from ..futures._wakeup import in_event_loop
from ._current import get_executor
from ._worker import current_worker

T = TypeVar("T")
P = ParamSpec("P")


def fork(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call `fn(*args, **kwargs)` on a worker, now, and return its future.

    Mirrors `torch.jit.fork`, which runs inline in eager mode: here the call really runs beside its
    caller. `fn` may be a function, a method, a module, a ScriptFunction or a ScriptModule. It runs
    on a worker of the device of the first parameter of a module, or first tensor, among `fn` and
    its arguments (a `functools.partial` is looked into); else of the calling worker; else of the
    CPU. Forks may nest to any depth, on any number of workers.

    Differences from `torch.jit.fork`: it runs in parallel without TorchScript; the result is an
    `aiopar.Future`, which can be awaited; the caller's grad mode, autocast, context variables, ...
    go with it.

    Args:
        fn: What is called.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The future of its result.

    Raises:
        TypeError: `fn` is not callable, or is a coroutine function.
        ValueError: The current executor has no worker on that device.
        QueueFull: Every worker there has `max_pending` calls waiting.
        ExecutorShutdown: A `RuntimeError`: the executor is shut down.

    Example:
        >>> import asyncio, aiopar, torch
        >>> linear = torch.nn.Linear(2, 3)
        >>> async def main():
        ...     left = aiopar.fork(linear, torch.ones(4, 2))
        ...     right = aiopar.fork(linear, torch.ones(5, 2))
        ...     return torch.cat([await left, await right]).shape
        >>> asyncio.run(main())
        torch.Size([9, 3])
    """
    check_callable(fn)
    device = device_of(*_carried(fn), *args, *kwargs.values())
    return get_executor().on(device).submit(fn, *args, **kwargs)


def _carried(fn: Callable[..., object]) -> tuple[object, ...]:
    """What a callable brings along: itself, its object if it is a method, a partial's arguments."""
    if isinstance(fn, partial):
        return *_carried(fn.func), *fn.args, *fn.keywords.values()
    return fn, getattr(fn, "__self__", None)


def device_of(*values: object) -> torch.device:
    """The device of the first module parameter (or buffer) or tensor in `values`.

    Where there is none, among the first parts of each: that of the calling worker, else the CPU.
    """
    for value in values:
        tensor = first_tensor(value)
        if tensor is None and isinstance(value, torch.nn.Module):
            tensor = next(chain(value.parameters(), value.buffers()), None)
        if tensor is not None:
            return tensor.device
    worker = current_worker()
    return torch.device("cpu") if worker is None else worker.device


def wait(future: Future[T] | Coroutine[Any, Any, T]) -> T:
    """Block until `future` is done, and return its value or raise its error.

    Mirrors `torch.jit.wait`. For functions that run in workers: a worker that waits for a call
    of its executor that nobody has started runs it itself, so nested calls never deadlock. It also
    drives aiopar's own coroutines there (`aiopar.wait(dp(x))`), which is how parallel models nest.

    Args:
        future: A future or a coroutine of aiopar.

    Raises:
        BlockingWaitError: A `RuntimeError`: this is an event loop's thread; use `await`.
        TypeError: It is neither a future of aiopar nor a coroutine.
        RuntimeError: The coroutine awaits something that needs an event loop.

    Example:
        >>> import aiopar
        >>> aiopar.wait(aiopar.fork(max, 3, 5))
        5
    """
    if isinstance(future, Future):
        try:
            return future.wait()
        finally:
            # The error's traceback holds this frame, which must not hold the error.
            del future
    if not isinstance(future, Coroutine):
        raise TypeError(
            f"expected an aiopar.Future or a coroutine, got {type(future).__name__}: futures of "
            "torch go through aiopar.wrap_future"
        )
    if in_event_loop():
        future.close()
        raise BlockingWaitError("wait() would block the event loop of this thread: use `await`")
    try:
        # Without an event loop, every await of aiopar blocks (`Future.__await__`): nothing is
        # ever yielded to who drives the coroutine.
        future.send(None)
    except StopIteration as finished:
        value: T = finished.value
        return value
    future.close()
    raise RuntimeError("wait() drives aiopar's own coroutines only; this one needs an event loop")
