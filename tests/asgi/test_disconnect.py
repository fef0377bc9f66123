"""The client goes away, or does not: what the application sees of it, over a wire in memory."""

import asyncio
import contextvars
import functools
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings, strategies as st
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiopar.asgi import DisconnectMiddleware
from aiopar.testing import Gate

from .wire import Wire, answer

_VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable")

# Listen from the first turn of the loop on, so that no test waits for a clock.
watched = functools.partial(DisconnectMiddleware, delay=0.0)


async def turns_of_the_loop() -> None:
    """As many as it takes to begin to listen, and a few more."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


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


@pytest.mark.anyio
async def test_body_that_waits_to_be_asked_for_is_left_to_the_application() -> None:
    wire = Wire(expect="100-continue")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await turns_of_the_loop()
        assert wire.asked == 0
        wire.deliver(b"asked for")
        assert (await receive())["body"] == b"asked for"
        await wire.received_from()  # from now on the client is listened to
        wire.hang_up()
        await anyio.sleep_forever()

    await wire.serve(watched(app))
    assert wire.statuses == [499]


@pytest.mark.asyncio
async def test_request_that_ends_in_time_costs_no_task() -> None:
    tasks = set[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        tasks.add(len(asyncio.all_tasks()))
        await answer(send)
        tasks.add(len(asyncio.all_tasks()))

    before = len(asyncio.all_tasks())
    wire = Wire()
    await DisconnectMiddleware(app, delay=60.0)(wire.scope, wire.receive, wire.send)
    assert tasks == {before}


@pytest.mark.asyncio
async def test_timer_of_a_request_that_has_ended_starts_nothing() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Ends before the loop's next turn, in which the timer would be due."""

    wire = Wire()
    await watched(app)(wire.scope, wire.receive, wire.send)
    await turns_of_the_loop()
    assert wire.asked == 0


@pytest.mark.anyio
async def test_each_is_listened_for_in_the_context_of_its_own_request() -> None:
    heard: list[tuple[str, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep_forever()

    middleware = watched(app)

    async def request(name: str) -> None:
        _VARIABLE.set(name)
        wire = Wire()

        async def receive() -> Message:
            heard.append((name, _VARIABLE.get()))
            return await wire.receive()

        await middleware(wire.scope, receive, wire.send)

    async with anyio.create_task_group() as tasks:
        for name in "abc":
            tasks.start_soon(request, name)
        while {own for own, _ in heard} != set("abc"):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert all(own == seen for own, seen in heard)


@pytest.mark.anyio
async def test_listening_ends_with_the_request() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        wire.deliver(b"")
        await wire.received_from()

    wire = Wire()
    await wire.serve(watched(app))
    await turns_of_the_loop()
    assert not wire.receiving


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_other_scopes_pass_through_untouched(kind: str) -> None:
    wire, seen = Wire(), list[object]()

    async def app(*arguments: object) -> None:
        seen.extend(arguments)

    scope: Scope = {"type": kind}
    receive, send = wire.receive, wire.send
    await watched(app)(scope, receive, send)
    assert seen[0] is scope
    assert seen[1] is receive
    assert seen[2] is send


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


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@given(
    parts=st.lists(st.binary(max_size=3), min_size=1, max_size=6),
    steps=st.lists(st.sampled_from(["deliver", "read", "turn"]), max_size=30),
)
@settings(max_examples=60)
def test_no_message_is_lost_and_one_at_most_is_held(
    backend: str, parts: list[bytes], steps: list[str]
) -> None:
    async def main() -> None:
        wire, may_read, got = Wire(), anyio.Semaphore(0), list[Message]()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while not got or got[-1]["type"] != "http.disconnect":
                await may_read.acquire()
                got.append(await receive())
                assert wire.taken <= len(got) + 1

        undelivered = list(enumerate(parts, 1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.serve, watched(app))
            for step in steps + ["deliver"] * len(parts):
                if step == "deliver" and undelivered:
                    number, part = undelivered.pop(0)
                    wire.deliver(part, more=number < len(parts))
                elif step == "read":
                    may_read.release()
                else:
                    await anyio.lowlevel.checkpoint()
                assert wire.taken <= len(got) + 1
            await anyio.wait_all_tasks_blocked()
            assert wire.taken <= len(got) + 1
            for _ in range(len(parts) + 1):
                may_read.release()
            while len(got) < len(parts):
                await anyio.lowlevel.checkpoint()
            wire.hang_up()
        bodies = [message["body"] for message in got[:-1]]
        assert bodies == parts

    anyio.run(main, backend=backend)
