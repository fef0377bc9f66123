"""Errors as responses, health and metrics, and connections while the service drains."""

import sys

import httpx2
import prometheus_client
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

import aiopar
from aiopar.asgi import install
from aiopar.asgi._service import service_of

from .hall import Hall

_ERRORS: list[tuple[Exception, int, dict[str, str]]] = [
    (aiopar.Overloaded("1024 wait", estimated_wait=0.0), 503, {"retry-after": "1"}),
    (aiopar.Overloaded("1024 wait", estimated_wait=1.2), 503, {"retry-after": "2"}),
    (aiopar.Overloaded("1024 wait", estimated_wait=3.0), 503, {"retry-after": "3"}),
    (aiopar.DeadlineExceeded("no result in 1 s"), 504, {}),
    (aiopar.InvalidInput("expected 3 features"), 422, {}),
    (aiopar.ReplicaUnavailable("none in service"), 503, {}),
    (aiopar.ServiceClosed("closed"), 503, {}),
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


def _client(app: ASGIApp) -> httpx2.AsyncClient:
    # As a server: an error of the application is a 500.
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.anyio
@pytest.mark.parametrize(("error", "status", "headers"), _ERRORS)
async def test_errors_are_answered(error: Exception, status: int, headers: dict[str, str]) -> None:
    app = _app(error)
    install(app)
    async with _client(app) as client:
        response = await client.get("/")
    assert response.status_code == status
    assert response.json() == {"detail": str(error)}
    assert headers.items() <= dict(response.headers).items()
    assert ("retry-after" in response.headers) == ("retry-after" in headers)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "error", [ValueError("a bug"), TimeoutError("another's"), aiopar.QueueFull()]
)
async def test_other_errors_are_bugs(error: Exception) -> None:
    app = _app(error)
    install(app)
    async with _client(app) as client:
        assert (await client.get("/")).status_code == 500


@pytest.mark.asyncio
async def test_handler_of_the_application_stays() -> None:
    async def mine(request: Request, error: Exception) -> Response:
        return PlainTextResponse("mine", 418)

    app = _app(aiopar.InvalidInput("no"))
    app.add_exception_handler(aiopar.InvalidInput, mine)
    install(app)
    async with _client(app) as client:
        assert (await client.get("/")).status_code == 418


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
    async with _client(app) as client:

        async def health() -> tuple[int, int]:
            alive, ready = await client.get("/healthz"), await client.get("/readyz")
            return alive.status_code, ready.status_code

        assert await health() == (200, 503)  # before the startup
        with service.running(tuple(halls)):
            assert await health() == (200, 503)  # while it goes on
            halls[0].ready = halls[1].ready = True
            with service.serving():
                assert await health() == (200, 200)
                assert (await client.get("/readyz")).json() == {"status": "ready"}
                assert (await client.get("/healthz")).json() == {"status": "alive"}
                halls[1].ready = False
                assert await health() == (200, 503)
                detail = (await client.get("/readyz")).json()["detail"]
                assert detail == "not ready: Hall (resource 1)"
                halls[1].alive = False
                assert await health() == (503, 503)
                detail = (await client.get("/healthz")).json()["detail"]
                assert detail == "never to serve again: Hall (resource 1)"
                halls[1].ready = halls[1].alive = True
                service.draining = True
                assert await health() == (200, 503)
                assert (await client.get("/readyz")).json() == {"detail": "draining"}


@pytest.mark.anyio
async def test_metrics_of_a_registry_are_shown() -> None:
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("embedded_texts", "Texts.", registry=registry).inc(3)
    app = Starlette()
    install(app, registry=registry)
    async with _client(app) as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"] == prometheus_client.CONTENT_TYPE_LATEST
    assert "embedded_texts_total 3.0" in response.text
    assert "python_info" not in response.text  # that of the default registry


@pytest.mark.asyncio
async def test_default_registry_is_shown() -> None:
    app = Starlette()
    install(app)
    async with _client(app) as client:
        assert "python_info" in (await client.get("/metrics")).text


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
    async with _client(app) as client:
        assert (await client.get("/internal/live")).json() == {"status": "alive"}
        assert (await client.get("/readyz")).text == "everything else"


def test_wrong_uses_are_refused() -> None:
    app = Starlette()
    with pytest.raises(TypeError, match="a Starlette or FastAPI application, got str"):
        install("app")  # type: ignore[arg-type]
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

    async with _client(served) as client:
        assert "connection" not in (await client.get("/")).headers
        service_of(app).draining = True
        headers = (await client.get("/")).headers
    assert headers.get("connection") == ("close" if version == "1.1" else None)
    assert headers["x-own"] == "kept"
