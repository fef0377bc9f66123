"""A synchronous generator, stepped on a worker and read from an event loop."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, Self, TypeVar

import anyio
import torch

from ._caller import CallerState
from ._context import FRESH_STATE, applied, capture_torch_state, fresh
from ._errors import ExecutorShutdown
from ._future import Future
from ._observer import logger
from ._waiting import collect_all

T = TypeVar("T")

_END: Any = object()


class _Steps(Generic[T]):
    """A generator and the state that it carries from step to step; run on a worker."""

    def __init__(self, make: Callable[[], Iterable[T]], caller: CallerState) -> None:
        self._make: Callable[[], Iterable[T]] | None = make
        self._iterator: Any = None
        self._context = caller.context()
        self._torch_state = caller.torch_state or FRESH_STATE
        self._autocast_nesting = 0
        self.ended = False
        """Whether there is nothing left to step; set before the last step's future is done."""

    @property
    def suspended(self) -> bool:
        """Whether it has begun and not ended: it may be inside of `with` and `try` blocks."""
        return self._iterator is not None and not self.ended

    def step(self) -> T:
        """The next item, or `_END`."""
        with self._stashed():
            return self._context.run(self._advance)

    def close(self) -> None:
        """Leave the generator's `with` and `finally` blocks; nothing if it never began."""
        self.ended = True
        self._make = None
        close = getattr(self._iterator, "close", None)
        if close is not None:
            with self._stashed():
                self._context.run(close)

    @contextmanager
    def _stashed(self) -> Iterator[None]:
        # What the generator has entered and not left (grad mode, autocast, ...) is its own: put
        # on before each step, taken off the thread after it.
        with fresh(), applied(self._torch_state):
            nesting = _autocast_nesting()
            _set_autocast_nesting(nesting + self._autocast_nesting)
            try:
                yield
            finally:
                self._torch_state = capture_torch_state() or FRESH_STATE
                self._autocast_nesting = _autocast_nesting() - nesting
                _set_autocast_nesting(nesting)

    def _advance(self) -> T:
        try:
            make, self._make = self._make, None
            if make is not None:
                self._iterator = iter(make())
            # A default, for a StopIteration could not pass through a future.
            item: T = next(self._iterator, _END)
        except BaseException:
            self.ended = True
            raise
        if item is _END:
            self.ended = True
        return item


def _autocast_nesting() -> int:
    # torch counts the `autocast` blocks that a thread is in, and drops the casts of weights that
    # it keeps when it leaves the outermost. There is no reading it but by counting.
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_nesting(wanted: int) -> None:
    nesting = _autocast_nesting()
    for _ in range(wanted - nesting):
        torch.autocast_increment_nesting()
    for _ in range(nesting - wanted):
        torch.autocast_decrement_nesting()


class Iteration(Generic[T]):
    """An async iterator over what a sync generator yields; made by `DeviceExecutor.iterate`.

    Each step is a call of its own on one worker, which is free between steps. `async with` closes
    the generator on leaving; a plain `async for` that is broken off closes it when the iterator
    is collected, also on its worker. An error of the generator is raised where its item would have
    come, and ends the iteration. One task reads at a time; a read that is cancelled loses no item.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        make: Callable[[], Iterable[T]],
        caller: CallerState,
        buffer: int,
    ) -> None:
        self._closed = True  # until there is something to close
        if isinstance(buffer, bool) or not isinstance(buffer, int):
            raise TypeError(f"buffer must be an int, not {type(buffer).__name__}")
        if buffer < 0:
            raise ValueError(f"buffer must not be negative, got {buffer}")
        self._submit = submit
        self._steps = _Steps(make, caller)
        self._buffer = buffer
        self._lock = threading.Lock()
        # Steps whose items nobody has read. Only the last can be unfinished, for a generator
        # cannot be entered twice.
        self._ahead: deque[Future[T]] = deque()
        self._reading = False
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._reading:
            raise RuntimeError("this iteration is read by another task already")
        self._reading = True
        try:
            item = await self._next()
        finally:
            self._reading = False
        if item is _END:
            raise StopAsyncIteration
        return item

    async def _next(self) -> T:
        step = self._step_ahead(max(1, self._buffer))
        if step is None:
            return _END  # type: ignore[no-any-return]
        # Not the step itself: a cancelled read leaves it, and its item, for the next read.
        if not step.done():
            await collect_all([step])
        with self._lock:
            if self._closed:  # meanwhile, by another task
                return _END  # type: ignore[no-any-return]
            self._ahead.popleft()
        with suppress(ExecutorShutdown):  # the next read says so; this one has its item
            self._step_ahead(self._buffer)
        return step.value()

    def _step_ahead(self, limit: int) -> Future[T] | None:
        """Begin the next step, unless there are `limit` ahead; the first of those ahead."""
        begun = None
        with self._lock:
            under_way = bool(self._ahead) and not self._ahead[-1].done()
            idle = not (under_way or self._closed or self._steps.ended)
            if idle and len(self._ahead) < limit:
                begun = self._submit(self._steps.step)
                self._ahead.append(begun)
            first = self._ahead[0] if self._ahead else None
        if begun is not None:
            begun.add_done_callback(self._stepped)
        return first

    def _stepped(self, _: Future[T]) -> None:
        # In the worker's thread; while the buffer is full the worker is free for others.
        with suppress(ExecutorShutdown):  # the next read says so
            self._step_ahead(self._buffer)

    async def aclose(self) -> None:
        """Close the generator on its worker, after the step that runs; may be called twice.

        Raises what the generator raises when it is closed.
        """
        with self._lock:
            self._closed = True
            under_way = list(self._ahead)
            self._ahead.clear()
        with anyio.CancelScope(shield=True):
            await collect_all(under_way)
            if not self._steps.suspended:
                return
            try:
                await self._submit(self._steps.close)
            except ExecutorShutdown:
                await anyio.to_thread.run_sync(self._steps.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._closed or not self._steps.suspended:
            return
        try:
            self._submit(self._steps.close).add_done_callback(_log_failure)
        except ExecutorShutdown:
            # No worker is left. Here rather than by the generator's own end, which would leave
            # its grad mode and the like to this thread.
            self._steps.close()


def _log_failure(closed: Future[None]) -> None:
    if not closed.cancelled() and (error := closed.exception()) is not None:
        logger.error("a generator failed when it was closed", exc_info=error)
