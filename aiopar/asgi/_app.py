"""`install`: error handlers, health routes, metrics, live page, middleware of an application."""

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from .._base.arguments import check_number, described
from ..errors import (
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    ReaderTooSlow,
    ReplicaUnavailable,
    ServiceClosed,
)
from ..futures._semaphore import Semaphore
from ..serve._prometheus import check_registry, exposition
from ._dashboard import dashboard_routes
from ._disconnect import DisconnectMiddleware
from ._service import Service, service_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_STATUSES: dict[type[Exception], int] = {
    Overloaded: 503,
    DeadlineExceeded: 504,
    InvalidInput: 422,
    ReplicaUnavailable: 503,
    ServiceClosed: 503,
    ReaderTooSlow: 503,
}
"""The status of the response to each error."""

_TRY_AGAIN_LATER, _INVALID_DATA = 1013, 1007  # close codes of a websocket
_MAX_REASON_BYTES = 123  # a close frame holds 125 bytes, two of them for the code
_WEBSOCKET_STATE = "aiopar.websocket"  # a key of the scope


def install(
    app: Starlette,
    *,
    healthz: str | None = "/healthz",
    readyz: str | None = "/readyz",
    metrics: str | None = "/metrics",
    registry: "CollectorRegistry | None" = None,
    dashboard: str | None = None,
    stuck_after: float | None = None,
) -> None:
    """Add error responses, health routes and metrics to an application, before it starts.

    - Errors become responses with the JSON body `{"detail": ...}`: `InvalidInput` 422,
      `DeadlineExceeded` 504, `Overloaded` 503 with `Retry-After` (seconds), `ReplicaUnavailable`,
      `ServiceClosed` and `ReaderTooSlow` 503. Another `ValueError` may be a bug and stays an error.
      A websocket that is not accepted yet gets the same response, if the server can send one
      (uvicorn can). An accepted websocket is closed with code 1007 for `InvalidInput`, else 1013
      (try again later). The application's own handlers of these errors stay.
    - `/healthz` fails with 503 when a resource of `lifespan` can never serve again in this process,
      which must be restarted then.
    - `/readyz` fails with 503 until the startup is complete, while a resource is not ready (warmed
      up, not closing, a replica in service), after SIGTERM, while every replica or worker of a
      resource runs one call for longer than `stuck_after`, and without a `lifespan` of aiopar. The
      response says why. A load balancer should then send requests elsewhere.
    - `/metrics` shows the metrics of prometheus-client, as text or as OpenMetrics, whichever the
      request asks for: all metrics, or those named by `?name[]=`. If `PROMETHEUS_MULTIPROC_DIR` is
      set, these are the metrics of all processes. Metrics of aiopar are there only if the service
      makes a `PrometheusMetrics`. Without the extra `metrics` there is no route.
    - `dashboard="/aiopar"` adds a live page for operators: requests, failures, refusals, queue,
      batch sizes and durations of each batcher; steps and parts of a `ContinuousBatcher`; models
      of a `ModelStore`; replicas, workers, and the delay of the event loop. The page shows the
      resources of `lifespan` in this process, and their last 15 minutes. Protect the page: it has
      no login.
    - `DisconnectMiddleware` cancels a request that waits for a batcher when its client disconnects.
      The cleanup of the endpoint runs to its end. `install` adds it as the innermost middleware.
    - While the service drains, responses ask for their connection to be closed. The server's own
      500 response does not, nor do responses of middleware that is added later.

    These routes come before the application's own, so a catch-all route does not hide them.

    Args:
        app: A Starlette or FastAPI application.
        healthz: The path of the health route. None, here and below: no such route.
        readyz: The path of the readiness route.
        metrics: The path of the metrics route.
        registry: The registry to show; None: `prometheus_client.REGISTRY`.
        dashboard: The path of the live page; its data comes from `{path}/events`.
        stuck_after: Seconds that one call may run until its replica or worker is not ready. Choose
            more than your longest call takes. None: without limit.

    Raises:
        TypeError: `app`, a path, `registry` or `stuck_after` has a wrong type.
        ValueError: A path does not begin with "/", or has parameters. `stuck_after` is not
            positive.
        RuntimeError: `install` was called before, or the application has started.

    Example:
        >>> from starlette.applications import Starlette
        >>> from aiopar.asgi import install
        >>> app = Starlette()
        >>> install(app, metrics=None)
        >>> [route.path for route in app.routes]
        ['/healthz', '/readyz']
    """
    service = service_of(app)
    paths = {"healthz": healthz, "readyz": readyz, "metrics": metrics, "dashboard": dashboard}
    for name, path in paths.items():
        if path is not None:
            _check_path(name, path)
    if stuck_after is not None:
        check_number("stuck_after", stuck_after, zero=False)
    if service.installed:
        raise RuntimeError("aiopar is installed on this application already")
    routes = _health_route(healthz, "alive", service.dead_reason)
    routes += _health_route(readyz, "ready", service.unready_reason)
    routes += _metrics_routes(metrics, registry)
    if dashboard is not None:
        routes += dashboard_routes(service, dashboard)
    app.add_middleware(_DrainMiddleware, service=service)
    app.add_middleware(_WebSocketMiddleware)
    # This middleware is the innermost, inside any task group of other middleware: a cancelled task
    # group would cancel each further `await` of the application too.
    app.user_middleware.append(Middleware(DisconnectMiddleware))
    for kind in _STATUSES:
        # Starlette types a handler of requests and a handler of websockets, not one for both.
        app.exception_handlers.setdefault(kind, cast(ExceptionHandler, _answer_error))
    app.router.routes[:0] = routes
    service.installed = True
    service.stuck_after = math.inf if stuck_after is None else stuck_after


