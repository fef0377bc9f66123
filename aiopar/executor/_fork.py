"""`fork` and `wait`: those of torch.jit, but parallel in eager mode."""

from collections.abc import Callable, Coroutine
from functools import partial
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch

from .._base.arguments import check_callable
from .._base.tree import first_tensor
from ..errors import BlockingWaitError
from ..futures._future import Future, thread_hooks
from ..futures._wakeup import in_event_loop
from ._current import get_executor
from ._worker import current_worker

T = TypeVar("T")
P = ParamSpec("P")


def fork(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call `fn(*args, **kwargs)` on a worker, and return the future of the result at once.

    Mirrors `torch.jit.fork`. The call runs on the device of the first tensor or module parameter in
    `fn` (perhaps the method of a module, or a `functools.partial`) and its arguments. If there is
    none, the call runs on the device of the calling worker, or else on the CPU. Forks may nest to
    any depth on any number of workers.

    Differences from `torch.jit.fork`: the call runs in parallel without TorchScript (torch runs it
    inline in eager mode). The result is an `aiopar.Future`, which can be awaited. The call has the
    caller's grad mode, autocast, context variables and so on.

    Args:
        fn: A function, a method, a module, a ScriptFunction or a ScriptModule.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The future of the result.

    Raises:
        TypeError: `fn` is not callable, or is a coroutine function or a generator function. The
            future raises it if `fn` returns a coroutine or a generator.
        ValueError: The current executor has no worker on the device.
        QueueFull: Every worker of the device has `max_pending` calls waiting.
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
    device = device_of(*_parts(fn), *args, *kwargs.values())
    return get_executor().on(device).submit(fn, *args, **kwargs)


def _parts(fn: Callable[..., object]) -> tuple[object, ...]:
    """The callable, the object of a method and the arguments of a partial."""
    if isinstance(fn, partial):
        return *_parts(fn.func), *fn.args, *fn.keywords.values()
    return fn, getattr(fn, "__self__", None)


def device_of(*values: object) -> torch.device:
    """The device of the first tensor, module parameter or buffer in `values`.

    If there is none: the device of the calling worker, or else the CPU.
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

    Mirrors `torch.jit.wait`. It is made for calls on workers. If the call has not started,
    a waiting worker of the same executor runs it: nested calls never deadlock. `wait` also drives
    aiopar's own coroutines, so that parallel models nest: `aiopar.wait(dp(x))`.

    Args:
        future: A future or a coroutine of aiopar.

    Returns:
        The value of the future, or the result of the coroutine.

    Raises:
        BlockingWaitError: A `RuntimeError`: this thread runs an event loop; use `await`.
        TypeError: `future` is neither a future of aiopar nor a coroutine.
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
            del future  # the error's traceback holds this frame, which must not hold the error
    if not isinstance(future, Coroutine):
        raise TypeError(
            f"expected an aiopar.Future or a coroutine, got {type(future).__name__} "
            "(aiopar.wrap_future takes torch's futures)"
        )
    if in_event_loop():
        future.close()
        raise BlockingWaitError("wait() would block the event loop of this thread: use `await`")
    outer, thread_hooks.driving = thread_hooks.driving, True
    try:
        # Without an event loop every await of aiopar blocks, and the coroutine yields nothing.
        future.send(None)
    except StopIteration as finished:
        value: T = finished.value
        return value
    finally:
        thread_hooks.driving = outer
    future.close()
    raise RuntimeError("wait() drives aiopar's own coroutines only; this one needs an event loop")
