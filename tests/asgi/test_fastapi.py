"""`aiopar.fastapi`: a served model, documented error responses, cleanup of dependencies."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest
import torch
from fastapi import Depends, FastAPI, Request, Response
from fastapi.testclient import TestClient
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint

import aiopar
from aiopar.fastapi import (
    InvalidRequest,
    Problem,
    cancel_on_disconnect,
    install,
    lifespan,
    responses,
)
from aiopar.testing import Gate
from tests.asgi.wire import Wire, get

_ERRORS = {
    "overloaded": (aiopar.Overloaded("32 wait", estimated_wait=1.0), 503),
    "deadline": (aiopar.DeadlineExceeded("no result in 1 s"), 504),
    "invalid": (aiopar.InvalidInput("expected 3 features"), 422),
    "unavailable": (aiopar.ReplicaUnavailable("none in service"), 503),
    "closed": (aiopar.ServiceClosed("closed"), 503),
}


def _failing_app() -> FastAPI:
    app = FastAPI(responses=responses)

    @app.get("/fail/{name}")
    async def fail(name: str, count: int = 1) -> int:
        raise _ERRORS[name][0]

    install(app)
    return app


def test_endpoint_in_a_thread_awaits_a_batcher() -> None:
    batcher = aiopar.Batcher(lambda batch: batch * 2)
    app = FastAPI(lifespan=lifespan(batcher, gc_freeze=False))

    @app.get("/twice/{number}")
    def twice(number: int) -> int:
        return int(anyio.from_thread.run(batcher, torch.tensor(number)))

    with TestClient(app) as client:
        assert client.get("/twice/4").json() == 8


def test_error_responses_are_documented() -> None:
    schema = _failing_app().openapi()
    assert list(schema["paths"]) == ["/fail/{name}"]  # without health and metrics routes
    documented = schema["paths"]["/fail/{name}"]["get"]["responses"]
    assert set(documented) == {"200", "422", "503", "504"}
    assert documented["503"]["headers"]["Retry-After"]["schema"]["type"] == "integer"

    def model(status: str) -> Any:
        return documented[status]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]

    assert [model(status) for status in ("422", "503", "504")] == [
        "InvalidRequest",
        "Problem",
        "Problem",
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("name", _ERRORS)
async def test_error_responses_are_as_documented(name: str) -> None:
    error, status = _ERRORS[name]
    answer = await get(_failing_app(), f"/fail/{name}")
    assert answer.status == status
    body = InvalidRequest if status == 422 else Problem
    assert body.model_validate_json(answer.text).detail == str(error)


@pytest.mark.asyncio
async def test_validation_errors_are_documented_too() -> None:
    answer = await get(_failing_app(), "/fail/invalid?count=many")
    assert answer.status == 422
    detail = InvalidRequest.model_validate_json(answer.text).detail
    assert isinstance(detail, list)
    assert [found["loc"] for found in detail] == [["query", "count"]]


async def _pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
    return await call_next(request)


@pytest.mark.asyncio
@pytest.mark.parametrize("middleware", ["none", "before install", "after install"])
@pytest.mark.parametrize("asked", ["waits for a batcher", "the route", "the application"])
async def test_dependencies_clean_up_after_a_disconnect(asked: str, middleware: str) -> None:
    dependencies = [Depends(cancel_on_disconnect)]
    app = FastAPI(dependencies=dependencies if asked == "the application" else [])
    log, entered, gate = list[str](), anyio.Event(), Gate()
    if middleware == "before install":
        app.add_middleware(BaseHTTPMiddleware, dispatch=_pass_on)
    install(app)
    if middleware == "after install":
        app.add_middleware(BaseHTTPMiddleware, dispatch=_pass_on)

    async def release(name: str) -> None:
        for _ in range(3):
            await anyio.sleep(0.001)
        log.append(f"{name} released")

    async def session() -> AsyncIterator[str]:
        try:
            yield "session"
        finally:
            await release("session")

    @app.post("/", dependencies=dependencies if asked == "the route" else [])
    async def endpoint(name: Annotated[str, Depends(session)]) -> None:
        try:
            entered.set()
            await (batcher(torch.ones(2)) if asked.startswith("waits") else anyio.sleep_forever())
        finally:
            await release("endpoint")

    wire = Wire()
    with gate:
        async with aiopar.Batcher(gate) as batcher, anyio.create_task_group() as tasks:
            tasks.start_soon(wire.serve, app)
            wire.deliver(b"")
            await entered.wait()
            await wire.received_from()
            wire.hang_up()
            while not wire.statuses:
                await anyio.lowlevel.checkpoint()
            gate.open()
    assert log == ["endpoint released", "session released"]
    assert wire.statuses == [499]
