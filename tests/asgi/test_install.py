"""Errors as responses, health and metrics, and connections while the service drains."""

import math
import sys

import prometheus_client
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

import aiopar
from aiopar.asgi import install
from aiopar.asgi._service import service_of

from .hall import Hall
from .wire import get

_ERRORS: list[tuple[Exception, int, str | None]] = [
    (aiopar.Overloaded("1024 wait", estimated_wait=0.0), 503, "1"),
    (aiopar.Overloaded("1024 wait", estimated_wait=1.2), 503, "2"),
    (aiopar.Overloaded("1024 wait", estimated_wait=3.0), 503, "3"),
    (aiopar.Overloaded("for ever", estimated_wait=math.inf), 503, None),
    (aiopar.DeadlineExceeded("no result in 1 s"), 504, None),
    (aiopar.InvalidInput("expected 3 features"), 422, None),
    (aiopar.ReplicaUnavailable("none in service"), 503, None),
    (aiopar.ServiceClosed("closed"), 503, None),
]


def _app(error: Exception) -> Starlette:
    async def fail(request: Request) -> Response:
        raise error

    async def fail_at_once(websocket: WebSocket) -> None:
        raise error

    async def fail_later(websocket: WebSocket) -> None:
        await websocket.accept()
        raise error

    return Starlette(
        routes=[
            Route("/", fail),
            WebSocketRoute("/at-once", fail_at_once),
            WebSocketRoute("/later", fail_later),
        ]
    )


@pytest.mark.anyio
@pytest.mark.parametrize(("error", "status", "retry_after"), _ERRORS)
async def test_errors_are_answered(error: Exception, status: int, retry_after: str | None) -> None:
    app = _app(error)
    install(app)
    answer = await get(app, "/")
    assert answer.status == status
    assert answer.json == {"detail": str(error)}
    assert answer.headers.get("retry-after") == retry_after


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "error", [ValueError("a bug"), TimeoutError("another's"), aiopar.QueueFull()]
)
async def test_other_errors_are_bugs(error: Exception) -> None:
    app = _app(error)
    install(app)
    with pytest.raises(type(error)):  # for the server to log
        await get(app, "/")


@pytest.mark.asyncio
async def test_handler_of_the_application_stays() -> None:
    async def mine(request: Request, error: Exception) -> Response:
        return PlainTextResponse("mine", 418)

    app = _app(aiopar.InvalidInput("no"))
    app.add_exception_handler(aiopar.InvalidInput, mine)
    install(app)
    assert (await get(app, "/")).status == 418


@pytest.mark.parametrize("path", ["/at-once", "/later"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (aiopar.Overloaded("é" * 100, estimated_wait=1.0), 1013),
        (aiopar.InvalidInput("expected 3 features"), 1007),
    ],
)
def test_websockets_are_closed(path: str, error: Exception, code: int) -> None:
    app = _app(error)
    install(app)
    with (
        pytest.raises(WebSocketDisconnect) as closed,
        TestClient(app).websocket_connect(path) as websocket,
    ):
        websocket.receive_text()
    assert closed.value.code == code
    # A close frame has room for 123 bytes of it; no character is cut in two.
    assert closed.value.reason == str(error)[:61]


def _say_nothing(event: str, /, **details: object) -> None:
    pass


@pytest.mark.anyio
async def test_health_follows_the_resources() -> None:
    app = Starlette()
    install(app)
    halls = [Hall("first", _say_nothing), Hall("second", _say_nothing)]
    service = service_of(app)

    async def health() -> tuple[int, int]:
        return (await get(app, "/healthz")).status, (await get(app, "/readyz")).status

    assert await health() == (200, 503)  # before the startup
    with service.running(tuple(halls)):
        assert await health() == (200, 503)  # while it goes on
        halls[0].ready = halls[1].ready = True
        with service.serving():
            assert await health() == (200, 200)
            assert (await get(app, "/readyz")).json == {"status": "ready"}
            assert (await get(app, "/healthz")).json == {"status": "alive"}
            halls[1].ready = False
            assert await health() == (200, 503)
            assert (await get(app, "/readyz")).json == {"detail": "not ready: Hall (resource 1)"}
            halls[1].alive = False
            assert await health() == (503, 503)
            dead = {"detail": "never to serve again: Hall (resource 1)"}
            assert (await get(app, "/healthz")).json == dead
            halls[1].ready = halls[1].alive = True
            service.draining = True
            assert await health() == (200, 503)
            assert (await get(app, "/readyz")).json == {"detail": "draining"}


@pytest.mark.anyio
async def test_metrics_of_a_registry_are_shown() -> None:
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("embedded_texts", "Texts.", registry=registry).inc(3)
    app = Starlette()
    install(app, registry=registry)
    response = await get(app, "/metrics")
    assert response.headers["content-type"] == prometheus_client.CONTENT_TYPE_LATEST
    assert "embedded_texts_total 3.0" in response.text
    assert "python_info" not in response.text  # that of the default registry


@pytest.mark.asyncio
async def test_default_registry_is_shown() -> None:
    app = Starlette()
    install(app)
    assert "python_info" in (await get(app, "/metrics")).text


def _paths(app: Starlette) -> list[str]:
    return [route.path for route in app.routes if isinstance(route, Route | Mount)]


def test_without_prometheus_client_there_is_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # importing it fails
    app = Starlette()
    install(app)
    assert _paths(app) == ["/healthz", "/readyz"]


@pytest.mark.asyncio
async def test_paths_are_chosen_and_nothing_hides_them() -> None:
    app = Starlette(routes=[Mount("/", PlainTextResponse("everything else"))])
    install(app, healthz="/internal/live", readyz=None, metrics=None)
    assert _paths(app) == ["/internal/live", ""]
    assert (await get(app, "/internal/live")).json == {"status": "alive"}
    assert (await get(app, "/readyz")).text == "everything else"


@pytest.mark.asyncio
async def test_they_are_found_where_the_application_is_mounted() -> None:
    inner = Starlette()
    install(inner, metrics=None)
    app = Starlette(routes=[Mount("/model", inner)])
    assert (await get(app, "/model/healthz")).json == {"status": "alive"}
    assert (await get(app, "/model/not/healthz")).status == 404


def test_wrong_uses_are_refused() -> None:
    app = Starlette()
    with pytest.raises(TypeError, match="a Starlette or FastAPI application, got str"):
        install("app")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"healthz must be a path .* got '/healthz/\{of\}'"):
        install(app, healthz="/healthz/{of}")
    with pytest.raises(ValueError, match=r"readyz must be a path .* got 'ready'"):
        install(app, readyz="ready")
    install(app)
    with pytest.raises(RuntimeError, match="installed on this application already"):
        install(app)


@pytest.mark.asyncio
@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_connections_are_closed_while_the_service_drains(version: str) -> None:
    app = Starlette(routes=[Route("/", PlainTextResponse("answer", headers={"x-own": "kept"}))])
    install(app)

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        scope["http_version"] = version
        await app(scope, receive, send)

    assert "connection" not in (await get(served, "/")).headers
    service_of(app).draining = True
    headers = (await get(served, "/")).headers
    assert headers.get("connection") == ("close" if version == "1.1" else None)
    assert headers["x-own"] == "kept"
