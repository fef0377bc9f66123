"""`aiopar.testing.client`: the lifespan, responses, and clients that leave."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Annotated, Any, Self

import anyio
import anyio.lowlevel
import httpx2
import pytest
import pytest_asyncio
from fastapi import BackgroundTasks, Depends, FastAPI, Request
from fastapi.responses import StreamingResponse

import aiopar
from aiopar.fastapi import cancel_on_disconnect, install, lifespan
from aiopar.testing import Gate, client
from tests import programs


class Served:
    """An application that notes what happens to it."""

    def __init__(self, model: Any) -> None:
        self.log: list[str] = []
        self.batcher = aiopar.Batcher(model, collate_fn=list)
        self.app = FastAPI(lifespan=lifespan(self.batcher, app_lifespan=self._own, gc_freeze=False))
        install(self.app)

    @asynccontextmanager
    async def _own(self, _: FastAPI) -> AsyncIterator[dict[str, Any]]:
        self.log.append("started")
        async with anyio.create_task_group():  # it must end in the task in which it began
            yield {"batcher": self.batcher}
        self.log.append("shut down")


def _double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


async def _stated(request: Request) -> aiopar.Batcher[int, int]:
    batcher: aiopar.Batcher[int, int] = request.state.batcher
    return batcher


@pytest.fixture
def served() -> Served:
    served = Served(_double)

    @served.app.post("/double")
    async def double(
        item: int, batcher: Annotated[aiopar.Batcher[int, int], Depends(_stated)]
    ) -> int:
        return await batcher(item)

    return served


@pytest.mark.anyio
async def test_requests_have_the_state_of_the_lifespan(served: Served) -> None:
    async with client(served.app, headers={"user-agent": "test"}) as http:
        assert served.log == ["started"]
        response = await http.post("/double?item=4")
        assert (response.json(), response.request.headers["user-agent"]) == (8, "test")
        assert (await http.head("/readyz")).content == b""
    assert served.log == ["started", "shut down"]
    assert not served.batcher.ready
    async with client(served.app) as http:  # it can start again
        assert (await http.post("/double", params={"item": 5})).json() == 10


@pytest.mark.anyio
async def test_a_failing_body_shuts_the_application_down(served: Served) -> None:
    with pytest.raises(LookupError, match="of the test"):
        async with client(served.app):
            raise LookupError("of the test")
    with anyio.CancelScope() as scope:
        async with client(served.app):
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert served.log == ["started", "shut down"] * 2


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["raises", "is cancelled", "is cancelled at its end"])
async def test_a_request_that_waits_for_the_test_ends_with_it(served: Served, how: str) -> None:
    @served.app.get("/wait")
    async def wait() -> None:
        entered.set()
        try:
            await anyio.sleep_forever()
        finally:
            served.log.append("request ended")

    async def ask(http: httpx2.AsyncClient) -> None:
        with pytest.raises(httpx2.RemoteProtocolError, match="the client was closed before the"):
            await http.get("/wait")

    entered = anyio.Event()
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope, suppress(LookupError):
            async with client(served.app) as http:
                group.start_soon(ask, http)
                await entered.wait()
                if how == "raises":
                    raise LookupError("of the test")
                if how == "is cancelled":
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
                scope.deadline = anyio.current_time()
    assert served.log == ["started", "request ended", "shut down"]


@pytest.mark.anyio
async def test_a_response_that_is_open_at_the_end_of_the_block_is_not_complete(
    served: Served,
) -> None:
    @served.app.get("/half")
    async def half() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "one"
            await anyio.sleep_forever()

        return StreamingResponse(parts())

    async def read(http: httpx2.AsyncClient) -> None:
        async with http.stream("GET", "/half") as response:
            parts = response.aiter_raw()
            assert await anext(parts) == b"one"
            begun.set()
            with pytest.raises(httpx2.RemoteProtocolError, match="client was closed before the"):
                await anext(parts)

    begun = anyio.Event()
    async with anyio.create_task_group() as group, client(served.app) as http:
        group.start_soon(read, http)
        await begun.wait()


@pytest_asyncio.fixture
async def http(served: Served) -> AsyncIterator[httpx2.AsyncClient]:
    async with client(served.app) as http:  # entered and left in different tasks
        yield http


@pytest.mark.asyncio
async def test_it_may_be_a_fixture(http: httpx2.AsyncClient) -> None:
    assert (await http.post("/double?item=1")).json() == 2


@pytest.mark.anyio
@pytest.mark.parametrize("error", [LookupError, SystemExit])
@pytest.mark.parametrize("when", ["startup", "shutdown"])
async def test_the_error_of_a_lifespan_is_raised(when: str, error: type[BaseException]) -> None:
    @asynccontextmanager
    async def fail(app: FastAPI) -> AsyncIterator[None]:
        if when == "startup":
            raise error("no weights")
        yield
        raise error("no weights")

    body = []
    with pytest.raises(error, match="no weights"):
        async with client(FastAPI(lifespan=fail)):
            body.append("entered")
    assert body == ["entered"] * (when == "shutdown")


@pytest.mark.anyio
async def test_a_cancelled_startup_ends() -> None:
    @asynccontextmanager
    async def hang(app: FastAPI) -> AsyncIterator[None]:
        scope.cancel()
        try:
            await anyio.sleep_forever()
            yield
        finally:
            log.append("ended")

    log: list[str] = []
    with anyio.CancelScope() as scope:
        async with client(FastAPI(lifespan=hang)):
            pytest.fail("it has not started")
    assert log == ["ended"]


@pytest.mark.anyio
async def test_an_application_may_be_without_a_lifespan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert await receive() == {"type": "http.request", "body": b"abc", "more_body": False}
            await send({"type": "http.response.start", "status": 201})
            await send({"type": "http.response.body"})
            assert await receive() == {"type": "http.disconnect"}
            log.append("response ended")

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.failed", "message": "too early"})

    async def refuse_in_a_loop(scope: Any, receive: Any, send: Any) -> None:  # as Quart
        while (await receive())["type"] == "lifespan.startup":
            await refuse(scope, receive, send)

    async def only_http(scope: Any, receive: Any, send: Any) -> None:  # as Django's
        if scope["type"] != "http":
            raise ValueError("only HTTP")
        await app(scope, receive, send)

    log: list[str] = []
    for one in (app, only_http):
        async with client(one) as http:
            assert (await http.put("/", content=b"abc")).status_code == 201
    assert log == ["response ended"] * 2
    assert "the application has no lifespan: ValueError: only HTTP" in caplog.messages
    with pytest.raises(TypeError, match="app must be an ASGI application, not str"):
        client("main:app")  # type: ignore[arg-type]  # as for uvicorn
    for one in (refuse, refuse_in_a_loop):
        with pytest.raises(RuntimeError, match="too early"):
            async with client(one):
                pytest.fail("it has not started")


@pytest.mark.anyio
async def test_errors_reach_the_test_or_become_responses(served: Served) -> None:
    @served.app.get("/fail")
    async def fail() -> None:
        raise LookupError("of the endpoint")

    @served.app.get("/fail-later")
    async def fail_later() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "one"
            raise LookupError("of the stream")

        return StreamingResponse(parts())

    async with client(served.app) as http:
        with pytest.raises(LookupError, match="of the endpoint"):
            await http.get("/fail")
        with pytest.raises(LookupError, match="of the stream"):
            await http.get("/fail-later")
    async with client(served.app, raise_app_exceptions=False) as http:
        assert (await http.get("/fail")).status_code == 500
        async with http.stream("GET", "/fail-later") as response:
            sent = response.aiter_raw()
            assert await anext(sent) == b"one"
            with pytest.raises(httpx2.RemoteProtocolError, match="the application ended before"):
                await anext(sent)


class Endless:
    """The parts of a response. Not a generator, which trio would have to close."""

    made = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        self.made += 1
        return str(self.made)


@pytest.mark.anyio
async def test_a_stream_arrives_in_parts_until_the_client_leaves(served: Served) -> None:
    @served.app.get("/numbers")
    async def numbers() -> StreamingResponse:
        return StreamingResponse(endless)

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        await served.app(scope, receive, send)
        ended.append(scope["type"])

    endless, ended = Endless(), list[str]()
    async with client(noted) as http:
        async with (
            http.stream("GET", "/numbers") as response,
            aclosing(response.aiter_raw()) as parts,
        ):
            assert [await anext(parts) for _ in range(3)] == [b"1", b"2", b"3"]
            await anyio.wait_all_tasks_blocked()
            assert endless.made == 4  # the application waits until the client reads
        await anyio.wait_all_tasks_blocked()
        assert ended == ["http"]
        async with http.stream("GET", "/numbers"):
            pass  # nothing is read
        forgotten = await http.send(http.build_request("GET", "/numbers"), stream=True)
    assert ended == ["http", "http", "http", "lifespan"]
    await forgotten.aclose()


@pytest.mark.anyio
async def test_a_response_ends_with_its_background_tasks(served: Served) -> None:
    @served.app.get("/later")
    async def later(tasks: BackgroundTasks) -> str:
        tasks.add_task(served.log.append, "background")
        return "now"

    async with client(served.app) as http:
        assert (await http.get("/later")).json() == "now"
        assert served.log == ["started", "background"]


@pytest.mark.anyio
async def test_a_cancelled_request_is_a_client_that_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    served = Served(gate)

    @served.app.get("/", dependencies=[Depends(cancel_on_disconnect)])
    async def endpoint() -> list[int]:
        try:
            return [await served.batcher(1)]
        finally:
            served.log.append("endpoint ended")

    @served.app.get("/fail")
    async def fail(request: Request) -> None:
        scope.cancel()
        while not await request.is_disconnected():
            await anyio.lowlevel.checkpoint()
        raise LookupError("of the endpoint")

    async with client(served.app) as http:
        with gate:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(http.get, "/")
                await gate.entered()
                tasks.cancel_scope.cancel()
            while served.log != ["started", "endpoint ended"]:
                await anyio.lowlevel.checkpoint()
        with anyio.CancelScope() as scope:
            await http.get("/fail")
    assert "failed after its client had left" in caplog.text
    assert "LookupError: of the endpoint" in caplog.text


def test_without_httpx_its_absence_is_named() -> None:
    program = (
        "import httpx2, sys\n"
        "from aiopar.testing import client\n"
        "sys.modules['httpx'] = httpx2\n"
        "sys.modules['httpx2'] = None\n"
        "client(lambda *_: None)\n"  # with `httpx`
        "del sys.modules['aiopar.testing._transport']\n"
        "sys.modules['httpx'] = None\n"
        "print('without')\n"
        "client(lambda *_: None)\n"
    )
    _, out, err = programs.run(program)
    assert out == "without\n"
    assert "ImportError: aiopar.testing.client needs httpx: pip install httpx2" in err
