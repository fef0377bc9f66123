"""What the tests run in processes of their own: an application under uvicorn, and lifespans.

Each process writes its events to stdout, one line of JSON per event.
"""

import asyncio
import hashlib
import itertools
import json
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import Send
from starlette.websockets import WebSocket

import aiopar
from aiopar.asgi import DisconnectMiddleware, cancel_on_disconnect, install, lifespan

from .hall import Hall


@dataclass
class Options:
    drain_delay: float = 0.0
    shutdown_timeout: float | None = 60.0
    loop: str = "asyncio"
    base_http_middleware: bool = False


def say(event: str, /, **details: Any) -> None:
    print(json.dumps({"event": event, **details}), flush=True)


HALL = Hall("hall", say)


async def echo(request: Request) -> Response:
    body = await request.body()
    return JSONResponse({"size": len(body), "sha": hashlib.sha256(body).hexdigest()})


async def read_slowly(request: Request) -> Response:
    """Each part of the body is worked on, for longer than it takes until the client is watched."""
    sha, size = hashlib.sha256(), 0
    async for part in request.stream():
        sha.update(part)
        size += len(part)
        await anyio.sleep(0.015)
    return JSONResponse({"size": size, "sha": sha.hexdigest()})


async def wait(request: Request) -> Response:
    """In the hall, with the body unread."""
    name = request.query_params["name"]
    await cancel_on_disconnect()
    say("entered", name=name)
    try:
        await HALL.wait()
    except anyio.get_cancelled_exc_class():
        say("cancelled", name=name)
        raise
    return PlainTextResponse(name)


async def stuck(request: Request) -> Response:
    say("entered", name=request.query_params["name"])
    await anyio.sleep_forever()
    raise AssertionError


async def work(request: Request) -> Response:
    say("accepted", name=request.query_params["name"])
    await anyio.sleep(0.02)
    return PlainTextResponse(request.query_params["name"])


async def let_out(request: Request) -> Response:
    """Once its body has come."""
    await request.body()
    HALL.let_out()
    return Response()


class _Stream(StreamingResponse):
    """Says when it ends; a generator that it leaves may wait for the garbage collector."""

    async def stream_response(self, send: Send) -> None:
        complete = False
        try:
            await super().stream_response(send)
            complete = True
        finally:
            say("streamed", all=complete)


async def stream(request: Request) -> Response:
    """Many parts, as fast as they are read."""

    async def parts() -> AsyncIterator[bytes]:
        for index in range(int(request.query_params["count"])):
            yield index.to_bytes(4, "big") * 16_384
            await anyio.lowlevel.checkpoint()

    return _Stream(parts())


async def wait_connected(websocket: WebSocket) -> None:
    """In the hall; then fail."""
    await websocket.accept()
    say("entered", name="connected")
    await HALL.wait()
    say("failed", name="connected")
    raise aiopar.DeadlineExceeded("no result in 1 s")