def _check_path(name: str, path: str) -> None:
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a str or None, not {described(path)}")
    if not path.startswith("/") or "{" in path:
        raise ValueError(
            f"{name} must be a path that begins with '/', without parameters, got {path!r}"
        )


# Errors.


async def _answer_error(connection: HTTPConnection, error: Exception) -> Response | None:
    """The exception handler for the errors in `_STATUSES`."""
    status = next(_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES)
    # The text of an item may contain a lone surrogate, which UTF-8 cannot encode.
    detail = str(error).encode(errors="backslashreplace").decode()
    response = JSONResponse({"detail": detail}, status)
    if isinstance(error, Overloaded) and math.isfinite(error.estimated_wait):
        response.headers["retry-after"] = str(max(1, math.ceil(error.estimated_wait)))
    if not isinstance(connection, WebSocket):
        return response
    state: _WebSocketState = connection.scope[_WEBSOCKET_STATE]
    if state.ended:
        return None
    can_refuse = "websocket.http.response" in connection.scope.get("extensions", {})
    # If the client disconnects now, the server raises OSError, which Starlette may turn into
    # WebSocketDisconnect.
    with suppress(OSError, WebSocketDisconnect):
        if can_refuse and not state.started:
            await connection.send_denial_response(response)
        else:
            code = _INVALID_DATA if isinstance(error, InvalidInput) else _TRY_AGAIN_LATER
            reason = detail.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
            await connection.close(code, reason)
    return None


class _WebSocketState:
    started = ended = False  # started: it was accepted, or refused with a response


class _WebSocketMiddleware:
    """Note the state of each websocket, for the exception handler.

    A `WebSocket` object of Starlette knows only what was done through it. If the endpoint is a
    class, or in a mounted application, the exception handler gets another object than the endpoint.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
            return
        state = scope[_WEBSOCKET_STATE] = _WebSocketState()

        async def noting_receive() -> Message:
            message = await receive()
            state.ended |= message["type"] == "websocket.disconnect"
            return message

        async def noting_send(message: Message) -> None:
            state.started = True
            # A response that has begun cannot be replaced.
            state.ended |= message["type"] in ("websocket.close", "websocket.http.response.start")
            try:
                await send(message)
            except OSError:  # the client has disconnected
                state.ended = True
                raise

        await self.app(scope, noting_receive, noting_send)


# Health and metrics.


class _DrainMiddleware:
    """While the service drains, make responses ask for their connection to be closed.

    Else a client would send its next request on the connection, whatever `/readyz` says. If the
    server closes the connection then, the client cannot know whether the request was processed.
    """

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def send_closing(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            return send(message)

        # HTTP/2 has no header `Connection`. The scope of a websocket may have version 1.1 too.
        http_1 = scope["type"] == "http" and scope.get("http_version") in ("1.0", "1.1")
        await self.app(scope, receive, send_closing if http_1 and self._service.draining else send)


def _health_route(path: str | None, status: str, find: Callable[[], str | None]) -> list[Route]:
    async def health(_: Request) -> Response:
        trouble = find()
        if trouble is None:
            return JSONResponse({"status": status})
        return JSONResponse({"detail": trouble}, 503)

    return [] if path is None else [Route(path, health, name=status, include_in_schema=False)]


def _metrics_routes(path: str | None, registry: "CollectorRegistry | None") -> Iterator[Route]:
    if path is None and registry is None:
        return
    try:
        registry = check_registry(registry)
    except ImportError:  # the extra `metrics` is not installed
        return
    if path is None:
        return

    one_at_a_time = Semaphore(1)  # unlike a limiter of anyio, it serves any event loop

    async def metrics(request: Request) -> Response:
        accept = ",".join(request.headers.getlist("accept"))
        names = request.query_params.getlist("name[]")
        make = partial(exposition, registry, accept, names)
        async with one_at_a_time:
            # Not under anyio's default limiter: `def` endpoints that wait may hold all of it.
            body, content_type = await anyio.to_thread.run_sync(make, limiter=CapacityLimiter(1))
        return Response(body, headers={"content-type": content_type})

    yield Route(path, metrics, include_in_schema=False)
