"""`DisconnectMiddleware`: cancels a request whose client has disconnected."""

import asyncio
import math
from collections import deque
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._base.arguments import check_number
from .._base.forking import Registry
from .._base.thread_state import CallerState
from ..executor._loop_tasks import TaskRef, Tasks, call_later, current_task
from ..serve._request import Request, request_owner
from ..serve._streaming import OutputStream

_CLIENT_CLOSED_REQUEST = 499  # nginx's status; no client ever sees it
_RETRY = 0.05  # seconds until the next try to cancel a request
_BODY_KINDS = "http.response.body", "http.response.zerocopysend", "http.response.pathsend"


class DisconnectMiddleware:
    """Cancel a request that waits for a batcher when its client has disconnected.

    Servers do not do this. uvicorn reports a disconnect only to an application that calls
    `receive`, and an endpoint that awaits a model does not. This middleware cancels the application
    at the point where it awaits, and the batcher drops the item.

    - Only a request that waits for a `Batcher` is cancelled: when the client disconnects, or when
      the request comes to a batcher after that. `cancel_on_disconnect` has a request cancelled
      whatever it waits for.
    - On asyncio the application is cancelled once, as by `Task.cancel`. Its cleanup (`finally`,
      dependencies with `yield`) may await and runs to its end. An application that catches the
      cancellation goes on.
    - On trio, and in a task of an anyio task group, an `await` in cleanup needs a shield.
      `BaseHTTPMiddleware` runs such a group, so add this middleware inside of it, as `install`
      does.
    - `anyio.CancelScope(shield=True)` delays the cancellation. A thread cannot be cancelled: a
      `def` endpoint and its call of a batcher run to their end.
    - An application that waits for a message gets `http.disconnect`, and is not cancelled. A
      `StreamingResponse` waits for messages, and so does an endpoint that reads the body.
    - An endpoint may poll (`await request.is_disconnected()`) while its other tasks wait for a
      batcher. It is not cancelled: its next poll reports the disconnect, and it ends these tasks.
    - Nothing is cancelled after the response is complete: background tasks run to their end.
    - The application gets every message, in order. The middleware receives at most one part of the
      body before the application asks for that part. If the client sent `Expect: 100-continue`, the
      middleware receives nothing until the application has asked for the body.
    - If the application ends without a complete response, the streams of `Batcher` that the request
      began are closed. A stream whose last reader is another running task stays open.
    - If a cancelled application has sent nothing, outer middleware sees a response with status 499.

    Lifespan and websocket scopes pass through. A request that ends within `delay` costs two cancel
    scopes and a timer, a longer one a task too.

    Args:
        app: The application.
        delay: Seconds until the middleware begins to listen for the disconnect. Under load most
            requests end sooner; a task for each request would cost more than it saves.

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
        request = _HttpRequest(_Inbox(scope, receive), send)
        cancel_timer = call_later(self._delay, partial(request.listen, CallerState()))
        try:
            await request.serve(self.app, scope)
        finally:
            cancel_timer()


async def cancel_on_disconnect() -> None:
    """Have this HTTP request cancelled when its client disconnects, whatever the request waits for.

    A dependency: `@app.post("/", dependencies=[Depends(cancel_on_disconnect)])` for one route,
    `FastAPI(dependencies=...)` or `APIRouter(dependencies=...)` for all their routes. Without
    FastAPI await it in an endpoint. See `DisconnectMiddleware` for what a cancellation does.

    Raises:
        RuntimeError: The request did not come through `DisconnectMiddleware`, which `install` adds,
            or is a websocket.

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
    request.waits_for(None)


class _ClientState(Enum):
    """What is known of the client of a request."""

    # CONNECTED --client disconnects--> LEFT --application receives it, or is cancelled--> KNOWN
    #     |  '--application receives the disconnect---------------------------------------^
    #     '--response complete, or application ended: also from LEFT--> OVER
    CONNECTED, LEFT, KNOWN, OVER = range(4)


