"""Waiting for many futures."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from heapq import heappop, heappush
from typing import Any, Generic, Self, TypeVar, overload

import anyio

from .._base.arguments import as_list, short_repr
from ..errors import BlockingWaitError
from ._future import DoneCallback, Future, running_future, thread_hooks
from ._wakeup import in_event_loop

T = TypeVar("T")


# A future is invariant in its type: those of different types are futures of Any together.


@overload
def collect_all(futures: Iterable[Future[T]]) -> Future[list[Future[T]]]: ...


@overload
def collect_all(futures: Iterable[Future[Any]]) -> Future[list[Future[Any]]]: ...


def collect_all(futures: Iterable[Future[Any]]) -> Future[list[Future[Any]]]:
    """A future of the list of `futures`, done when all of them are, whatever way each ended.

    Mirrors `torch.futures.collect_all`. Difference: it does not fail when one of them did; each has
    its own outcome. torch's fails: with the error of a callback at once, with one of
    `set_exception` when all are done. Cancelling it, or its `await`, leaves them alone.

    Args:
        futures: Futures of aiopar; none is done at once.

    Returns:
        A future of a list of the same futures, in their order.

    Raises:
        TypeError: `futures` is no iterable, or one of them is not a future of aiopar.

    Example:
        >>> import asyncio, aiopar
        >>> async def main():
        ...     done = await aiopar.collect_all([aiopar.fork(pow, 2, n) for n in range(4)])
        ...     return [future.value() for future in done]
        >>> asyncio.run(main())
        [1, 2, 4, 8]
    """
    collected = _checked(futures)
    everything: Future[list[Future[Any]]] = Future()
    if not collected:
        everything.set_result(collected)
        return everything
    # A token for each future: popping one is atomic, and it is the last to end that gets the last.
    tokens = deque(range(len(collected)))

    def finished(_: Future[Any]) -> None:
        if tokens.pop() == 0 and everything.claim():
            everything.set_result(collected)

    everything.call = DoneCallback(collected, finished)
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


async def close_fully(aclose: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """`aclose()` to its end, whoever cancels meanwhile: for `async with`, which leaves nothing.

    Then the cancellation goes on; or an error that `aclose` raises, in its place.

    Args:
        aclose: May be called again where it was given up: shielded from anyio's and trio's
            cancellation, it is ended by asyncio's own.
    """
    cancelled: asyncio.CancelledError | None = None
    try:
        while True:
            try:
                await aclose()
                break
            except asyncio.CancelledError as error:
                if error is cancelled:  # what is closed has raised it: nobody cancels
                    raise
                cancelled = error
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled, aclose  # its traceback holds this frame


@overload
def wait_all(futures: Iterable[Future[T]]) -> list[T]: ...


@overload
def wait_all(futures: Iterable[Future[Any]]) -> list[Any]: ...


def wait_all(futures: Iterable[Future[Any]]) -> list[Any]:
    """Block until all are done and return their values; raises the first error in their order.

    Mirrors `torch.futures.wait_all`. Difference: torch's raises the error of a callback at once,
    without waiting for the others. A worker that waits here runs those calls of its executor itself
    that nobody has started.

    Args:
        futures: Futures of aiopar.

    Raises:
        BlockingWaitError: This is an event loop's thread, and one of them is not done.
        TypeError: `futures` is no iterable, or one of them is not a future of aiopar.

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

    Args:
        futures: Futures of aiopar.

    Raises:
        TypeError: `futures` is no iterable, or one of them is not a future of aiopar.

    Example:
        >>> import asyncio, aiopar
        >>> async def main():
        ...     futures = [aiopar.fork(pow, 2, n) for n in range(4)]
        ...     return sorted([f.value() async for f in aiopar.as_completed(futures)])
        >>> asyncio.run(main())
        [1, 2, 4, 8]
    """

    @overload
    def __init__(self, futures: Iterable[Future[T]]) -> None: ...

    @overload
    def __init__(self: "as_completed[Any]", futures: Iterable[Future[Any]]) -> None: ...

    def __init__(self, futures: Iterable[Future[Any]]) -> None:
        waited = dict.fromkeys(_checked(futures))
        # One slot a future, filled in the order of completion and read in order: a heap, for
        # several reads may be cancelled, and give theirs back in any order.
        unfilled: deque[Future[Future[T]]] = deque(running_future() for _ in waited)
        self._slots = list(enumerate(unfilled))
        for future in waited:
            future.add_done_callback(lambda done: unfilled.popleft().set_result(done))

    @short_repr
    def __repr__(self) -> str:
        return f"with {len(self._slots)} to come"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Future[T]:
        if not self._slots:
            raise StopAsyncIteration
        number, slot = heappop(self._slots)
        try:
            return await slot
        except BaseException:  # cancelled: for the next read
            heappush(self._slots, (number, slot))
            raise


def _checked(futures: Iterable[Future[T]]) -> list[Future[T]]:
    checked = as_list("futures", futures, "futures of aiopar")
    for index, future in enumerate(checked):
        if not isinstance(future, Future):
            raise TypeError(
                f"expected futures of aiopar, got {type(future).__name__} at index {index}"
                " (aiopar.wrap_future takes those of torch)"
            )
    return checked
