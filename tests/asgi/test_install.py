"""`install`: error responses, websockets, health and metrics routes."""

import functools
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio.lowlevel
import anyio.to_thread
import prometheus_client
import pytest
import torch
from starlette.applications import Starlette
from starlette.endpoints import WebSocketEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

import aiopar
from aiopar.asgi import Resource, install, lifespan
from aiopar.testing import Gate
from tests.serve.steppers import Counting, Item

from .wire import Wire, get

_Endpoint = Callable[[WebSocket], Awaitable[None]]

_ERRORS: list[tuple[Exception, int, str | None]] = [
    (aiopar.Overloaded("1024 wait", estimated_wait=0.0), 503, "1"),
    (aiopar.Overloaded("1024 wait", estimated_wait=1.2), 503, "2"),
    (aiopar.Overloaded("1024 wait", estimated_wait=3.0), 503, "3"),
    (aiopar.Overloaded("for ever", estimated_wait=math.inf), 503, None),
    (aiopar.DeadlineExceeded("no result in 1 s"), 504, None),
    (aiopar.InvalidInput("expected 3 features"), 422, None),
    (aiopar.ReplicaUnavailable("none in service"), 503, None),
    (aiopar.ServiceClosed("closed"), 503, None),
    (aiopar.ReaderTooSlow("too slow"), 503, None),
]


def _app(error: Exception) -> Starlette:
    async def fail(request: Request) -> Response:
        raise error

    return Starlette(routes=[Route("/", fail)])


