"""Generators on workers: `Steps` advances a generator, `Iteration` reads it on an event loop."""

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final, Generic, NoReturn, Self, TypeVar

from .._base.arguments import AsyncOnly, items_of, name_of, short_repr
from .._base.destructors import destructor
from .._base.thread_state import CallerState, SuspendedState, TorchState, thread_torch_state
from .._base.tracebacks import log_failure
from ..errors import ExecutorShutdown
from ..futures._future import Future, in_own_thread, running_future
from ..futures._waiting import cancel_scope, close_fully, collect_all
from ..futures._wakeup import ki_protected

T = TypeVar("T")

END: Final[Any] = object()
"""Stands in place of an item when an iterator has no more items."""


class Steps(Generic[T]):
    """An iterator over a generator whose steps may run on different threads, one at a time.

    The first step calls `make`, which returns the generator or any other iterable. The generator
    keeps its own context variables (`context`, or a copy of the caller's) and torch state between
    steps: a `with torch.no_grad(): yield` does not change the state of the thread. Take each step
    under the state of `caller`, as in a call with that state. An error ends the iterator.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[T]],
        caller: CallerState,
        context: contextvars.Context | None = None,
    ) -> None:
        self._make: Callable[[], Iterable[T]] | None = make
        self._iterator: Iterator[T] | None = None
        self._context = caller.context() if context is None else context
        self._caller = caller.torch_state
        self._outside: TorchState | None = None
        # A switch of the state costs as much as ten steps, and most generators do not change the
        # state. So the state is switched only after a step that has changed it.
        self._suspended: SuspendedState | None = None
        self.ended = False
        """Whether there are no more items, the generator has failed or was closed."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self.ended:
            raise StopIteration
        try:
            if self._suspended is None:
                item = self._context.run(self._advance)
                if thread_torch_state() != self._outside:
                    self._suspended = SuspendedState.take(self._outside)
            else:
                with self._suspended:
                    item = self._context.run(self._advance)
        except StopIteration as error:
            self.ended = True
            raise RuntimeError("an iterable raised StopIteration before it began") from error
        except BaseException:
            self.ended = True
            raise
        if item is END:
            self.ended = True
            raise StopIteration
        return item

    def _advance(self) -> T:
        if self._iterator is None:
            make, self._make = self._make, None
            assert make is not None  # noqa: S101
            self._outside = thread_torch_state()
            self._iterator = items_of(make())
        return next(self._iterator, END)

    @property
    def closable(self) -> bool:
        """Whether `close` has work to do: the generator has begun and not ended."""
        return not self.ended and hasattr(self._iterator, "close")

    def close(self) -> None:
        """Close the generator; on any thread."""
        try:
            if self.closable:
                self.ended = True
                with self._suspended or SuspendedState(self._caller):
                    self._context.run(self._iterator.close)  # type: ignore[union-attr]  # closable
        finally:
            self.ended = True
            self._iterator = self._make = None


