"""`ApplicationCall`: one call of an ASGI application, in its own task, as a server makes it."""

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import anyio

from .._base.tracebacks import logger
from ..executor._loop_tasks import Tasks, is_cancellation

Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[Message]]
_Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]


class ApplicationCall:
    """One call of an application: for its lifespan, or for a request.

    Args:
        app: The application.
        scope: Its first argument.
        tasks: The tasks that run the application until it ends.
        first: The message that it receives first.
        last: The message that it receives after `finish`, and after the end of its response.
        raises: Whether `next` raises the error of the application.
    """

    def __init__(
        self,
        app: Application,
        scope: dict[str, Any],
        tasks: Tasks,
        *,
        first: Message,
        last: Message,
        raises: bool = True,
    ) -> None:
        self.began = False
        """Whether the application has received or sent a message."""
        self._coming = [last, first]
        self._raises = raises
        self._error: BaseException | None = None
        self._finishing = anyio.Event()
        self._ended = anyio.Event()
        # Without a buffer: `send` waits until the client has taken the message.
        self._outlet, self._sent = anyio.create_memory_object_stream[Message]()
        tasks.spawn(partial(self._run, app, scope), self._end)

    @property
    def ended(self) -> bool:
        """Whether the application has ended."""
        return self._ended.is_set()

    async def wait_ended(self) -> None:
        """Wait until the application has ended."""
        await self._ended.wait()

    @property
    def left(self) -> bool:
        """Whether the client has left."""
        return not self._sent.statistics().open_receive_streams

    async def next(self) -> Message | None:
        """Return the next message of the application; at its end None, or raise its error."""
        try:
            return await self._sent.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            error, self._error = self._error, None
        if error is None or not self._raises:
            return None
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def finish(self) -> None:
        """Have the application receive its last message."""
        self._finishing.set()

    def leave(self) -> None:
        """Take no more messages, as a client that closes its connection."""
        self._sent.close()
        self.finish()

    async def aclose(self) -> None:
        """Leave, and wait until the application has ended."""
        self.leave()
        with anyio.CancelScope(shield=True):
            await self.wait_ended()

    # In the task of the application.

    async def _run(self, app: Application, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._give, self._take)
        except BaseException as error:
            if is_cancellation(error):
                raise
            if not self.left:
                self._error = error
            else:
                logger.error("an application failed after its client had left", exc_info=error)

    async def _give(self) -> Message:
        """The application's `receive`."""
        self.began = True
        if len(self._coming) == 1:
            await self._finishing.wait()
            return self._coming[0]
        return self._coming.pop()

    async def _take(self, message: Message) -> None:
        """The application's `send`."""
        self.began = True
        with suppress(anyio.BrokenResourceError):  # the client has left
            await self._outlet.send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.finish()

    def _end(self) -> None:
        self._outlet.close()
        self._ended.set()
