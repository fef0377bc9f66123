"""Waiting for many futures."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from typing import Any, Generic, Self, TypeVar, overload

import anyio

from .._base.arguments import AsyncOnly, as_list, short_repr
from ..errors import BlockingWaitError
from ._future import DoneCallback, Future, running_future, thread_hooks
from ._wakeup import in_event_loop

# `Future` is invariant: futures of different types together are futures of Any.
T = TypeVar("T")


@overload
def collect_all(futures: Iterable[Future[T]]) -> Future[list[Future[T]]]: ...


@overload
def collect_all(futures: Iterable[Future[Any]]) -> Future[list[Future[Any]]]: ...


def collect_all(futures: Iterable[Future[Any]]) -> Future[list[Future[Any]]]:
    """Return a future of the list of `futures`, done when all of them are, however they ended.

    Mirrors `torch.futures.collect_all`. Differences: if one of the futures fails, this future does
    not; torch's fails. To cancel this future or its `await` does not cancel `futures`.

    Args:
        futures: Futures of aiopar. If there are none, the result is done at once.

    Returns:
        A future of a list of the same futures, in their order.

    Raises:
        TypeError: `futures` is no iterable, or an item is not a future of aiopar.

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
    # One token per future. `pop` is atomic: the future that ends last gets the last token, 0.
    tokens = [*range(len(collected))]

    def finished(_: Future[Any]) -> None:
        if tokens.pop() == 0 and everything.claim():
            everything.set_result(collected)

    everything.call = DoneCallback(collected, finished)
    for future in collected:
        future.add_done_callback(finished)
    return everything


class cancel_scope:  # noqa: N801  # used like a function of `contextlib`
    """A cancel scope of anyio that may be left in another task, or without a loop.

    A coroutine is closed wherever it is collected: anyio's own scopes raise there. Without a loop,
    in `aiopar.wait`, this scope does nothing. `seconds` is the time limit of the body.
    """

    __slots__ = ("_scope", "_seconds", "_shield")

    def __init__(self, seconds: float | None = None, *, shield: bool = False) -> None:
        self._scope: anyio.CancelScope | None = None
        self._seconds = seconds
        self._shield = shield

    @property
    def cancelled_caught(self) -> bool:
        """Whether the time limit has ended the body."""
        return self._scope is not None and self._scope.cancelled_caught

    def __enter__(self) -> Self:
        if in_event_loop():
            self._scope = anyio.move_on_after(self._seconds, shield=self._shield)
            self._scope.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> bool | None:
        try:
            return None if self._scope is None else self._scope.__exit__(kind, *error)
        except RuntimeError:
            if kind is not GeneratorExit:
                raise
            return None
        finally:
            del error  # its traceback holds this frame


at_second_ctrl_c: list[Callable[[], object]] = []
"""Called at a Ctrl-C that comes while running calls hold up the end of the program."""


@contextmanager
def heeding_ctrl_c() -> Iterator[None]:
    """Call `at_second_ctrl_c` if a second Ctrl-C interrupts the wait in the block."""
    leaving = sys.exception() is not None  # the first Ctrl-C has left an error or a cancellation
    try:
        yield
    except KeyboardInterrupt:  # of trio, or without a loop
        if leaving:
            _look()
        raise
    except asyncio.CancelledError:
        look_for_ctrl_c()
        raise


def look_for_ctrl_c() -> None:
    """Call `at_second_ctrl_c` soon, if `asyncio.run` ends the tasks of this loop after a Ctrl-C."""
    # `asyncio.run` does so while it handles KeyboardInterrupt. A task would see its own error.
    asyncio.get_running_loop().call_soon(_look)


def _look() -> None:
    if isinstance(sys.exception(), KeyboardInterrupt):
        for callback in at_second_ctrl_c:
            callback()


async def settle(futures: Iterable[Future[Any]]) -> None:
    """Wait until all futures are done; a cancellation does not end the wait."""
    running = [future for future in futures if not future.done()]
    with cancel_scope(shield=True):  # asyncio's `task.cancel()` gets through it, once
        while not all(future.done() for future in running):
            with suppress(asyncio.CancelledError), heeding_ctrl_c():
                await collect_all(running)


async def close_fully(aclose: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Await `aclose()` to its end in spite of cancellation; then raise its error or a cancellation.

    `aclose` shields itself from anyio's and trio's cancellation, and is called again if
    `task.cancel()` of asyncio ends it.
    """
    cancelled: asyncio.CancelledError | None = None
    try:
        while True:
            try:
                with heeding_ctrl_c():
                    await aclose()
                break
            except asyncio.CancelledError as error:
                if error is cancelled:  # raised by `aclose` itself, not by `task.cancel()`
                    raise
                cancelled = error
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled, aclose  # the error's traceback refers to this frame


@overload
def wait_all(futures: Iterable[Future[T]]) -> list[T]: ...


@overload
def wait_all(futures: Iterable[Future[Any]]) -> list[Any]: ...


def wait_all(futures: Iterable[Future[Any]]) -> list[Any]:
    """Block until all futures are done; return their values, or raise the first error in order.

    Mirrors `torch.futures.wait_all`. Difference: torch's raises the error of a callback at once,
    without waiting for the other futures. A worker that waits here first runs the calls of its
    executor that have not started.

    Args:
        futures: Futures of aiopar.

    Raises:
        BlockingWaitError: A future is not done, and this thread runs an event loop.
        TypeError: `futures` is no iterable, or an item is not a future of aiopar.

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
        # An error's traceback refers to this frame, which must not refer to the error.
        del waited, futures


class as_completed(AsyncOnly, Generic[T]):  # noqa: N801  # used like the function of asyncio
    """An async iterator that yields each future when it is done.

    As `asyncio.as_completed`. Differences: it yields the futures that it was given, and any number
    of tasks may read it. A future given twice comes once. Futures that are never read run on.

    Args:
        futures: Futures of aiopar.

    Raises:
        TypeError: `futures` is no iterable, or an item is not a future of aiopar.

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
        # Slots are filled in the order of completion and read in this order. They are a heap,
        # because several reads may be cancelled, and put their slots back in any order.
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
        except BaseException:  # cancelled: the next read gets the slot
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
