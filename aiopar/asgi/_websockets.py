"""Websockets that an error ends: refused before the handshake, closed after it, or gone already."""

from collections.abc import Awaitable
from contextlib import suppress

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

_KEY = "aiopar.websocket"


class _Progress:
    """How far a websocket has come."""

    __slots__ = ("begun", "over")

    def __init__(self) -> None:
        self.begun = False  # it has been accepted, or answered with a response
        self.over = False


class WebSocketMiddleware:
    """Remembers how far each websocket has come, for the handlers of errors.

    A `WebSocket` of Starlette's knows what was done by itself, and a handler may get another one
    than the endpoint had: where that is a class, or in an application that is mounted.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "websocket":
            progress = scope[_KEY] = _Progress()
            receive, send = _receive_noting(progress, receive), _send_noting(progress, send)
        return self.app(scope, receive, send)


def _receive_noting(progress: _Progress, receive: Receive) -> Receive:
    async def receive_noting() -> Message:
        message = await receive()
        progress.over |= message["type"] == "websocket.disconnect"
        return message

    return receive_noting


def _send_noting(progress: _Progress, send: Send) -> Send:
    async def send_noting(message: Message) -> None:
        progress.begun = True
        # A response that has begun cannot be taken back, as one of HTTP.
        progress.over |= message["type"] in ("websocket.close", "websocket.http.response.start")
        try:
            await send(message)
        except OSError:  # by that a server says that the client has gone
            progress.over = True
            raise

    return send_noting


async def end(websocket: WebSocket, response: Response, code: int, reason: str) -> None:
    """Answer with `response` if it was not accepted, else close it; nothing if it is over."""
    progress: _Progress = websocket.scope[_KEY]
    if progress.over:
        return
    can_refuse = "websocket.http.response" in websocket.scope.get("extensions", {})
    # The client may leave at this very moment: an OSError, or what Starlette makes of it.
    with suppress(OSError, WebSocketDisconnect):
        if can_refuse and not progress.begun:
            await websocket.send_denial_response(response)
        else:
            await websocket.close(code, reason)
