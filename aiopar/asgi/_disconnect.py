"""`DisconnectMiddleware`: cancels a request whose client has disconnected."""

import asyncio
import math
import weakref
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._base.arguments import check_number
from .._base.thread_state import CallerState
from ..executor._loop_tasks import TaskRef, Tasks, call_later, current_task
from ..serve._request import Request, request_owner
from ..serve._streaming import OutputStream

_CLIENT_CLOSED_REQUEST = 499  # nginx's status; no client ever sees it
_RETRY = 0.05  # seconds until the next try to cancel a request


class DisconnectMiddleware:
    """Cancel a request that waits for a batcher when its client has disconnected.

    Servers do not do this: uvicorn only reports it to an application that calls `receive`, and an
    endpoint that awaits a model does not. This middleware cancels the application at the point
    where it awaits, and the batcher drops the item.

    - Only a request that waits for a `Batcher` is cancelled: when the client disconnects, or later
      when the request comes to a batcher. `always` and `cancel_on_disconnect` also cancel a request
      that waits for something else.
    - On asyncio the request is cancelled once, as by `Task.cancel`. Its cleanup (`finally`,
      dependencies with `yield`) may await and runs to its end. An application that catches the
      cancellation goes on, and is not cancelled again.
    - On trio, and in a task of an anyio task group, an `await` in cleanup needs a shield.
      `BaseHTTPMiddleware` runs the application in such a group: add this middleware inside of it,
      as `install` does.
    - `anyio.CancelScope(shield=True)` delays the cancellation. A thread cannot be cancelled: a
      `def` endpoint and its call of a batcher run to their end.
    - An application that waits for a message itself gets `http.disconnect`, and is not cancelled. A
      `StreamingResponse` waits so, and so does an endpoint that reads the body.
    - An application that polls (`await request.is_disconnected()`) while its own tasks wait for a
      batcher is not cancelled: its next poll tells it, and it ends its tasks. It is cancelled if it
      waits for a batcher in the task that polls, or with `always`.
    - Nothing is cancelled after the response is complete: background tasks run to their end.
    - The application gets every message, in order. At most one part of the body is received before
      the application asks for it; none if the client sent `Expect: 100-continue` and the
      application has not asked for the body yet.
    - When the application has ended without a complete response, each stream of a batcher
      (`Batcher.stream`) of the request is closed, unless another running task was the last to read
      it.
    - If the application had sent nothing, outer middleware sees a response with status 499.

    This is pure ASGI; lifespan and websocket scopes pass through. A request that ends within
    `delay` costs two cancel scopes and a timer. A longer request also costs a task.

    Args:
        app: The application.
        delay: Seconds until the middleware begins to listen for the disconnect. Under load most
            requests wait for a few batches; a task for each of them would cost more than it saves.
        always: Whether to cancel every request, whatever it waits for.

    Raises:
        TypeError: `delay` is not a number.
        ValueError: `delay` is negative.

    Example:
        >>> from starlette.applications import Starlette
        >>> from aiopar.asgi import DisconnectMiddleware
        >>> app = Starlette()
        >>> app.add_middleware(DisconnectMiddleware)
    """

    def __init__(self, app: ASGIApp, *, delay: float = 0.1, always: bool = False) -> None:
        self.app = app
        self._delay = check_number("delay", delay, zero=True)
        self._always = always

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = _HttpRequest(scope, receive, send, always=self._always)
        cancel_timer = call_later(self._delay, request.listen)
        try:
            await request.serve(self.app)
        finally:
            cancel_timer()
            request.stop_listening()


async def cancel_on_disconnect() -> None:
    """Cancel this request when its client disconnects, whatever it waits for.

    A dependency for one route: `@app.post("/", dependencies=[Depends(cancel_on_disconnect)])`. Or
    await it in an endpoint. See `DisconnectMiddleware` for what a cancellation does.

    Raises:
        RuntimeError: The request did not come through `DisconnectMiddleware`, which `install` adds.

    Example:
        >>> import asyncio, aiopar
        >>> from aiopar.fastapi import cancel_on_disconnect, install
        >>> from fastapi import Depends, FastAPI
        >>> app = FastAPI()
        >>> install(app)
        >>> @app.get("/report", dependencies=[Depends(cancel_on_disconnect)])
        ... async def report() -> str:
        ...     await asyncio.sleep(60)  # slow work that no other client needs
        ...     return "done"
    """
    request = request_owner.get()
    if not isinstance(request, _HttpRequest):
        raise RuntimeError(
            "cancel_on_disconnect needs an HTTP request that came through DisconnectMiddleware: "
            "call install(app)"
        )
    request.cancel_always()


