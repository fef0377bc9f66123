"""Errors of a service as responses: whose fault it was, and when to come again."""

import math
from collections.abc import Awaitable, Callable

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket

from .._errors import (
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    ReplicaUnavailable,
    ServiceClosed,
)
from ._websockets import end

Handler = Callable[[HTTPConnection, Exception], Awaitable[Response | None]]

# The close codes of a websocket, which has no statuses after its handshake.
_TRY_AGAIN_LATER, _INVALID_DATA = 1013, 1007
# A close frame holds 125 bytes, two of them the code.
_MOST_REASON_BYTES = 123


def _handler(status: int, close_code: int) -> Handler:
    async def handle(connection: HTTPConnection, error: Exception) -> Response | None:
        response = JSONResponse({"detail": _words(error)}, status, headers=_retry_after(error))
        if isinstance(connection, WebSocket):
            await end(connection, response, close_code, _reason(error))
            return None
        return response

    return handle


def _words(error: Exception) -> str:
    """Its message; a lone surrogate, which an item's text may have, has no bytes in UTF-8."""
    return str(error).encode(errors="backslashreplace").decode()


def _reason(error: Exception) -> str:
    return _words(error).encode()[:_MOST_REASON_BYTES].decode(errors="ignore")


def _retry_after(error: Exception) -> dict[str, str]:
    if not isinstance(error, Overloaded) or not math.isfinite(error.estimated_wait):
        return {}
    return {"retry-after": str(max(1, math.ceil(error.estimated_wait)))}


HANDLERS: dict[type[Exception], Handler] = {
    Overloaded: _handler(503, _TRY_AGAIN_LATER),
    DeadlineExceeded: _handler(504, _TRY_AGAIN_LATER),
    InvalidInput: _handler(422, _INVALID_DATA),
    ReplicaUnavailable: _handler(503, _TRY_AGAIN_LATER),
    ServiceClosed: _handler(503, _TRY_AGAIN_LATER),
}
