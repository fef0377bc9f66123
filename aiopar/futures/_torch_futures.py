"""`wrap_future`: makes torch's own futures awaitable."""

import threading
from functools import partial
from typing import Any, TypeVar, overload

import torch

from .._base.devices import result_events
from .._base.tracebacks import own_traceback
from .._base.tree import tensors
from ._future import Future, running_future

T = TypeVar("T")

_FRAMES_OF_WRAPPED = (__name__, "torch.futures")


@overload
def wrap_future(future: Future[T] | torch.futures.Future[T]) -> Future[T]: ...


@overload
def wrap_future(future: Any) -> Future[Any]: ...


def wrap_future(future: Any) -> Future[Any]:
    """Make an aiopar future of a future of `torch.futures` or `torch.jit`, or a distributed `Work`.

    The new future has the same value or error. It is done when the tensors of the value are
    complete on their accelerators. It cannot be cancelled, because the work runs already.

    Args:
        future: The future or `Work`. A future of aiopar is returned unchanged.

    Raises:
        TypeError: `future` is something else.

    Example:
        >>> import asyncio, aiopar, torch
        >>> theirs = torch.futures.Future()
        >>> theirs.set_result(3)
        >>> async def main():
        ...     return await aiopar.wrap_future(theirs)
        >>> asyncio.run(main())
        3
    """
    if isinstance(future, Future):
        return future
    theirs = future.get_future() if hasattr(future, "get_future") else future
    if not isinstance(theirs, torch._C.Future):
        raise TypeError(f"expected a torch future or Work, got {type(future).__name__}")
    wrapped: Future[Any] = running_future()

    def finished(done: Any) -> None:
        try:
            result = done.wait()
            # When torch calls back, the current streams are ordered after the computation.
            events = result_events(tensors(result))
        except BaseException as error:  # noqa: BLE001  # every error goes to the awaiter
            # Without this frame and torch's frames, which refer to the error.
            traceback = error.__traceback__
            while traceback and traceback.tb_frame.f_globals["__name__"] in _FRAMES_OF_WRAPPED:
                traceback = traceback.tb_next
            wrapped.set_exception(error.with_traceback(traceback))
            return
        if events:
            _complete_elsewhere(events, wrapped, result)
        else:
            wrapped.set_result(result)

    theirs.add_done_callback(finished)
    return wrapped


def _complete_elsewhere(events: list[torch.Event], future: Future[Any], result: object) -> None:
    # In a thread, because torch may call back on the loop's thread, with kernels still running.
    waits = partial(_complete_after, events, future, result)
    try:
        threading.Thread(target=waits, name="aiopar-wrap_future").start()
    except RuntimeError:  # no more threads can be started
        waits()


def _complete_after(events: list[torch.Event], future: Future[Any], result: object) -> None:
    try:
        for event in events:
            event.synchronize()
    except BaseException as error:  # noqa: BLE001  # a kernel's error goes to the awaiter
        future.set_exception(own_traceback(error))
    else:
        future.set_result(result)
