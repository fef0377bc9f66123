"""The client goes away, or does not: what the application sees of it, over a wire in memory."""

from collections.abc import AsyncIterator
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiopar.testing import Gate

from .watched import watched
from .wire import Wire, answer


class Work:
    """Something that an application awaits, and does not finish."""

    def __init__(self) -> None:
        self.began = anyio.Event()
        self.cancelled = False

    async def __call__(self) -> None:
        self.began.set()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            self.cancelled = True
            raise


@pytest.mark.anyio
@pytest.mark.parametrize("reads", [False, True], ids=["body unread", "body read"])
async def test_client_that_goes_away_cancels_the_work(reads: bool) -> None:
    wire, work = Wire(), Work()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if reads:
            assert await Request(scope, receive).body() == b"features"
        await work()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.serve, watched(app))
        wire.deliver(b"fea", more=reads)
        if reads:
            wire.deliver(b"tures")
        await work.began.wait()
        await wire.received_from()
        wire.hang_up()
    assert work.cancelled
    assert wire.statuses == [499]


@pytest.mark.anyio
async def test_after_the_start_of_a_response_nothing_is_made_up() -> None:
    wire, work = Wire(spec_version="2.4"), Work()  # where a StreamingResponse does not listen

    async def parts() -> AsyncIterator[bytes]:
        yield b"first"
        await work()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.serve, watched(StreamingResponse(parts())))
        wire.deliver(b"")
        await work.began.wait()
        await wire.received_from()
        wire.hang_up()
    assert work.cancelled
    assert wire.statuses == [200]
    assert [message.get("body") for message in wire.sent] == [None, b"first"]


@pytest.mark.anyio
@pytest.mark.parametrize("listens", ["before", "after"])
async def test_application_that_listens_itself_is_told_and_not_cancelled(listens: str) -> None:
    wire, work, cleaned_up = Wire(), Work(), []

    async def parts() -> AsyncIterator[bytes]:
        yield b"first"
        await work()

    async def background() -> None:
        await anyio.lowlevel.checkpoint()
        cleaned_up.append(True)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if listens == "after":  # the middleware
            await wire.received_from()
        await StreamingResponse(parts(), background=BackgroundTask(background))(
            scope, receive, send
        )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.serve, watched(app))
        await wire.received_from()
        wire.deliver(b"")
        await work.began.wait()
        await wire.received_from()
        wire.hang_up()
    assert work.cancelled  # by the StreamingResponse
    assert cleaned_up == [True]


@pytest.mark.anyio
async def test_reader_of_a_body_is_told_that_the_rest_does_not_come() -> None:
    wire = Wire()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(ClientDisconnect):
            await Request(scope, receive).body()
        assert (await receive())["type"] == "http.disconnect"  # also once more
        await answer(send)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.serve, watched(app))
        wire.deliver(b"first", more=True)
        await wire.received_from()
        wire.hang_up()
    assert wire.statuses == [200]


@pytest.mark.anyio
async def test_what_follows_a_complete_response_is_not_cancelled() -> None:
    wire, done = Wire(), list[bool]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        wire.deliver(b"")
        await wire.received_from()
        await answer(send)  # and the wire says that it is over
        await anyio.wait_all_tasks_blocked()
        done.append(True)
        assert (await receive())["body"] == b""  # held all the time
        assert (await receive())["type"] == "http.disconnect"

    await wire.serve(watched(app))
    assert done == [True]


@pytest.mark.anyio
async def test_errors_of_the_application_leave_as_they_are() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await wire.received_from()
        raise KeyError("mine")

    wire = Wire()
    with pytest.raises(KeyError, match="mine"):
        await wire.serve(watched(app))


@pytest.mark.anyio
async def test_errors_of_receiving_go_to_who_receives() -> None:
    wire, met = Wire(), anyio.Event()

    async def receive_with_limit() -> Message:
        await anyio.lowlevel.checkpoint()
        met.set()
        raise ValueError("too large")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await met.wait()  # by the middleware
        for _ in range(2):
            with pytest.raises(ValueError, match="too large"):
                await receive()
        await answer(send)

    await watched(app)(wire.scope, receive_with_limit, wire.send)
    assert wire.statuses == [200]


class _Logged(BaseHTTPMiddleware):
    """Middleware as in many applications; what it sees is what an access log would say."""

    def __init__(self, app: ASGIApp, log: list[object]) -> None:
        super().__init__(app)
        self._log = log

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        self._log.append(response.status_code)
        return response


@pytest.mark.anyio
async def test_middleware_around_sees_a_response() -> None:
    wire, work, log = Wire(), Work(), list[object]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert await Request(scope, receive).body() == b"features"
        await work()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.serve, _Logged(watched(app), log))
        wire.deliver(b"features")
        await work.began.wait()
        await wire.received_from()
        wire.hang_up()
    assert work.cancelled
    assert log == [499]


def _answering_late(work: Work) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(anyio.get_cancelled_exc_class()):
            await work()
        await PlainTextResponse("what there was by then")(scope, receive, send)

    return app


@pytest.mark.anyio
async def test_so_it_does_where_an_answer_is_cut_off_before_it_has_begun() -> None:
    wire, work, log = Wire(), Work(), list[object]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.serve, _Logged(watched(_answering_late(work)), log))
        wire.deliver(b"")
        await work.began.wait()
        await wire.received_from()
        wire.hang_up()
    assert log == [499]
    assert wire.statuses == [499]


@pytest.mark.anyio
async def test_a_late_answer_that_nothing_holds_up_is_given() -> None:
    wire, work, sent = Wire(), Work(), list[Message]()

    async def send_at_once(message: Message) -> None:  # as uvicorn does
        sent.append(message)

    async with anyio.create_task_group() as tasks:
        app = watched(_answering_late(work))
        tasks.start_soon(app, wire.scope, wire.receive, send_at_once)
        wire.deliver(b"")
        await work.began.wait()
        await wire.received_from()
        wire.hang_up()
    assert [message.get("status") for message in sent] == [200, None]


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["around", "within"])
async def test_middleware_and_streams_go_together(where: str) -> None:
    wire, log = Wire(), list[object]()

    async def parts() -> AsyncIterator[bytes]:
        await wire.received_from()
        yield b"one"
        yield b"two"

    async def endpoint(request: Request) -> Response:
        assert await request.body() == b"features"
        return StreamingResponse(parts())

    app: ASGIApp = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
    app = _Logged(watched(app), log) if where == "around" else watched(_Logged(app, log))
    wire.deliver(b"features")
    await wire.serve(app)
    assert log == [200]
    assert b"".join(message.get("body", b"") for message in wire.sent) == b"onetwo"


@pytest.mark.anyio
async def test_function_in_a_thread_is_waited_for() -> None:
    # What it uses is cleaned up after it: its thread cannot be stopped.
    wire, log = Wire(), list[object]()

    def endpoint(request: Request) -> Response:
        gate()
        log.append("ends")
        return PlainTextResponse()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await Route("/", endpoint, methods=["POST"]).handle(scope, receive, send)
        finally:
            log.append("cleaned up")

    with Gate() as gate:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.serve, watched(app))
            wire.deliver(b"")
            await gate.entered()
            await wire.received_from()
            wire.hang_up()
            await anyio.wait_all_tasks_blocked()
            gate.open()
    assert log == ["ends", "cleaned up"]