class Iteration(AsyncOnly, Generic[T]):
    """An async iterator over a sync generator; `DeviceExecutor.iterate` returns it.

    Each step is a call of its own on one worker, which is free between steps. The end of an
    `async with` closes the generator. After a `break` in a plain `async for`, the generator is
    closed when the iterator is collected. An error of the generator is raised in place of the item,
    and ends the iteration. One task may read at a time. A cancelled read loses no item.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[], Any]], Future[Any]],
        make: Callable[[], Iterable[T]],
        caller: CallerState,
        buffer: int,
    ) -> None:
        self._submit = submit
        self._name = name_of(make)
        self._steps = Steps(make, caller)
        self._buffer = buffer
        self._lock = threading.RLock()  # a destructor may interrupt its holder and cancel a step
        self._ahead: deque[Future[list[T]]] = deque()
        """The steps whose items were not read; only the last one may be unfinished."""
        self._reading = False
        self._closed: Future[Any] | None = None
        """Set when closing begins; done when the generator is closed."""

    def __reduce__(self) -> NoReturn:
        # A copy would close the generator when it is collected.
        raise TypeError(f"a {type(self).__name__} can be neither pickled nor copied")

    @short_repr
    def __repr__(self) -> str:
        state = f"{len(self._ahead)} ahead" if self._closed is None else "closed"
        return f"of {self._name}, {state}"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._reading:
            raise RuntimeError("this iteration is read by another task already")
        self._reading = True
        try:
            item = await self._next()
        except StopAsyncIteration as error:
            # StopAsyncIteration would end the reader's `async for` and hide the failure.
            raise RuntimeError("the generator raised StopAsyncIteration") from error
        finally:
            self._reading = False
        if item is END:
            raise StopAsyncIteration
        return item

    @ki_protected
    async def _next(self) -> T:
        step = self._step_ahead(max(1, self._buffer))
        if step is None:
            return END  # type: ignore[no-any-return]
        # Not `await step`: a cancelled read must leave the step, and its item, to the next read.
        if not step.done():
            await collect_all([step])
        with self._lock:
            if self._closed is not None:  # another task has closed the iteration meanwhile
                return END  # type: ignore[no-any-return]
            self._ahead.popleft()
        self._refill()
        try:
            items = step.value()
            return items[0] if items else END
        finally:
            del step  # it holds the error, whose traceback holds this frame

    def _step_ahead(self, limit: int) -> Future[list[T]] | None:
        """Start the next step unless `limit` steps are ahead; return the oldest step."""
        started = None
        with self._lock:
            running = bool(self._ahead) and not self._ahead[-1].done()
            may_start = self._closed is None and not (running or self._steps.ended)
            if may_start and len(self._ahead) < limit:
                # In a list, because an item may be a generator, which no call may return.
                started = self._submit(partial(list, islice(self._steps, 1)))
                self._ahead.append(started)
            first = self._ahead[0] if self._ahead else None
        if started is not None:
            started.add_done_callback(self._refill)
        return first

    def _refill(self, _: object = None) -> None:
        with suppress(ExecutorShutdown):  # the next read raises it
            self._step_ahead(self._buffer)

    async def aclose(self) -> None:
        """Close the generator on its worker, after a running step; later calls do nothing.

        A cancelled `aclose` closes the generator, then raises the cancellation. If the generator
        fails when it is closed, the first `aclose` raises its error.
        """
        await close_fully(self._close)

    async def _close(self) -> None:
        closed = self._begin_close()
        with cancel_scope(shield=True):
            await collect_all([closed])
        self._closed = collect_all(())  # the traceback of the error refers to this object
        try:
            closed.value()
        finally:
            del closed

    @ki_protected
    def _begin_close(self) -> Future[Any]:
        """Start no more steps, and close the generator after the running step."""
        with self._lock:
            if self._closed is not None:
                return self._closed
            closed = self._closed = running_future()
            running = collect_all(self._ahead)
            self._ahead.clear()
        running.add_done_callback(partial(self._close_steps, closed))
        return closed

    def _close_steps(self, closed: Future[Any], _: object) -> None:
        if not self._steps.closable:
            closed.set_result(None)
            return
        try:
            closing = self._submit(self._steps.close)
        except ExecutorShutdown:
            closing = Future()
            closing.cancel()
        closing.add_done_callback(partial(self._closed_by_worker, closed))

    def _closed_by_worker(self, closed: Future[Any], closing: Future[Any]) -> None:
        if closing.cancelled():  # by a shutdown; perhaps on an event loop's thread
            in_own_thread("aiopar-iterate", partial(_complete, closed, self._steps.close))
        else:
            _complete(closed, closing.value)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @destructor  # at the end of the interpreter CPython closes the generator
    def __del__(self) -> None:
        if self._closed is None:
            self._begin_close().add_done_callback(partial(log_failure, "a generator"))


def _complete(future: Future[Any], fn: Callable[[], Any]) -> None:
    try:
        future.set_result(fn())
    except BaseException as error:  # noqa: BLE001  # the waiter gets it
        future.set_exception(error)
    finally:
        del future, fn  # the error's traceback holds this frame
