"""A client that goes away while its request is worked on."""

import asyncio
import contextvars
import functools
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from typing import Any, Protocol
from weakref import ref

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._base.arguments import check_number
from ..serve._streaming import OutputStream, stream_owner


@asynccontextmanager
async def beside(fn: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run `fn()` while the block runs; it is cancelled where the block ends.

    As a task group does; but what the block raises leaves as it is, not in an `ExceptionGroup`.
    """
    raised: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fn)
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 - past the group
            raised = error
        tasks.cancel_scope.cancel()
    try:
        if raised is not None:
            raise raised
    finally:
        del raised  # the traceback holds this frame


# Timers are no more exact than this, in some loops: to set one for less would be to poll.
_EXACTNESS = 0.001


class Delayed(Protocol):
    """One that has come."""

    def due(self) -> None:
        """The while has passed; on the loop's thread."""


class DelayQueue:
    """Calls `due` of each that was put, `delay` seconds later, unless it was let go of before.

    All of them share one timer, which costs more than all the rest; it is set for the first, and
    there is none while there is nobody to wait for.

    Args:
        loop: Where it is used.
        delay: In seconds.
    """

    __slots__ = ("_delay", "_timed", "_waiting", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, delay: float) -> None:
        self.loop = loop
        self._delay = delay
        self._timed = False
        self._waiting: deque[tuple[float, ref[Delayed]]] = deque()

    def put(self, delayed: Delayed) -> None:
        """It comes now."""
        # Weakly: most have gone when the timer goes off, and nothing of them is to be kept.
        self._waiting.append((self.loop.time() + self._delay, ref(delayed)))
        if not self._timed:
            self._timed = True
            self.loop.call_later(self._delay, self._call, context=Context())  # nobody's

    def _call(self) -> None:
        self._timed = False
        waiting = self._waiting
        now = self.loop.time() + _EXACTNESS
        while waiting:
            due_at, reference = waiting[0]
            delayed = reference()
            if delayed is not None and due_at > now:
                self._timed = True
                self.loop.call_at(due_at, self._call, context=Context())
                return
            waiting.popleft()
            if delayed is not None:
                delayed.due()
            del delayed


# What nginx calls "client closed request"; no client ever sees it.
_CLIENT_CLOSED_REQUEST = 499


class DisconnectMiddleware:
    """Cancels the application's work on a request whose client has gone away.

    Servers do not: uvicorn only says so to who asks (`receive`), and an endpoint that awaits a
    model does not ask. Here it is cancelled where it awaits (by a cancel scope of anyio, so that
    what it awaits while it cleans up needs a shield), and the item that it waited for is dropped.

    - An application that is just waiting for a message itself (a `StreamingResponse` does, and who
      reads a body) is told by that message instead, and not cancelled.
    - Once the response is complete nothing is cancelled: background tasks run to their end.
    - The application gets every message, in order. Of a body that it has not taken to its end one
      part at most is received ahead, and none before it asks for a body that the client only sends
      when told to (`Expect: 100-continue`).
    - A stream of a batcher (`Batcher.stream`) is left when the application has ended without having
      answered wholly, unless a task that goes on has read it last.
    - Where nothing was sent, middleware around this one sees a response with status 499.

    Pure ASGI; lifespan and websocket scopes pass through. A request that ends within `delay` costs
    a cancel scope, about 5 us; a longer one a task too, another 10 to 30 us.

    Args:
        app: The application.
        delay: Seconds after which it begins to listen: that a client has gone is seen no earlier.
            Under load most requests wait a few batches, for which a task each would cost more
            than what is saved on the few whose clients go in that time.

    Raises:
        TypeError: `delay` is no number.
        ValueError: `delay` is negative.

    Example:
        >>> from starlette.applications import Starlette
        >>> from aiopar.asgi import DisconnectMiddleware
        >>> app = Starlette()
        >>> app.add_middleware(DisconnectMiddleware)
    """

    def __init__(self, app: ASGIApp, *, delay: float = 0.1) -> None:
        self.app = app
        self._delay = check_number("delay", delay, zero=True)
        self._queue: DelayQueue | None = None
        """That of the loop of the latest request: others have theirs until it is empty."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        loop = asyncio._get_running_loop()
        if loop is None:  # trio
            client = _Client(scope, receive, send, anyio.CancelScope())
            async with beside(functools.partial(client.listen_after, self._delay)):
                await client.serve(self.app)
            return
        client = _Client(scope, receive, send, _asyncio_scope()())
        queue = self._queue
        if queue is None or queue.loop is not loop:
            queue = self._queue = DelayQueue(loop, self._delay)
        queue.put(client)
        try:
            await client.serve(self.app)
        finally:
            client.end()


@functools.cache
def _asyncio_scope() -> type[anyio.CancelScope]:
    # What `anyio.CancelScope()` comes to; finding that out takes it as long as all the rest.
    return type(anyio.CancelScope())


class _Client:
    """The client of one request, between the server and the application."""

    __slots__ = (
        "__weakref__",
        "_answered",
        "_asked",
        "_context",
        "_cut_off",
        "_ended",
        "_error",
        "_gone",
        "_held",
        "_listening",
        "_news",
        "_receive",
        "_receiving",
        "_scope",
        "_send",
        "_started",
        "_streams",
        "_task",
        "_waiting",
        "_work",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, work: anyio.CancelScope) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._work = work  # the application's
        self._context = contextvars.copy_context()
        self._started = False  # a response
        self._answered = False  # wholly
        self._cut_off = False  # the client has gone before
        self._ended = False  # the application
        self._asked = False  # the application has called `receive`
        self._receiving = 0  # its calls that went through to the server
        self._waiting = 0  # and those that wait for what `listen` receives
        self._listening = False
        self._held: Message | None = None
        self._gone: Message | None = None
        self._error: Exception | None = None
        self._news: anyio.Event  # of any of these, once it listens
        self._task: asyncio.Task[None] | None = None
        # Weak: one that is broken off leaves when it is collected, also while the request goes on.
        self._streams: weakref.WeakSet[OutputStream] | None = None

    async def serve(self, app: ASGIApp) -> None:
        """Run the application, until it ends or the client has gone."""
        token = stream_owner.set(self)
        try:
            with self._work:
                await app(self._scope, self.receive, self.send)
        finally:
            self._forsake_streams()
            with suppress(ValueError):  # another context: a coroutine that nobody ran to its end
                stream_owner.reset(token)
        if self._work.cancelled_caught and not self._started:
            # Middleware around may wait for a response: BaseHTTPMiddleware fails without one.
            with suppress(OSError):  # what some servers raise where the client is gone
                await self._send(
                    {"type": "http.response.start", "status": _CLIENT_CLOSED_REQUEST, "headers": []}
                )
                await self._send({"type": "http.response.body", "body": b""})

    def began(self, stream: OutputStream) -> None:
        """A stream of a batcher, on behalf of this request."""
        if self._streams is None:
            self._streams = weakref.WeakSet()
        self._streams.add(stream)

    def _forsake_streams(self) -> None:
        # A response that was cut off while it waited to send leaves the generator that it sent
        # from suspended, and often in a cycle with its own cancellation: a place in a batch would
        # be held, and others kept waiting, until the garbage collector comes.
        if self._streams is not None and (self._cut_off or not self._answered):
            for stream in tuple(self._streams):
                stream.forsake()

    def send(self, message: Message) -> Awaitable[None]:
        kind = message["type"]
        if kind == "http.response.start":
            if self._work.cancel_called:
                return self._start(message)
            self._started = True
        elif kind in ("http.response.body", "http.response.zerocopysend"):
            # Also where it still waits for a slow reader: nothing is left to be computed.
            self._answered = not message.get("more_body", False)
        elif kind == "http.response.pathsend":
            self._answered = True
        return self._send(message)

    async def _start(self, message: Message) -> None:
        # It is cancelled already, and so is this, unless the server takes it without a wait.
        await self._send(message)
        self._started = True

    async def receive(self) -> Message:
        first, self._asked = not self._asked, True
        if self._listening:
            if first:
                self._tell()
            return await self._next()
        self._receiving += 1
        try:
            message = await self._receive()
        finally:
            self._receiving -= 1
            if self._listening:  # by now: it waits for its turn
                self._tell()
        if message["type"] == "http.disconnect":
            self._went(message)
        return message

    async def _next(self) -> Message:
        self._waiting += 1
        try:
            while self._held is None:
                if self._gone is not None:
                    return self._gone
                if self._error is not None:
                    raise self._error
                await self._news.wait()
        finally:
            self._waiting -= 1
        message, self._held = self._held, None
        self._tell()
        return message

    def due(self) -> None:
        """Listen in a task of its own, under asyncio."""
        if not self._over():
            # What the server does for this request is to see its context, not the timer's.
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._listen(), context=self._context)

    def end(self) -> None:
        """The application has ended."""
        self._ended = True
        if self._task is not None:
            self._task.cancel()

    async def listen_after(self, seconds: float) -> None:
        """Listen in this task, under trio."""
        await anyio.sleep(seconds)
        if not self._over():
            await self._listen()

    async def _listen(self) -> None:
        """Receive ahead of the application, to hear that the client has gone."""
        self._news = anyio.Event()
        self._listening = True
        try:
            # Two at once would both wake up for one message: wait for who is receiving.
            while self._receiving or self._waits_to_be_asked():
                await self._news.wait()
            # To the end, also once it is answered: the application may still receive.
            while self._gone is None:
                self._take(await self._receive())
                while self._held is not None and self._held.get("more_body", False):
                    await self._news.wait()
        except Exception as error:  # noqa: BLE001 - the application's, where it comes to receive
            self._error = error
            self._tell()

    def _take(self, message: Message) -> None:
        if message["type"] != "http.disconnect":
            self._held = message
        else:
            self._went(message)
            if self._cut_off and not self._waiting:
                self._work.cancel()
        self._tell()

    def _went(self, message: Message) -> None:
        self._gone = message
        self._cut_off |= not self._answered  # it may be told of again, later

    def _over(self) -> bool:
        """Whether there is nothing to listen for: it has ended, or the application knows."""
        return self._ended or self._answered or self._gone is not None

    def _waits_to_be_asked(self) -> bool:
        # The first `receive` makes the server say that the body may come: the application's choice.
        headers = self._scope["headers"]
        return not self._asked and any(name == b"expect" for name, _ in headers)

    def _tell(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()
