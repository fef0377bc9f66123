"""A bound on the body of a request, before anything reads it."""

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class MaxBodySize:
    """Answers 413 to a request with more than `max_bytes`, announced or sent."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if int(announced) > self._max_bytes:  # the server has seen to it that it is a number
            await JSONResponse({"detail": self._detail()}, 413)(scope, receive, send)
            return
        left = self._max_bytes

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:  # sent in chunks, without an announcement
                raise HTTPException(413, self._detail())
            return message

        await self._app(scope, counted, send)

    def _detail(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes"
