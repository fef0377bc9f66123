"""What the caller of `Batcher.stream` holds."""

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from .._awaiter import awaiter_here
from .._steps import END
from ._readers import StreamRequest


class StreamEntry:
    """A request that was put in the queue, and how it is taken back.

    Args:
        request: The request.
        take_back: Takes it, and its deadline, from where they wait; on its loop's thread.
    """

    def __init__(self, request: StreamRequest, take_back: Callable[[], object]) -> None:
        self.request = request
        self._take_back = take_back

    def leave(self) -> None:
        """Nobody reads any more; once more does no harm. On its loop's thread."""
        self.request.abandon()
        self._take_back()

    def deliver(self) -> None:
        """`leave`, for who posts it to the loop."""
        self.leave()


class OutputStream:
    """An async iterator over the parts of one item's output; made by `Batcher.stream`.

    The item is queued by the first read, or by entering `async with`, which leaves the batch when
    it is left; a plain `async for` that is broken off leaves when the iterator is collected. So
    does a read that fails or is cancelled. One task reads at a time, in the event loop in which the
    first read was.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, StreamEntry]]) -> None:
        self._begin: Callable[[], Coroutine[Any, Any, StreamEntry]] | None = begin
        self._entry: StreamEntry | None = None
        self._reading = False

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
            part = await self._next()
        except BaseException:
            self._leave()
            raise
        finally:
            self._reading = False
        if part is END:
            self._leave()
            raise StopAsyncIteration
        return part

    async def _enter(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            self._entry = await begin()

    async def _next(self) -> Any:
        if self._entry is None:
            return END
        request = self._entry.request
        while not request.parts:
            if request.done:
                if request.error is not None:
                    request.outcome()
                return END
            awaiter = awaiter_here()
            if awaiter is None or awaiter.waker is not request.awaiter.waker:
                raise RuntimeError("a stream is read in the event loop of its first read")
            request.awaiter = awaiter
            await awaiter
        return request.read()

    def _leave(self) -> None:
        self._begin = None
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.leave()

    async def aclose(self) -> None:
        """Read no more; may be called twice.

        The generator is closed when nobody is left who reads of its batch.
        """
        entry = self._entry
        self._leave()
        if entry is not None and self._reading:
            entry.request.awaiter.wake()  # who reads in another task has come to the end

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        entry = self._entry
        if entry is not None:
            # Posted: here may be in the midst of anything, with any lock held.
            entry.request.awaiter.waker.post(entry)
