"""`DisconnectMiddleware`: cancels a request whose client has disconnected."""

import asyncio
import weakref
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._base.arguments import check_number
from .._base.thread_state import CallerState
from ..executor._loop_tasks import Tasks, call_later
from ..serve._streaming import OutputStream, stream_owner

_CLIENT_CLOSED_REQUEST = 499  # nginx's status; no client ever sees it


class DisconnectMiddleware:
    """Cancel the application's work on a request whose client has disconnected.

    Servers do not do this: uvicorn only reports it to an application that calls `receive`, and an
    endpoint that awaits a model does not. This middleware cancels the application at the point
    where it awaits, and the batcher drops the item. On asyncio the application is cancelled once,
    as by `Task.cancel`: its cleanup may await. An `await` in cleanup needs a shield on trio, in a
    task of an anyio task group, and after an endpoint in a thread.

    - An application that waits for a message itself gets `http.disconnect`, and is not cancelled. A
      `StreamingResponse` waits so, and so does an endpoint that reads the body.
    - Nothing is cancelled after the response is complete: background tasks run to their end.
    - The application gets every message, in order. At most one part of the body is received before
      the application asks for it; none if the client sent `Expect: 100-continue` and the
      application has not asked for the body yet.
    - When the application has ended without a complete response, each stream of a batcher
      (`Batcher.stream`) of the request is closed, unless another running task was the last to read
      it.
    - If the application had sent nothing, outer middleware sees a response with status 499.

    This is pure ASGI; lifespan and websocket scopes pass through. A request that ends within
    `delay` costs a cancel scope and a timer. A longer request also costs a task.

    Args:
        app: The application.
        delay: Seconds until the middleware begins to listen for the disconnect. Under load most
            requests wait for a few batches; a task for each of them would cost more than it saves.

    Raises:
        TypeError: `delay` is not a number.
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = _Request(scope, receive, send)
        cancel_timer = call_later(self._delay, request.listen)
        try:
            await request.serve(self.app)
        finally:
            cancel_timer()
            request.stop_listening()


class _Request:
    """One request: passes messages between the server and the application."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._server_receive = receive
        self._server_send = send
        self._caller = CallerState()
        self._work = anyio.CancelScope()  # the application runs in both
        self._cleanup = anyio.CancelScope()
        self._task: asyncio.Task[Any] | None = None  # runs the application, on asyncio
        self._response_started = self._response_complete = False
        self._cut_off = False  # the client disconnected before the response was complete
        self._body_asked_for = False
        self._receiving = 0  # calls of the application's `receive` that wait for the server
        self._waiting = 0  # calls of the application's `receive` that wait for `_listen`
        self._tasks: Tasks | None = None  # runs `_listen`
        self._changed: anyio.Event | None = None  # set at each change; None: `_listen` does not run
        self._received: Message | None = None  # by `_listen`, and not yet by the application
        self._disconnect: Message | None = None
        self._receive_error: Exception | None = None
        # Weak: a stream that the application drops is closed when it is collected.
        self._streams: weakref.WeakSet[OutputStream] = weakref.WeakSet()

    async def serve(self, app: ASGIApp) -> None:
        """Run the application until it ends or the client has disconnected."""
        token = stream_owner.set(self)
        if asyncio._get_running_loop() is not None:
            self._task = asyncio.current_task()
        try:
            with self._work, self._cleanup:
                await app(self._scope, self.receive, self.send)
        finally:
            if self._cut_off or not self._response_complete:
                # A response that is cut off while it sends leaves its generator suspended, often
                # in a reference cycle. Its stream would hold up its batch until it is collected.
                for stream in tuple(self._streams):
                    stream.owner_ended()
            # ValueError: another context. The garbage collector closed an abandoned coroutine.
            with suppress(ValueError):
                stream_owner.reset(token)
        if self._work.cancelled_caught and not self._response_started:
            # Outer middleware may wait for a response: BaseHTTPMiddleware fails without one.
            with suppress(OSError):  # some servers raise it when the client has disconnected
                await self._server_send(
                    {"type": "http.response.start", "status": _CLIENT_CLOSED_REQUEST, "headers": []}
                )
                await self._server_send({"type": "http.response.body", "body": b""})

    def began(self, stream: OutputStream) -> None:
        """Note a stream of a batcher that the application has begun."""
        self._streams.add(stream)

    def send(self, message: Message) -> Awaitable[None]:
        """The application's `send`."""
        kind = message["type"]
        if kind == "http.response.start":
            if self._work.cancel_called:
                return self._send_start(message)
            self._response_started = True
        elif kind in ("http.response.body", "http.response.zerocopysend"):
            # Complete already, even if the client reads slowly: nothing is left to compute.
            self._response_complete = not message.get("more_body", False)
        elif kind == "http.response.pathsend":
            self._response_complete = True
        return self._server_send(message)

    async def _send_start(self, message: Message) -> None:
        # The request is cancelled, so this fails too, unless the server sends without awaiting.
        await self._server_send(message)
        self._response_started = True

    async def receive(self) -> Message:
        """The application's `receive`."""
        self._body_asked_for = True
        if self._changed is None:
            return await self._receive_from_server()
        self._notify()
        self._waiting += 1
        try:
            while self._received is None:
                if self._disconnect is not None:
                    return self._disconnect
                if self._receive_error is not None:
                    raise self._receive_error
                await self._changed.wait()
        finally:
            self._waiting -= 1
        message, self._received = self._received, None
        self._notify()
        return message

    async def _receive_from_server(self) -> Message:
        self._receiving += 1
        try:
            message = await self._server_receive()
        finally:
            self._receiving -= 1
            self._notify()
        if message["type"] == "http.disconnect":
            self._disconnected(message)
        return message

    def listen(self) -> None:
        """Begin to listen for the disconnect, in a task; called on the loop's thread."""
        if not self._response_complete and self._disconnect is None:
            self._tasks = Tasks(self._caller)
            self._tasks.spawn(self._listen)

    def stop_listening(self) -> None:
        """Stop the task that listens; the application has ended."""
        if self._tasks is not None:
            self._tasks.cancel()

    async def _listen(self) -> None:
        self._changed = anyio.Event()
        try:
            # Two concurrent calls of the server's `receive` would both return for one message.
            while self._receiving or self._must_not_ask_for_body():
                await self._changed.wait()
            # It goes on after the response is complete: the application may still receive.
            while self._disconnect is None:
                message = await self._server_receive()
                if message["type"] != "http.disconnect":
                    self._received = message
                else:
                    self._disconnected(message)
                    if self._cut_off and not self._waiting:
                        self._cancel()
                self._notify()
                while self._received is not None and self._received.get("more_body", False):
                    await self._changed.wait()
        except Exception as error:  # noqa: BLE001 - raised by the application's `receive`
            self._receive_error = error
            self._notify()

    def _cancel(self) -> None:
        cancelling = 0 if self._task is None else self._task.cancelling()
        self._work.cancel()
        # A scope cancels every further `await` too. asyncio's tasks are cancelled once.
        if self._task is not None and self._task.cancelling() > cancelling:
            self._cleanup.shield = True

    def _must_not_ask_for_body(self) -> bool:
        # The first `receive` makes the server send "100 Continue". The application decides that.
        headers = self._scope["headers"]
        return not self._body_asked_for and any(name == b"expect" for name, _ in headers)

    def _disconnected(self, message: Message) -> None:
        self._disconnect = message
        self._cut_off |= not self._response_complete  # the server may report it again later

    def _notify(self) -> None:
        if self._changed is not None:
            changed, self._changed = self._changed, anyio.Event()
            changed.set()
