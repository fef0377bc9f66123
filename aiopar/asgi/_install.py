"""`install`: error handlers, health routes and middleware on an application."""

from typing import TYPE_CHECKING, cast

from starlette.applications import Starlette
from starlette.types import ExceptionHandler

from .._checks import described
from ._disconnect import DisconnectMiddleware
from ._drain import DrainMiddleware
from ._handlers import HANDLERS
from ._health import health_routes, metrics_routes
from ._service import service_of
from ._websockets import WebSocketMiddleware

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


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