class _HttpRequest:
    """One request: cancels the application when the client has left."""

    def __init__(self, inbox: "_Inbox", send: Send) -> None:
        self._inbox = inbox
        self._server_send = send
        self._state = _ClientState.CONNECTED
        self._response_started = False
        # The requests that wait for batchers, and whether the main task waits for each of them. The
        # key None stands for whatever the main task awaits.
        self._waits: dict[Request | None, bool] = {}
        self._polls = False  # whether the application asks for the disconnect
        self._main_task: TaskRef | None = None  # runs the application
        self._work = anyio.CancelScope()  # the application runs in both scopes
        self._shield = anyio.CancelScope()
        self._listener: Tasks | None = None
        # Weak: a stream that the application drops closes when the stream is collected.
        self._streams: Registry[OutputStream[Any]] = Registry()

    async def serve(self, app: ASGIApp, scope: Scope) -> None:
        """Run the application until it ends or is cancelled."""
        token = request_owner.set(self)
        self._main_task = current_task()
        try:
            with self._work, self._shield:
                await app(scope, self.receive, self.send)
        finally:
            if self._listener is not None:
                self._listener.cancel()
            if self._state is not _ClientState.OVER:
                self._state = _ClientState.OVER
                # The generator of a response that was cut off stays suspended until it is
                # collected. Until then its stream would hold up a batch.
                for stream in self._streams:
                    stream.owner_ended()
            # ValueError: the garbage collector closes this coroutine in another context.
            with suppress(ValueError):
                request_owner.reset(token)
        if self._work.cancelled_caught and not self._response_started:
            # Outer middleware may need a response: `BaseHTTPMiddleware` fails without one.
            with suppress(OSError):  # some servers raise OSError after the disconnect
                await self._server_send(
                    {"type": "http.response.start", "status": _CLIENT_CLOSED_REQUEST, "headers": []}
                )
                await self._server_send({"type": "http.response.body", "body": b""})

    # What the application waits for. Any thread may call this.

    def waits_for(self, request: Request | None) -> None:
        """Note that a request to a batcher waits; None: whatever the main task awaits counts."""
        self._waits[request] = request is None or current_task() == self._main_task
        self._cancel_soon()

    def left(self, request: Request) -> None:
        """Note the end of a request to a batcher."""
        self._waits.pop(request, None)

    def began(self, stream: OutputStream[Any]) -> None:
        """Note a stream of a batcher that the application has begun."""
        self._streams.add(stream)

    # The disconnect.

    def listen(self, caller: CallerState) -> None:
        """Begin to listen for the disconnect, in a task; called on the loop's thread."""
        if self._state is _ClientState.CONNECTED:
            self._listener = Tasks(caller)
            self._listener.spawn(self._listen)

    async def _listen(self) -> None:
        disconnected = await self._inbox.listen()
        if disconnected and not self._inbox.receiving and self._state is _ClientState.CONNECTED:
            self._state = _ClientState.LEFT
            self._cancel_soon()

    def _cancel_soon(self) -> None:
        if self._state is _ClientState.LEFT and self._listener is not None:
            self._listener.call_soon(self._cancel)

    def _cancel(self) -> None:
        """Cancel the application if that is due; on the loop's thread, outside any task."""
        waits = self._waits.copy().values()
        # An application that polls ends its other tasks itself.
        if self._state is not _ClientState.LEFT or not (any(waits) if self._polls else waits):
            return
        task = self._main_task and self._main_task()
        before = task.cancelling() if isinstance(task, asyncio.Task) else 0
        self._work.cancel()
        if isinstance(task, asyncio.Task):
            # A cancelled scope cancels every further `await`. So `_shield` is lifted only for this
            # one.
            self._shield.shield = False
            self._shield.shield = True
            if task.cancelling() == before:
                # The task is about to go on, or is shielded, for example while it awaits a thread.
                call_later(_RETRY, self._cancel)
                return
        self._state = _ClientState.KNOWN

    # Messages.

    async def send(self, message: Message) -> None:
        """The application's `send`."""
        last = message["type"] in _BODY_KINDS and not message.get("more_body", False)
        if last and self._state is not _ClientState.KNOWN:
            # Nothing is left to compute, though the client may still read.
            self._state = _ClientState.OVER
        await self._server_send(message)
        if message["type"] == "http.response.start":
            self._response_started = True  # not before: a cancelled application has sent nothing

    async def receive(self) -> Message:
        """The application's `receive`."""
        # `Request.is_disconnected` calls this in a cancelled scope.
        self._polls |= anyio.current_effective_deadline() == -math.inf
        message = await self._inbox.receive()
        if message["type"] == "http.disconnect" and self._state is not _ClientState.OVER:
            self._state = _ClientState.KNOWN
        return message


class _Inbox:
    """The server's messages of one request; `listen` receives them before the application asks."""

    def __init__(self, scope: Scope, ask_server: Receive) -> None:
        self.receiving = 0  # calls of `receive` that run
        self._scope = scope
        self._ask_server = ask_server
        self._asking = False  # two concurrent calls of the server would both return for one message
        self._body_wanted = False  # whether the application has asked for the body
        self._unread: deque[Message] = deque()  # a part of the body, the disconnect, or both
        self._error: Exception | None = None  # raised by the server when `listen` asked the server
        self._changed: anyio.Event | None = None  # set at the next change; None: no task waits

    async def receive(self) -> Message:
        """Return the next message; the disconnect again and again."""
        self._body_wanted = True
        self.receiving += 1
        try:
            while not self._unread:
                if self._error is not None:
                    raise self._error
                await (self._change() if self._asking else self._ask())
        finally:
            self.receiving -= 1
        message = self._unread[0]
        if message["type"] != "http.disconnect":
            self._unread.popleft()
            self._notify()
        return message

    async def listen(self) -> bool:
        """Receive ahead until the client disconnects; False: the server failed."""
        # This goes on after the response is complete: the application may still receive.
        try:
            while not (self._unread and self._unread[-1]["type"] == "http.disconnect"):
                await (self._ask() if self._may_ask() else self._change())
        except Exception as error:  # noqa: BLE001 - raised by `receive`
            self._error = error
            return False
        return True

    def _may_ask(self) -> bool:
        if self._asking or (self._unread and self._unread[-1].get("more_body", False)):
            return False
        # The first call makes the server send "100 Continue", which the application must want.
        return self._body_wanted or all(name != b"expect" for name, _ in self._scope["headers"])

    async def _ask(self) -> None:
        self._asking = True
        try:
            self._unread.append(await self._ask_server())
        finally:
            self._asking = False
            self._notify()

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()