class Around(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        say("responded", status=response.status_code)
        return response


@asynccontextmanager
async def own_lifespan(app: Starlette) -> AsyncIterator[dict[str, str]]:
    say("own startup", hall_ready=HALL.ready)
    yield {"from_lifespan": "state"}
    say("own shutdown", hall_ready=HALL.ready)


async def state(request: Request) -> Response:
    return PlainTextResponse(request.state.from_lifespan)


def make_app(options: Options) -> Starlette:
    app = Starlette(
        routes=[
            Route("/echo", echo, methods=["POST"]),
            Route("/read-slowly", read_slowly, methods=["POST"]),
            Route("/wait", wait, methods=["GET", "POST"]),
            Route("/stuck", stuck),
            Route("/work", work),
            Route("/let-out", let_out, methods=["POST"]),
            Route("/stream", stream),
            Route("/state", state),
            WebSocketRoute("/wait-connected", wait_connected),
        ],
        lifespan=lifespan(
            HALL,
            Hall("second hall", say),
            app_lifespan=own_lifespan,
            drain_delay=options.drain_delay,
            shutdown_timeout=options.shutdown_timeout,
        ),
    )
    install(app, dashboard="/aiopar")
    # Sooner than in service, so that requests that are worked on for long need not take long.
    middleware: dict[object, Middleware] = {one.cls: one for one in app.user_middleware}
    middleware[DisconnectMiddleware].kwargs["delay"] = 0.01
    if options.base_http_middleware:
        app.add_middleware(Around)
    return app


def serve(options: Options) -> None:
    """Serve the application with uvicorn until SIGTERM."""
    _serve(make_app(options), options.loop)


def _serve(app: Starlette, loop: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    say("listening", port=listener.getsockname()[1])
    config = uvicorn.Config(app, log_level="info", access_log=False, loop=loop)
    uvicorn.Server(config).run(sockets=[listener])


class _Classifier(torch.nn.Module):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)  # leaves the cores to the browser
        return batch.sum(1)


class _Writer:
    """Takes as many steps as an item says; every seventh request fails at its end."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def start(self, item: int) -> list[int]:
        return [item, next(self._numbers)]

    def step(self, states: list[list[int]]) -> list[int | aiopar.Done[str] | Exception]:
        time.sleep(0.005)
        return [self._advance(state) for state in states]

    def _advance(self, state: list[int]) -> int | aiopar.Done[str] | Exception:
        state[0] -= 1
        if state[0]:
            return state[0]
        return aiopar.Done("written", 0) if state[1] % 7 else ValueError("lost for words")


def serve_under_load(options: Options) -> None:
    """Serve a live page of a pool and a stepper that have more calls than they can do.

    Until SIGTERM.
    """
    executor = aiopar.DeviceExecutor(["cpu", "cpu"])
    pool = aiopar.ReplicaPool(_Classifier(), executor=executor, name="classifier")
    batcher = aiopar.Batcher(pool, max_batch_size=8, max_pending=16)
    writer = aiopar.ContinuousBatcher(_Writer(), max_batch_size=4, name="writer")

    async def call() -> None:
        while True:
            try:
                await batcher(torch.ones(4))
            except aiopar.Overloaded:
                await anyio.sleep(0.05)

    async def read(steps: int) -> None:
        while True:
            with suppress(ValueError):
                async for _ in writer.stream(steps):
                    pass

    @asynccontextmanager
    async def load(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(call)
            for steps in (3, 10, 20, 30, 50):
                tasks.start_soon(read, steps)
            yield
            tasks.cancel_scope.cancel()

    app = Starlette(
        lifespan=lifespan(
            executor, pool, batcher, writer, app_lifespan=load, drain_delay=options.drain_delay
        )
    )
    install(app, dashboard="/aiopar")
    _serve(app, options.loop)


def serve_failing(options: Options) -> None:
    """Serve a batcher whose every request raises, until SIGTERM."""

    def fail(batch: list[int]) -> list[int]:
        raise ValueError(f"<b>no</b>{batch[1:] or ''}")

    batcher = aiopar.Batcher(fail, collate_fn=list, name="failing")

    async def call(_: Request) -> Response:
        return JSONResponse(await batcher(1))

    app = Starlette(
        routes=[Route("/call", call, methods=["POST"])],
        lifespan=lifespan(batcher, drain_delay=options.drain_delay),
    )
    install(app, dashboard="/aiopar")
    _serve(app, options.loop)


def terminate_without_server(backend: str, *, handlers: bool) -> None:
    """Run a lifespan without a server, and raise SIGTERM in it."""

    async def main() -> None:
        async with lifespan(HALL, shutdown_timeout=0.0)(Starlette()):
            signal.raise_signal(signal.SIGTERM)
            say("begun")
            await anyio.sleep_forever()

    if handlers:
        signal.signal(signal.SIGTERM, lambda *_: say("handler"))
        signal.signal(signal.SIGINT, lambda *_: say("interrupted"))
    anyio.run(main, backend=backend)


def close_loop_under_lifespan(*, handler: bool, draining: bool) -> None:
    """Close the event loop of a lifespan that is still open, then wait for signals."""
    if handler:
        signal.signal(signal.SIGTERM, lambda *_: say("handler"))
    loop = asyncio.new_event_loop()
    entered = lifespan()(Starlette())
    loop.run_until_complete(entered.__aenter__())
    if draining:
        signal.raise_signal(signal.SIGTERM)
    loop.close()
    say("closed")
    while True:
        signal.pause()
