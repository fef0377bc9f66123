"""Routes for who runs the service: supervisor, load balancer, Prometheus."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from .._checks import check_instance
from ._service import Service

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector


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