class _HttpRequest:
    """One request: passes messages between the server and the application."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, always: bool) -> None:
        self._scope = scope
        self._server_receive = receive
        self._server_send = send
        self._caller = CallerState()
        self._always = always  # cancel it also if it does not wait for a batcher
        self._batcher_requests: dict[Request, bool] = {}  # not ended; whether `_runner` made it
        self._polls = False  # whether the application asks for the disconnect by itself
        self._client_left = False  # until the application is told or cancelled
        self._work = anyio.CancelScope()  # the application runs in both scopes
        self._shield = anyio.CancelScope()
        self._runner: TaskRef | None = None  # the task that runs the application
        self._task: asyncio.Task[Any] | None = None  # the same, on asyncio
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
        self._streams: weakref.WeakSet[OutputStream[Any]] = weakref.WeakSet()

    async def serve(self, app: ASGIApp) -> None:
        """Run the application until it ends or is cancelled."""
        token = request_owner.set(self)
        self._runner = current_task()
        if asyncio._get_running_loop() is not None:
            self._task = asyncio.current_task()
        try:
            with self._work, self._shield:
                await app(self._scope, self.receive, self.send)
        finally:
            self._client_left = False
            if self._cut_off or not self._response_complete:
                # A response that is cut off while it sends leaves its generator suspended, often
                # in a reference cycle. Its stream would hold up its batch until it is collected.
                for stream in tuple(self._streams):
                    stream.owner_ended()
            # ValueError: another context. The garbage collector closed an abandoned coroutine.
            with suppress(ValueError):
                request_owner.reset(token)
        if self._work.cancelled_caught and not self._response_started:
            # Outer middleware may wait for a response: BaseHTTPMiddleware fails without one.
            with suppress(OSError):  # some servers raise it when the client has disconnected
                await self._server_send(
                    {"type": "http.response.start", "status": _CLIENT_CLOSED_REQUEST, "headers": []}
                )
                await self._server_send({"type": "http.response.body", "body": b""})

    # Requests to batchers.

    def waits_for(self, request: Request) -> None:
        """Note a request to a batcher."""
        self._batcher_requests[request] = current_task() == self._runner
        self._cancel_if_due()

    def left(self, request: Request) -> None:
        """Note the end of a request to a batcher."""
        self._batcher_requests.pop(request, None)

    def began(self, stream: OutputStream[Any]) -> None:
        """Note a stream of a batcher that the application has begun."""
        self._streams.add(stream)

    # The cancellation.

    def cancel_always(self) -> None:
        """Cancel the request also if it does not wait for a batcher."""
        self._always = True
        self._cancel_if_due()

    def _cancel_if_due(self) -> None:
        if self._client_left and self._tasks is not None:
            self._tasks.call_soon(self._cancel)

    def _cancel(self) -> None:
        """Cancel the request if that is due; on the loop's thread, outside any task."""
        # Own tasks of an application that polls go on without it.
        waiting = self._batcher_requests.copy().values()
        waits = self._always or (any(waiting) if self._polls else bool(waiting))
        if not (self._client_left and waits) or self._response_complete:
            return
        cancelling = 0 if self._task is None else self._task.cancelling()
        self._work.cancel()
        if self._task is not None:
            # A scope cancels every further `await` too, so the shield is lifted only here.
            self._shield.shield = False
            self._shield.shield = True
            if self._task.cancelling() == cancelling:
                # The task is about to go on, or shielded, for example by its wait for a thread.
                call_later(_RETRY, self._cancel)
                return
        self._client_left = False

    # Messages.

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
        # `is_disconnected` receives in a cancelled scope.
        self._polls |= anyio.current_effective_deadline() == -math.inf
        if self._changed is None:
            return await self._receive_from_server()
        self._notify()
        self._waiting += 1
        try:
            while self._received is None:
                if self._disconnect is not None:
                    self._client_left = False
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
                    self._client_left = self._cut_off and not self._waiting
                    self._cancel_if_due()
                self._notify()
                while self._received is not None and self._received.get("more_body", False):
                    await self._changed.wait()
        except Exception as error:  # noqa: BLE001 - raised by the application's `receive`
            self._receive_error = error
            self._notify()

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
