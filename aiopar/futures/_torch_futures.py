"""`wrap_future`: torch's own futures, awaited."""

import threading
from functools import partial
from typing import Any, TypeVar, overload

import torch

from .._base.devices import current_stream, is_accelerator, record_event
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
    """An aiopar future of one of torch's: `torch.futures`, `torch.jit`, or a distributed `Work`.

    It completes with the other's value or error, when its tensors are complete on their
    accelerators. It cannot be cancelled: what it stands for runs already.

    Args:
        future: The other's; one of aiopar is returned as it is.

    Raises:
        TypeError: It is none of these.

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
            events = _events_of(result)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the awaiter gets it
            # Without this frame, and without those in which torch raised it: they hold the error.
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


def _events_of(result: object) -> list[torch.Event]:
    """One for each accelerator on which `result` may still be computed.

    torch calls back with streams current that are ordered after the computation.
    """
    devices = {tensor.device for tensor in tensors(result) if is_accelerator(tensor.device)}
    return [record_event(current_stream(device)) for device in devices]


def _complete_elsewhere(events: list[torch.Event], future: Future[Any], result: object) -> None:
    # Not here: torch may call from the loop's thread, with kernels still running. The thread lives
    # as long as these do, and the process no shorter.
    waits = partial(_complete_after, events, future, result)
    try:
        threading.Thread(target=waits, name="aiopar-wrap_future").start()
    except RuntimeError:  # there can be no more threads: better late than never
        waits()


def _complete_after(events: list[torch.Event], future: Future[Any], result: object) -> None:
    try:
        for event in events:
            event.synchronize()
    except BaseException as error:  # noqa: BLE001  # what a kernel raised is the awaiter's
        future.set_exception(own_traceback(error))
    else:
        future.set_result(result)
