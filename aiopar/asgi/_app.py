"""`install`: error handlers, health routes and middleware on an application."""

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from .._base.arguments import check_instance
from ..errors import DeadlineExceeded, InvalidInput, Overloaded, ReplicaUnavailable, ServiceClosed
from ._lifespan import Service

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

from typing import TYPE_CHECKING, cast

from starlette.applications import Starlette
from starlette.types import ExceptionHandler

from .._base.arguments import described
from ._disconnect import DisconnectMiddleware
from ._lifespan import service_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


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


class PathRoute(Route):
    """A route of one path, without parameters: it costs those little that are not for it.

    It comes before the application's own routes, so each of their requests passes it.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # Where the application is mounted, its path follows that of the mount.
        if not scope.get("path", "").endswith(self.path):
            return Match.NONE, {}
        return super().matches(scope)


def health_routes(service: Service, healthz: str | None, readyz: str | None) -> Iterator[Route]:
    """`healthz`: whether to restart the process. `readyz`: whether to send it requests."""

    async def alive(_: Request) -> Response:
        return _answer("alive", service.dead_reason())

    async def ready(_: Request) -> Response:
        return _answer("ready", service.unready_reason())

    if healthz is not None:
        yield PathRoute(healthz, alive, include_in_schema=False)
    if readyz is not None:
        yield PathRoute(readyz, ready, include_in_schema=False)


def _answer(status: str, trouble: str | None) -> Response:
    if trouble is None:
        return JSONResponse({"status": status})
    return JSONResponse({"detail": trouble}, 503)


def metrics_routes(metrics: str | None, registry: "CollectorRegistry | None") -> Iterator[Route]:
    """The registry, as prometheus-client's own endpoint; no route where that is missing.

    Raises:
        TypeError: `registry` is none of prometheus-client's.
    """
    if metrics is None and registry is None:
        return
    try:
        import prometheus_client
    except ImportError:  # the extra `metrics` is not installed
        return
    if registry is not None:
        check_instance("registry", registry, prometheus_client.CollectorRegistry)
    if metrics is None:
        return
    collected = prometheus_client.REGISTRY if registry is None else registry

    def scrape(request: Request) -> Response:  # no coroutine: Starlette runs it off the loop
        encode, content_type = _encoder(",".join(request.headers.getlist("accept")))
        names = request.query_params.getlist("name[]")
        chosen = collected.restricted_registry(names) if names else collected
        return Response(encode(chosen), headers={"content-type": content_type})

    yield PathRoute(metrics, scrape, include_in_schema=False)


def _encoder(accepted: str) -> tuple[Callable[["Collector"], bytes], str]:
    """The format to answer with, and its name; Prometheus asks for OpenMetrics, with exemplars."""
    from prometheus_client.exposition import choose_encoder

    try:
        return choose_encoder(accepted)
    except (TypeError, ValueError):  # it compares whatever a version is said to be with numbers
        return choose_encoder("")


def install(
    app: Starlette,
    *,
    healthz: str | None = "/healthz",
    readyz: str | None = "/readyz",
    metrics: str | None = "/metrics",
    registry: "CollectorRegistry | None" = None,
) -> None:
    """Make an application answer as a service of models does; before it starts.

    - Errors become responses with a JSON body `{"detail": ...}`: `Overloaded` 503 with
      `Retry-After` (seconds), `DeadlineExceeded` 504, `InvalidInput` 422 (no other `ValueError`:
      that may be a bug), `ReplicaUnavailable` and `ServiceClosed` 503. A websocket gets the
      same response before it is accepted, where the server can send one (uvicorn can); then it is
      closed with 1013 (try again later), for `InvalidInput` with 1007; and one that is closed by
      then is left alone. A handler that the application has for one of these stays.
    - `/healthz` fails (503) when a resource of `lifespan` can never serve again in this process:
      restart it.
    - `/readyz` fails until the startup is complete, while a resource is not ready (warmed up, not
      closing, a replica in service), and from SIGTERM on: send requests elsewhere. It says why.
      Without a `lifespan` of aiopar it fails always: nobody knows what is to be ready.
    - `/metrics`: what prometheus-client collects, as text or as OpenMetrics, whichever is asked
      for, of all or of each `?name[]=` (extra `metrics`; without it there is no route).
    - `DisconnectMiddleware`: a client that goes away cancels its request.
    - While the service drains, responses ask for their connection to be closed; not those of the
      server's last resort, 500, nor of middleware that is added later.

    The routes come before the application's own, so that none that matches everything hides them.

    Args:
        app: A Starlette or FastAPI application.
        healthz: The path of this route; None: no such route.
        readyz: The same.
        metrics: The same.
        registry: What is collected; None: `prometheus_client.REGISTRY`.

    Raises:
        TypeError: `app`, a path or `registry` is of another kind.
        ValueError: A path does not begin with "/", or has parameters.
        RuntimeError: It is installed already, or the application has started.

    Example:
        >>> from starlette.applications import Starlette
        >>> from aiopar.asgi import install
        >>> app = Starlette()
        >>> install(app, metrics=None)
        >>> [route.path for route in app.routes]
        ['/healthz', '/readyz']
    """
    service = service_of(app)
    for name, path in (("healthz", healthz), ("readyz", readyz), ("metrics", metrics)):
        if path is not None:
            _check_path(name, path)
    routes = [*health_routes(service, healthz, readyz), *metrics_routes(metrics, registry)]
    if service.installed:
        raise RuntimeError("aiopar is installed on this application already")
    app.add_middleware(DrainMiddleware, service=service)
    app.add_middleware(DisconnectMiddleware)
    app.add_middleware(WebSocketMiddleware)
    for kind, handler in HANDLERS.items():
        # Starlette's type has a function of each kind of connection, not one for both.
        app.exception_handlers.setdefault(kind, cast(ExceptionHandler, handler))
    app.router.routes[:0] = routes
    service.installed = True


def _check_path(name: str, path: str) -> None:
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a str or None, not {described(path)}")
    if not path.startswith("/") or "{" in path:
        raise ValueError(
            f"{name} must be a path that begins with '/', without parameters, got {path!r}"
        )
