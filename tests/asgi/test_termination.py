"""SIGTERM: a real uvicorn under load, a server that does not end, all kinds of handlers."""

import asyncio
import functools
import importlib.util
import itertools
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from types import FrameType

import anyio
import anyio.lowlevel
import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from aiopar.asgi import install, lifespan

from .program import close_loop_under_lifespan, terminate_without_server
from .served import Program, Served
from .wire import get

_AFTER_SIGTERM = (0, -signal.SIGTERM)
# The other tests use asyncio's own loop.
_FAST_LOOP = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"


class _Clients:
    """Clients that send requests until the server refuses connections."""

    def __init__(self, served: Served, count: int) -> None:
        self.answered: set[str] = set()
        self._served = served
        self._pool = ThreadPoolExecutor(count)
        self._runs = [self._pool.submit(self._run, index) for index in range(count)]

    def _run(self, index: int) -> None:
        with self._served.client() as client:
            for number in itertools.count():
                name = f"{index}-{number}"
                try:
                    response = client.get(f"/work?name={name}")
                except httpx2.ConnectError:
                    return  # the server refuses connections
                except httpx2.TransportError:
                    continue  # closed before the request was accepted
                assert (response.status_code, response.text) == (200, name)
                self.answered.add(name)

    def join(self) -> None:
        for run in self._runs:
            run.result()
        self._pool.shutdown()


def test_every_accepted_request_is_answered_under_load() -> None:
    with Served(loop=_FAST_LOOP, drain_delay=3600.0) as served:
        assert served.get("/readyz").status_code == 200
        clients = _Clients(served, 12)
        served.wait_for(100, event="accepted")
        served.terminate()
        with served.client() as client:
            while (ready := client.get("/readyz")).status_code == 200:
                pass
        assert ready.json() == {"detail": "draining"}
        assert ready.headers["connection"] == "close"
        # It serves until the second SIGTERM.
        served.wait_for(len(served.events(event="accepted")) + 100, event="accepted")
        assert served.get("/healthz").status_code == 200
        served.terminate()
        clients.join()
        assert served.ended() in _AFTER_SIGTERM
        accepted = {event["name"] for event in served.events(event="accepted")}
        assert len(accepted) >= 200
        assert accepted <= clients.answered
    end = [event for event in served.events() if event["event"] in ("own shutdown", "closing")]
    assert end == [
        {"event": "own shutdown", "hall_ready": True},
        {"event": "closing", "name": "second hall", "drain": True, "waiting": 0},
        {"event": "closing", "name": "hall", "drain": True, "waiting": 0},
    ]


def test_shutdown_timeout_ends_requests_and_server() -> None:
    with (
        Served(shutdown_timeout=0.2) as served,
        served.connection("GET /wait?name=waits") as waits,
        served.connection("GET /stuck?name=stuck") as stuck,
        served.connection("GET /stream?count=400", buffer=4096) as slow,
    ):
        served.wait_for(event="entered", name="waits")
        served.wait_for(event="entered", name="stuck")
        slow.recv(1)
        served.terminate()
        with waits.makefile("rb") as answer:
            text = answer.read()
        assert b" 503 " in text
        assert text.endswith(b'{"detail":"hall is closed"}')
        assert served.ended() in _AFTER_SIGTERM
        assert stuck.recv(1) == b""
        first = served.events(event="closing")[0]
        assert (first["name"], first["waiting"]) == ("hall", 1)
        assert (first["drain"], first["timeout"]) == (False, 0.0)
        # SIGINT makes uvicorn leave. Since Python 3.12 asyncio's server then still waits for its
        # connections, and SIGTERM ends the process.
        assert "Finished server process" in served.log or sys.version_info >= (3, 12)


@pytest.fixture(scope="module")
def without_server() -> Iterator[dict[str, Program]]:
    """Programs that raise SIGTERM in a lifespan, all at the same time: each takes two seconds."""

    def start(backend: str, *, handlers: bool) -> Program:
        fn = functools.partial(terminate_without_server, backend, handlers=handlers)
        return stack.enter_context(Program(fn))

    with ExitStack() as stack:
        yield {
            "asyncio": start("asyncio", handlers=True),
            "trio": start("trio", handlers=True),
            "default": start("asyncio", handlers=False),
        }


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_process_ends_if_the_server_does_not(
    backend: str, without_server: dict[str, Program]
) -> None:
    program = without_server[backend]
    assert program.ended() == -signal.SIGTERM
    happened = [event["event"] for event in program.events()]
    assert happened == ["opened", "begun", "handler", "closing", "interrupted"]


