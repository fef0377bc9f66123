"""`OutputStream`: the output of one item, read part by part."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, Self, TypeAlias, TypeVar

from .._base.arguments import AsyncOnly, short_repr
from .._base.destructors import destructor
from ..executor._generators import END
from ..executor._loop_tasks import TaskRef, current_task, has_ended
from ..futures._future import thread_hooks
from ..futures._wakeup import Awaiter, awaiter_here, ki_protected
from ._observer import Outcome
from ._queue import RequestGroup
from ._request import Request, request_owner


class Unread(dict[int, Any]):
    """The parts that a caller has not read, by their step. Used on the caller's loop only."""

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer
        self.next_step = 0  # the step of the part that is read next


class StreamRequest(Request):
    """A request whose output comes in parts: its results are these parts, then `END`."""

    streams_outputs = True
    result: Unread
    produced: list[Any] | None = None
    """The parts so far, if the request may go on from them on another worker."""

    def __init__(self, item: Any, awaiter: Awaiter, group: RequestGroup, buffer: int) -> None:
        super().__init__(item, awaiter, group)
        self.result = Unread(buffer)

    @property
    def buffer(self) -> int:
        """How many unread parts the caller has room for."""
        return self.result.buffer

    def resolve(self, result: Any, step: int) -> None:
        """Add a part; `END` after the last."""
        if self.done:
            return
        if result is END:
            self._settle()
            return
        if self.produced is None:
            self.item = None  # the generator or the state holds the item
        if step >= self.result.next_step:  # else the part was delivered before, and read
            self.result[step] = result
        self.awaiter.deliver()

    def has_room(self, sent: int) -> bool:
        """Whether the caller has room for another part after `sent` parts; from any thread."""
        return sent - self.result.next_step < self.result.buffer

    def read(self) -> Any:
        """Take the next part."""
        part = self.result.pop(self.result.next_step)
        self.result.next_step += 1
        audience = self._audience  # read once: a worker may remove it
        if audience is not None:
            audience.read(self)
        return part

    def fail_at_once(self, error: BaseException, outcome: Outcome = "failed") -> None:
        """Set the error, and drop the parts that wait."""
        if not self.done:
            self.result.clear()
            super().fail_at_once(error, outcome)

    def abandon(self) -> None:
        """The caller has left."""
        super().abandon()
        # The batch goes on and refers to this request, and the error may refer to the batch.
        self.result.clear()
        self.failure = None


Part_co = TypeVar("Part_co", covariant=True)
_Begin: TypeAlias = Callable[[], Coroutine[Any, Any, StreamRequest]]
Leave: TypeAlias = Callable[[StreamRequest, BaseException | None], object]
"""Ends a request: None when the caller has read all parts, or the error with which it leaves."""


class OutputStream(AsyncOnly, Generic[Part_co]):
    """An async iterator over the parts of one item's output; `Batcher.stream` returns it.

    The first read queues the item, and so does entering `async with`. Leaving `async with` leaves
    the batch. If a plain `async for` ends early, its caller leaves the batch when the iterator is
    collected. A read that fails or is cancelled leaves the batch too; after a cancelled read the
    next one raises RuntimeError. One task may read at a time, in the event loop of the first read.
    """

    def __init__(self, begin: _Begin, leave: Leave) -> None:
        self._begin: _Begin | None = begin
        self._leave_batch = leave
        self._request: StreamRequest | None = None
        self._reading = False
        self._reader: TaskRef | None = None  # the task of the last read
        self._broken: str | None = None  # why a read raises RuntimeError

    @short_repr
    def __repr__(self) -> str:
        if self._request is not None:
            return f"with {len(self._request.result)} ready"
        return "closed" if self._begin is None else "not begun"

    def __aiter__(self) -> Self:
        return self

    @ki_protected
    async def __anext__(self) -> Part_co:
        """Return the next part.

        Raises what the generator raises, and what `Batcher.__call__` raises.
        """
        if self._reading:
            raise RuntimeError("this stream is read by another task already")
        self._reading = True
        try:
            await self._enter()
            self._reader = current_task()
            part = await self._next()
        except GeneratorExit:
            self._forget()
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                # The next read must not look as if the stream had come to its end.
                self._broken = "a read of this stream was cancelled, which ended the stream"
            self._leave(error)
            if isinstance(error, StopAsyncIteration):
                # The same error would end the reader's `async for`, as if nothing had failed.
                raise RuntimeError("the function raised StopAsyncIteration") from error
            raise
        finally:
            self._reading = False
        if part is END:
            self._leave(None)
            raise StopAsyncIteration
        return part  # type: ignore[no-any-return]

    async def _enter(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            self._request = await begin()
            owner = request_owner.get()
            if owner is not None:
                owner.began(self)

    async def _next(self) -> Any:
        request = self._request
        if request is None:
            if self._broken is not None:
                raise RuntimeError(self._broken)
            return END
        while not request.result:
            if request.done:
                if request.failure is not None:
                    request.unwrap()
                return END
            awaiter = awaiter_here()
            if awaiter is None or awaiter.waker is not request.awaiter.waker:
                self._forget()
                raise RuntimeError("this stream belongs to another event loop")
            request.awaiter = awaiter
            # The loop may run inside a call on the worker that the next step needs.
            thread_hooks.about_to_block()
            await awaiter
        return request.read()

    @ki_protected
    def _leave(self, error: BaseException | None) -> None:
        self._begin = None
        request, self._request = self._request, None
        if request is not None:
            self._leave_batch(request, error)

    async def aclose(self) -> None:
        """Leave the batch. It may be called again.

        The generator is closed when no caller of its batch is left.
        """
        request = self._request
        self._leave(GeneratorExit())
        if request is not None and self._reading:
            request.awaiter.wake()  # ends the read of another task

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def owner_ended(self) -> None:
        """Leave the batch, unless another running task reads the stream.

        The owner's task calls this at its end. The reader may have ended without closing the
        stream, for example if a suspended generator holds the stream in a reference cycle.
        """
        reader = self._reader
        if reader is not None and reader != current_task() and not has_ended(reader):
            return
        if self._request is not None:
            self._broken = "this stream ended with the HTTP request in which it was begun"
            self._forget()

    @destructor
    def __del__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Leave the batch soon, on the loop of the request.

        The garbage collector may call this method in a thread that holds any lock, so the method
        takes none.
        """
        request, self._request = self._request, None
        if request is not None:
            waker = request.awaiter.waker
            leave = partial(self._leave_batch, request, GeneratorExit())
            waker.post(leave)
            if waker.finished:  # the loop was closed
                leave()