def _endpoints(error: Exception) -> dict[str, _Endpoint]:
    async def fail_at_once(websocket: WebSocket) -> None:
        raise error

    async def fail_later(websocket: WebSocket) -> None:
        await websocket.accept()
        raise error

    async def close(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close(4000, "the endpoint's own")
        raise error

    async def answer(websocket: WebSocket) -> None:
        await websocket.send_denial_response(PlainTextResponse("the endpoint's own"))
        raise error

    async def listen(websocket: WebSocket) -> None:
        await websocket.accept()
        assert (await websocket.receive())["type"] == "websocket.disconnect"
        raise error

    async def send(websocket: WebSocket) -> None:
        await websocket.accept()
        with pytest.raises(WebSocketDisconnect):
            await websocket.send_text("gone by now")
        raise error

    return {
        "/at-once": fail_at_once,
        "/later": fail_later,
        "/closed": close,
        "/answered": answer,
        "/listening": listen,
        "/sending": send,
    }


def _endpoint_class(fn: _Endpoint) -> type[WebSocketEndpoint]:
    class Endpoint(WebSocketEndpoint):
        async def dispatch(self) -> None:
            # As Starlette's own: with another WebSocket than exception handlers get.
            await fn(WebSocket(self.scope, self.receive, self.send))

    return Endpoint


def _app_of_websockets(error: Exception) -> Starlette:
    endpoints = _endpoints(error)
    routes = [
        *(WebSocketRoute(path, endpoint) for path, endpoint in endpoints.items()),
        WebSocketRoute("/class", _endpoint_class(endpoints["/later"])),
        WebSocketRoute("/class-closed", _endpoint_class(endpoints["/closed"])),
        WebSocketRoute("/class-listening", _endpoint_class(endpoints["/listening"])),
    ]
    app = Starlette(routes=[*routes, Mount("/mounted", Starlette(routes=routes))])
    install(app)
    return app


@pytest.mark.anyio
@pytest.mark.parametrize(("error", "status", "retry_after"), _ERRORS)
async def test_errors_become_responses(
    error: Exception, status: int, retry_after: str | None
) -> None:
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
async def test_other_errors_are_raised(error: Exception) -> None:
    app = _app(error)
    install(app)
    with pytest.raises(type(error)):  # the server logs it
        await get(app, "/")


@pytest.mark.asyncio
async def test_exception_handler_of_the_application_stays() -> None:
    async def mine(request: Request, error: Exception) -> Response:
        return PlainTextResponse("mine", 418)

    app = _app(aiopar.InvalidInput("no"))
    app.add_exception_handler(aiopar.InvalidInput, mine)
    install(app)
    assert (await get(app, "/")).status == 418


@pytest.mark.anyio
async def test_lone_surrogate_in_an_error_is_escaped() -> None:
    """The text of an item may contain one, and the error may quote the text."""
    app = _app(aiopar.InvalidInput("no word: \ud83d"))
    install(app)
    answer = await get(app, "/")
    assert (answer.status, answer.json) == (422, {"detail": r"no word: \ud83d"})


@pytest.mark.parametrize("path", ["/later", "/class", "/mounted/later"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (aiopar.Overloaded("é" * 100, estimated_wait=1.0), 1013),
        (aiopar.InvalidInput("no word: \ud83d"), 1007),
    ],
)
def test_accepted_websockets_are_closed(path: str, error: Exception, code: int) -> None:
    with (
        pytest.raises(WebSocketDisconnect) as closed,
        TestClient(_app_of_websockets(error)).websocket_connect(path) as websocket,
    ):
        websocket.receive_text()
    assert closed.value.code == code
    # A close frame holds 123 bytes of it. No character is cut in two.
    assert closed.value.reason == str(error).replace("\ud83d", r"\ud83d")[:61]


@pytest.mark.parametrize("path", ["/at-once", "/mounted/at-once"])
@pytest.mark.parametrize(("error", "status", "retry_after"), _ERRORS)
def test_websockets_are_refused_with_a_response(
    path: str, error: Exception, status: int, retry_after: str | None
) -> None:
    with (
        pytest.raises(WebSocketDenialResponse) as refused,
        TestClient(_app_of_websockets(error)).websocket_connect(path),
    ):
        pytest.fail("it was accepted")
    assert refused.value.status_code == status
    assert refused.value.json() == {"detail": str(error)}
    assert refused.value.headers.get("retry-after") == retry_after


def test_websockets_are_closed_if_the_server_cannot_send_a_response() -> None:
    app = _app_of_websockets(aiopar.InvalidInput("no"))

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {}
        await app(scope, receive, send)

    with (
        pytest.raises(WebSocketDisconnect) as closed,
        TestClient(served).websocket_connect("/at-once"),
    ):
        pytest.fail("it was accepted")
    assert (closed.value.code, closed.value.reason) == (1007, "no")


@pytest.mark.parametrize("path", ["/closed", "/class-closed", "/mounted/closed", "/answered"])
def test_closed_websockets_are_left_alone(path: str) -> None:
    app = _app_of_websockets(aiopar.Overloaded("1024 wait", estimated_wait=1.0))
    with (
        pytest.raises(WebSocketDisconnect) as closed,
        TestClient(app).websocket_connect(path) as websocket,
    ):
        websocket.receive_text()
    if path == "/answered":
        assert isinstance(closed.value, WebSocketDenialResponse)
        assert closed.value.text == "the endpoint's own"
    else:
        assert (closed.value.code, closed.value.reason) == (4000, "the endpoint's own")


@pytest.mark.parametrize("path", ["/listening", "/class-listening", "/mounted/listening"])
def test_disconnected_websockets_are_left_alone(path: str) -> None:
    app = _app_of_websockets(aiopar.DeadlineExceeded("no result in 1 s"))
    sent = list[str]()

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_noting(message: Message) -> None:
            sent.append(message["type"])
            await send(message)

        await app(scope, receive, send_noting)

    with TestClient(served).websocket_connect(path) as websocket:
        websocket.close()
    assert sent == ["websocket.accept"]


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/at-once", "/later", "/class", "/sending"])
async def test_websocket_that_disconnects_while_it_is_closed_is_no_error(path: str) -> None:
    app = _app_of_websockets(aiopar.DeadlineExceeded("no result in 1 s"))
    scope: Scope = {"type": "websocket", "path": path, "headers": [], "query_string": b""}
    scope["extensions"] = {"websocket.http.response": {}}
    failed = list[str]()

    async def receive() -> Message:
        await anyio.lowlevel.checkpoint()
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        if message["type"] != "websocket.accept":
            failed.append(message["type"])
            raise OSError("the client has gone")

    await app(scope, receive, send)
    assert len(failed) == 1


async def _health(app: Starlette) -> tuple[int, int]:
    return (await get(app, "/healthz")).status, (await get(app, "/readyz")).status


@pytest.mark.anyio
async def test_health_routes_follow_startup_and_shutdown() -> None:
    seen: list[tuple[int, int]] = []

    @asynccontextmanager
    async def own(app: Starlette) -> AsyncIterator[None]:
        seen.append(await _health(app))
        yield
        seen.append(await _health(app))

    app = Starlette()
    install(app)
    assert await _health(app) == (200, 503)
    no_lifespan = {"detail": "no lifespan of aiopar runs on this application"}
    assert (await get(app, "/readyz")).json == no_lifespan
    async with lifespan(app_lifespan=own, gc_freeze=False)(app):
        assert await _health(app) == (200, 200)
        assert (await get(app, "/readyz")).json == {"status": "ready"}
        assert (await get(app, "/healthz")).json == {"status": "alive"}
    assert seen == [(200, 503), (200, 503)]
    assert (await get(app, "/readyz")).json == no_lifespan


@pytest.mark.anyio
@pytest.mark.parametrize(
    "kind", ["pool", "batcher of a pool", "steps of a pool", "batcher", "executor"]
)
async def test_resource_whose_workers_are_all_stuck_is_not_ready(kind: str) -> None:
    app = Starlette()
    install(app, stuck_after=1e-9)
    with Gate() as gate:

        class Model(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                gate()
                return x

        executor = aiopar.DeviceExecutor(["cpu", "cpu"])
        pool = aiopar.ReplicaPool(Model(), executor=executor)
        function = aiopar.Batcher(Model(), concurrency=2)
        steps = aiopar.ContinuousBatcher(pool, stepper=lambda _: Counting(lambda _: gate()))
        resources: dict[str, tuple[Resource, Callable[..., Awaitable[Any]]]] = {
            "pool": (pool, pool),
            "batcher of a pool": (aiopar.Batcher(pool), pool),
            "steps of a pool": (steps, lambda _: steps(Item("one"))),
            "batcher": (function, function),
            "executor": (executor, functools.partial(executor.run_sync, gate)),
        }
        resource, call = resources[kind]

        async def run() -> None:
            await call(torch.ones(1))

        async with executor, lifespan(resource, gc_freeze=False)(app):
            assert (await get(app, "/readyz")).status == 200
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                await gate.entered()
                assert (await get(app, "/readyz")).status == 200  # the other worker is free
                tasks.start_soon(run)
                await gate.entered(2)
                answer = await get(app, "/readyz")
                assert answer.status == 503
                assert answer.json["detail"].startswith("in one call for 1e-09 s: ")
                assert (await get(app, "/healthz")).status == 200
                gate.open()
            assert (await get(app, "/readyz")).status == 200


@pytest.mark.anyio
async def test_stepper_that_is_stuck_in_a_step_is_not_ready() -> None:
    app = Starlette()
    install(app, stuck_after=1e-9)
    with Gate() as gate:
        batcher = aiopar.ContinuousBatcher(Counting(lambda _: gate()))
        async with lifespan(batcher, gc_freeze=False)(app), anyio.create_task_group() as tasks:
            tasks.start_soon(batcher, Item("one"))
            await gate.entered()
            answer = await get(app, "/readyz")
            assert answer.status == 503
            assert "ContinuousBatcher (resource 0)" in answer.json["detail"]
            gate.open()
            while batcher.stats().in_flight:
                await anyio.lowlevel.checkpoint()
            assert (await get(app, "/readyz")).status == 200


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_routes_do_not_wait_for_def_endpoints(path: str) -> None:
    app = Starlette()
    install(app)
    limiter = anyio.to_thread.current_default_thread_limiter()
    async with lifespan(gc_freeze=False)(app), anyio.create_task_group() as tasks:
        with Gate() as gate:  # `def` endpoints that wait
            for _ in range(int(limiter.total_tokens)):
                tasks.start_soon(anyio.to_thread.run_sync, gate)
            await gate.entered()
            while limiter.available_tokens:
                await anyio.lowlevel.checkpoint()
            with anyio.fail_after(60):
                assert (await get(app, path)).status == 200


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        # The header of Prometheus.
        (
            "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5",
            "application/openmetrics-text; version=1.0.0",
        ),
        ("application/openmetrics-text;version=none", "text/plain; version=0.0.4"),
        ("text/html", "text/plain; version=0.0.4"),
    ],
)
async def test_metrics_have_the_requested_format(accept: str, content_type: str) -> None:
    registry = prometheus_client.CollectorRegistry()
    texts = prometheus_client.Counter("embedded_texts", "Texts.", registry=registry)
    texts.inc(3, exemplar={"trace_id": "abc"})
    app = Starlette()
    install(app, registry=registry)
    wire = Wire("/metrics", method="GET", accept=accept)
    wire.deliver(b"")
    await wire.serve(app)
    start, body = wire.sent
    assert dict(start["headers"])[b"content-type"].decode().startswith(content_type)
    exemplar = b'embedded_texts_total 3.0 # {trace_id="abc"} 3.0 '
    assert (exemplar in body["body"]) == ("openmetrics" in content_type)


