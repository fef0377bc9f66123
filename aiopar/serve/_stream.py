"""What the caller of `Batcher.stream` holds."""

from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Protocol, Self

from .._awaiter import awaiter_here
from .._future import thread_hooks
from .._repr import short_repr
from .._steps import END
from ._observer import BatchObservers
from ._readers import StreamRequest
from ._request import Request
from ._task import TaskRef, current_task, has_ended
from ._timer import Cancel


class StreamEntry:
    """A request that was put in the queue; used on its caller's loop only.

    Args:
        request: The request.
        discard: Takes it from the queue, if it is there.
        expiry: Takes its deadline back, if it has one.
        observers: Who was told of it.
    """

    def __init__(
        self,
        request: StreamRequest,
        discard: Callable[[Request], object],
        expiry: Cancel | None,
        observers: BatchObservers | None,
    ) -> None:
        self.request = request
        self._discard = discard
        self._expiry = expiry
        self._observers = observers

    def leave(self, error: BaseException | None) -> None:
        """Its caller reads no more, for it has come to the end, or because of `error`; once."""
        self.request.abandon()
        self._discard(self.request)
        if self._expiry is not None:
            self._expiry()
        if self._observers is not None:
            self._observers.completed(self.request, error)

    def deliver(self) -> None:
        """Its caller has forgotten it."""
        self.leave(GeneratorExit())


class StreamOwner(Protocol):
    """On whose behalf streams are read: a request over HTTP."""

    def began(self, stream: "OutputStream") -> None:
        """One was begun in the context of this owner."""


stream_owner: ContextVar[StreamOwner | None] = ContextVar("aiopar_stream_owner", default=None)


class OutputStream:
    """An async iterator over the parts of one item's output; made by `Batcher.stream`.

    The item is queued by the first read, or by entering `async with`, which leaves the batch when
    it is left; a plain `async for` that is broken off leaves when the iterator is collected. So
    does a read that fails, or is cancelled: after that, the next one raises RuntimeError. One task
    reads at a time, in the event loop in which the first read was.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, StreamEntry]]) -> None:
        self._begin: Callable[[], Coroutine[Any, Any, StreamEntry]] | None = begin
        self._entry: StreamEntry | None = None
        self._reading = False
        self._owned = self._forsaken = self._cut_off = False
        self._reader: TaskRef | None = None
        """The task that has read last, where the stream has an owner."""

    @short_repr
    def __repr__(self) -> str:
        entry = self._entry
        if entry is not None:
            return f"with {len(entry.request.parts)} ready"
        return "closed" if self._begin is None else "not begun"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The next part.

        Raises what the generator raises, and what `Batcher.__call__` does.
        """
        if self._reading:
            raise RuntimeError("this stream is read by another task already")
        self._reading = True
        try:
            await self._enter()
            if self._owned:
                self._reader = current_task()
            part = await self._next()
        except GeneratorExit:
            self._forget()
            raise
        except StopAsyncIteration as error:
            self._leave(error)
            # It would end the loop of who reads, and nobody would know that something failed.
            raise RuntimeError("the function raised StopAsyncIteration") from error
        except BaseException as error:
            # Read on, it must not look as if it had come to its end.
            if not isinstance(error, Exception):
                self._cut_off = True
            self._leave(error)
            raise
        finally:
            self._reading = False
        if part is END:
            self._leave(None)
            raise StopAsyncIteration
        return part

    async def _enter(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            self._entry = await begin()
            owner = stream_owner.get()
            if owner is not None:
                self._owned = True
                owner.began(self)

    async def _next(self) -> Any:
        if self._entry is None:
            if self._forsaken:
                raise RuntimeError("this stream has ended with the request that it was begun for")
            if self._cut_off:
                raise RuntimeError("a read of this stream was cut off, which has left it")
            return END
        request = self._entry.request
        while not request.parts:
            if request.done:
                if request.error is not None:
                    request.outcome()
                return END
            awaiter = awaiter_here()
            if awaiter is None or awaiter.waker is not request.waker:
                self._forget()  # it belongs to a loop that this is not
                raise RuntimeError("a stream is read in one event loop")
            request.awaiter = awaiter
            # The loop may be one that a call runs, which holds the worker that the next step needs.
            thread_hooks.about_to_block()
            await awaiter
        return request.read()

    def _leave(self, error: BaseException | None) -> None:
        self._begin = None
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.leave(error)

    async def aclose(self) -> None:
        """Read no more; may be called twice.

        The generator is closed when nobody is left who reads of its batch.
        """
        entry = self._entry
        self._leave(GeneratorExit())
        if entry is not None and self._reading:
            entry.request.awaiter.wake()  # who reads in another task has come to the end

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def forsake(self) -> None:
        """Its owner has gone, whose task this is: leave, unless another task that goes on reads it.

        Whoever read it may be suspended for good, in a cycle that awaits the garbage collector.
        """
        reader = self._reader
        if reader is not None and reader != current_task() and not has_ended(reader):
            return
        if self._entry is not None:
            self._forsaken = True
            self._forget()

    def __del__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Leave soon, on the loop: the garbage collector may have come in the midst of anything.

        In its thread any lock may be held, so that nothing may be done here that takes one.
        """
        entry, self._entry = self._entry, None
        if entry is not None:
            waker = entry.request.waker
            waker.post(entry)
            if waker.finished:  # its loop was closed under it: its batch is not to wait for it
                entry.request.abandon()
