"""Waiting for many futures, and for torch's own."""

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

import anyio
import torch

from ._completion import own_traceback
from ._devices import current_stream, is_accelerator, record_event
from ._errors import BlockingWaitError
from ._future import Future, running_future, thread_hooks
from ._tree import tensors
from ._wakeup import in_event_loop

T = TypeVar("T")

_FRAMES_OF_WRAPPED = (__name__, "torch.futures")


def collect_all(futures: Iterable[Future[T]]) -> Future[list[Future[T]]]:
    """A future of the list of `futures`, done when all of them are, whatever way each ended.

    Mirrors `torch.futures.collect_all`. Difference: it does not fail when one of them did (torch's
    does, with the first error, once all are done); each has its own outcome. Cancelling it, or its
    `await`, leaves them alone.

    Raises:
        TypeError: One of them is not a future of aiopar.

    Example:
        >>> import asyncio, aiopar
        >>> async def main():
        ...     done = await aiopar.collect_all([aiopar.fork(pow, 2, n) for n in range(4)])
        ...     return [future.value() for future in done]
        >>> asyncio.run(main())
        [1, 2, 4, 8]
    """
    collected = _checked(futures)
    everything: Future[list[Future[T]]] = Future()
    if not collected:
        everything.set_result(collected)
    # A token for each future: popping one is atomic, and it is the last to end that gets the last.
    tokens = deque(range(len(collected)))

    def finished(_: Future[T]) -> None:
        if tokens.pop() == 0 and everything.claim():
            everything.set_result(collected)

    for future in collected:
        future.add_done_callback(finished)
    return everything


async def settle(futures: Iterable[Future[Any]]) -> None:
    """Wait until all are done, whoever cancels meanwhile: for what must not be left behind."""
    running = [future for future in futures if not future.done()]
    if not running:
        return
    if not in_event_loop():
        await collect_all(running)
        return
    # The scope keeps anyio's and trio's cancellation out; asyncio's own comes through, once each.
    with anyio.CancelScope(shield=True):
        while not all(future.done() for future in running):
            with suppress(asyncio.CancelledError):
                await collect_all(running)


def wait_all(futures: Iterable[Future[T]]) -> list[T]:
    """Block until all are done and return their values; raises the first error in their order.

    Mirrors `torch.futures.wait_all`, which waits for all of them too before it raises. A worker
    that waits here runs those calls of its executor itself that nobody has started.

    Raises:
        BlockingWaitError: This is an event loop's thread, and one of them is not done.
        TypeError: One of them is not a future of aiopar.

    Example:
        >>> import aiopar
        >>> aiopar.wait_all([aiopar.fork(pow, 2, n) for n in range(4)])
        [1, 2, 4, 8]
    """
    waited = _checked(futures)
    if in_event_loop() and not all(future.done() for future in waited):
        raise BlockingWaitError(
            "wait_all() would block the event loop of this thread: "
            "use `await aiopar.collect_all(futures)`"
        )
    if thread_hooks.help is not None:
        for future in waited:
            thread_hooks.help(future)
            del future
    collect_all(waited).result()
    try:
        return list(map(Future.value, waited))
    finally:
        # An error's traceback holds this frame, which must not hold the error.
        del waited, futures


class as_completed(Generic[T]):  # noqa: N801  # a function to its callers, as in asyncio
    """An async iterator over futures, each when it is done.

    As `asyncio.as_completed`, but it yields the futures themselves, so that one knows which it
    is, and any number of tasks may read it. A future given twice comes once. Futures that the
    readers leave behind run on.

    Raises:
        TypeError: One of them is not a future of aiopar.

    Example:
        >>> import asyncio, aiopar
        >>> async def main():
        ...     futures = [aiopar.fork(pow, 2, n) for n in range(4)]
        ...     return sorted([f.value() async for f in aiopar.as_completed(futures)])
        >>> asyncio.run(main())
        [1, 2, 4, 8]
    """

    def __init__(self, futures: Iterable[Future[T]]) -> None:
        waited = dict.fromkeys(_checked(futures))
        # One slot a future, filled in the order of completion and read in order.
        self._slots: deque[Future[Future[T]]] = deque(running_future() for _ in waited)
        unfilled = deque(self._slots)
        for future in waited:
            future.add_done_callback(lambda done: unfilled.popleft().set_result(done))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Future[T]:
        if not self._slots:
            raise StopAsyncIteration
        slot = self._slots.popleft()
        try:
            return await slot
        except BaseException:  # cancelled: for the next read
            self._slots.appendleft(slot)
            raise


def wrap_future(future: Any) -> Future[Any]:
    """An aiopar future of one of torch's: `torch.futures`, `torch.jit`, or a distributed `Work`.

    It completes with the other's value or error, when its tensors are complete on their
    accelerators. It cannot be cancelled: what it stands for runs already.

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
            # Not here: torch may call from the loop's thread, with kernels still running.
            threading.Thread(target=_complete_after, args=(events, wrapped, result)).start()
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


def _complete_after(events: list[torch.Event], future: Future[Any], result: object) -> None:
    try:
        for event in events:
            event.synchronize()
    except BaseException as error:  # noqa: BLE001  # what a kernel raised is the awaiter's
        future.set_exception(own_traceback(error))
    else:
        future.set_result(result)


def _checked(futures: Iterable[Future[T]]) -> list[Future[T]]:
    checked = list(futures)
    for index, future in enumerate(checked):
        if not isinstance(future, Future):
            raise TypeError(
                f"expected futures of aiopar, got {type(future).__name__} at index {index}"
                " (aiopar.wrap_future takes those of torch)"
            )
    return checked