def test_default_action_is_taken_without_a_handler(
    without_server: dict[str, Program],
) -> None:
    program = without_server["default"]
    assert program.ended() == -signal.SIGTERM
    assert [event["event"] for event in program.events()] == ["opened", "begun"]


@pytest.mark.parametrize("draining", [False, True], ids=["serving", "draining"])
def test_sigterm_goes_to_the_server_after_the_loop_was_closed(draining: bool) -> None:
    def start(*, handler: bool) -> Program:
        return Program(
            functools.partial(close_loop_under_lifespan, handler=handler, draining=draining)
        )

    with start(handler=True) as handled, start(handler=False) as default:
        for count in (1, 2):
            handled.wait_for(event="closed")
            handled.terminate()
            handled.wait_for(count, event="handler")
        default.wait_for(event="closed")
        default.terminate()
        assert default.ended() == -signal.SIGTERM


class _Server:
    """A server with a handler for SIGTERM."""

    def __init__(self) -> None:
        self.called = 0

    def handle_exit(self, signum: int, frame: FrameType | None) -> None:
        assert signum == signal.SIGTERM
        self.called += 1


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server()
    before = signal.signal(signal.SIGTERM, server.handle_exit)
    yield server
    signal.signal(signal.SIGTERM, before)


@pytest.mark.anyio
@pytest.mark.parametrize("several", [False, True])
async def test_second_sigterm_ends_the_delay_and_the_third_goes_to_the_server(
    server: _Server, several: bool
) -> None:
    app = Starlette()
    install(app, metrics=None)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(lifespan(drain_delay=3600.0, gc_freeze=False)(app))
        if several:  # the first one handles SIGTERM
            await stack.enter_async_context(lifespan(drain_delay=0.0, gc_freeze=False)(app))
        signal.raise_signal(signal.SIGTERM)
        assert (await get(app, "/readyz")).json == {"detail": "draining"}
        await anyio.wait_all_tasks_blocked()
        assert server.called == 0
        signal.raise_signal(signal.SIGTERM)
        while not server.called:
            await anyio.lowlevel.checkpoint()
        signal.raise_signal(signal.SIGTERM)
        assert server.called == 2
    assert signal.getsignal(signal.SIGTERM) == server.handle_exit
    await anyio.wait_all_tasks_blocked()
    assert server.called == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_connections_are_closed_while_the_service_drains(
    server: _Server, version: str
) -> None:
    app = Starlette(routes=[Route("/", PlainTextResponse("answer", headers={"x-own": "kept"}))])
    install(app, metrics=None)

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        scope["http_version"] = version
        await app(scope, receive, send)

    async with lifespan(drain_delay=3600.0, gc_freeze=False)(app):
        assert "connection" not in (await get(served, "/")).headers
        signal.raise_signal(signal.SIGTERM)
        headers = (await get(served, "/")).headers
    assert headers.get("connection") == ("close" if version == "1.1" else None)
    assert headers["x-own"] == "kept"


@pytest.mark.asyncio
async def test_handler_that_was_installed_later_stays(server: _Server) -> None:
    calls = list[int]()

    def later(signum: int, frame: FrameType | None) -> None:
        calls.append(signum)
        assert callable(ours)
        ours(signum, frame)

    async with lifespan(drain_delay=3600.0, gc_freeze=False)(Starlette()):
        ours = signal.signal(signal.SIGTERM, later)
    signal.raise_signal(signal.SIGTERM)
    assert calls == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == later
    assert server.called == 1  # called without a delay
    while len(asyncio.all_tasks()) > 1:  # nobody waits for SIGTERM any more
        await anyio.lowlevel.checkpoint()


@pytest.mark.asyncio
async def test_ignored_sigterm_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        async with lifespan(gc_freeze=False)(Starlette()):
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
