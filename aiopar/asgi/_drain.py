"""Middleware that has kept-alive connections closed while the service drains."""

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ._service import Service


class DrainMiddleware:
    """While the service drains, responses ask for their connection to be closed.

    A client that keeps its connection would send its next request there, in spite of `/readyz`,
    and may just send it when the server closes: then nobody can say whether it was taken.
    """

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self.app = app
        self._service = service

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # HTTP/2 has no such header; its servers say it by a frame.
        if (
            self._service.draining
            and scope["type"] == "http"
            and scope.get("http_version") in ("1.0", "1.1")
        ):
            send = _closing(send)
        return self.app(scope, receive, send)


def _closing(send: Send) -> Send:
    def send_closing(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            message = {**message, "headers": headers}
        return send(message)

    return send_closing