def _paths(app: Starlette) -> list[str]:
    return [route.path for route in app.routes if isinstance(route, Route | Mount)]


def test_without_prometheus_client_there_is_no_metrics_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # importing it fails
    app = Starlette()
    install(app)
    assert _paths(app) == ["/healthz", "/readyz"]


@pytest.mark.asyncio
async def test_paths_can_be_chosen_and_come_before_a_catch_all() -> None:
    app = Starlette(routes=[Mount("/", PlainTextResponse("everything else"))])
    install(app, healthz="/internal/live", readyz=None, metrics=None)
    assert _paths(app) == ["/internal/live", ""]  # the live page is off by default
    assert (await get(app, "/internal/live")).json == {"status": "alive"}
    assert (await get(app, "/readyz")).text == "everything else"


@pytest.mark.asyncio
async def test_routes_work_in_a_mounted_application() -> None:
    inner = Starlette()
    install(inner, metrics=None)
    app = Starlette(routes=[Mount("/model", inner)])
    assert (await get(app, "/model/healthz")).json == {"status": "alive"}
    assert (await get(app, "/model/not/healthz")).status == 404


def test_wrong_arguments_are_refused() -> None:
    app = Starlette()
    with pytest.raises(TypeError, match="a Starlette or FastAPI application, got str"):
        install("app")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"healthz must be a path .* got '/healthz/\{of\}'"):
        install(app, healthz="/healthz/{of}")
    with pytest.raises(ValueError, match=r"readyz must be a path .* got 'ready'"):
        install(app, readyz="ready")
    for name in ("healthz", "readyz", "metrics", "dashboard"):
        for given, found in ((5, "int"), (b"/x", "bytes")):
            wrong: dict[str, Any] = {name: given}
            with pytest.raises(TypeError, match=f"{name} must be a str or None, not {found}"):
                install(app, **wrong)
    for metrics in ("/metrics", None):
        with pytest.raises(TypeError, match="registry must be a CollectorRegistry, not int"):
            install(app, metrics=metrics, registry=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stuck_after must be"):
        install(app, stuck_after=0)
    assert not app.user_middleware
    assert not app.routes
    install(app)
    with pytest.raises(RuntimeError, match="installed on this application already"):
        install(app)
