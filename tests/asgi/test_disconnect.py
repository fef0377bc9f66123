"""`DisconnectMiddleware`: cancellation, messages and streams of a request, served in memory."""

import asyncio
import functools
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from hypothesis import given, settings, strategies as st
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import aiopar
from aiopar.asgi import DisconnectMiddleware, cancel_on_disconnect
from aiopar.testing import Gate

from .wire import Wire, answer

# The middleware begins to listen in the loop's first turn, so that no test waits for a clock.
_OnlyBatchers = functools.partial(DisconnectMiddleware, delay=0.0)


def watched(app: ASGIApp) -> DisconnectMiddleware:
    """With an application that is cancelled whatever it waits for."""

    async def cancelled_always(scope: Scope, receive: Receive, send: Send) -> None:
        await cancel_on_disconnect()
        await app(scope, receive, send)

    return _OnlyBatchers(cancelled_always)


async def turns_of_the_loop() -> None:
    """Enough turns for the middleware to begin to listen."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


class Work:
    """Work of an application that never ends by itself."""

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


@asynccontextmanager
async def client_leaves(
    wire: Wire, app: ASGIApp, begun: Callable[[], Awaitable[object]], *, body: bytes = b""
) -> AsyncIterator[None]:
    """Serve a request whose client disconnects once it has `begun`; the block runs after that."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wire.serve, app)
        wire.deliver(body)
        await begun()
        await wire.received_from()
        wire.hang_up()
        yield


async def _release(log: list[str]) -> None:
    """A cleanup that awaits; on trio it needs a shield."""
    with anyio.CancelScope(shield=asyncio._get_running_loop() is None):
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
            await anyio.sleep(0.001)
    log.append("released")


class _Logged(BaseHTTPMiddleware):
    """Middleware that logs the status, as many applications have."""

    def __init__(self, app: ASGIApp, log: list[object]) -> None:
        super().__init__(app)
        self._log = log

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        self._log.append(response.status_code)
        return response


@pytest.mark.anyio
@pytest.mark.parametrize("reads", [False, True], ids=["body unread", "body read"])
@pytest.mark.parametrize("outer", [False, True], ids=["alone", "in a middleware"])
async def test_disconnect_cancels_the_application(reads: bool, outer: bool) -> None:
    wire, work, log, statuses = Wire(), Work(), list[str](), list[object]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if reads:
            assert await Request(scope, receive).body() == b"features"
        try:
            await work()
        finally:
            with anyio.CancelScope(shield=outer):  # the middleware runs it in a task group
                await _release(log)

    served = _Logged(watched(app), statuses) if outer else watched(app)
    async with client_leaves(wire, served, work.began.wait, body=b"features"):
        pass
    assert work.cancelled
    assert log == ["released"]
    assert wire.statuses == [499]
    assert statuses == [499] * outer


@pytest.mark.anyio
async def test_disconnect_during_a_response_sends_nothing_more() -> None:
    wire, work = Wire(spec_version="2.4"), Work()  # a StreamingResponse does not receive then

    async def parts() -> AsyncIterator[bytes]:
        yield b"first"
        await work()

    async with client_leaves(wire, watched(StreamingResponse(parts())), work.began.wait):
        pass
    assert work.cancelled
    assert wire.statuses == [200]
    assert [message.get("body") for message in wire.sent] == [None, b"first"]


@pytest.mark.anyio
@pytest.mark.parametrize("listens", ["before", "after"])
async def test_application_that_receives_gets_the_disconnect_and_is_not_cancelled(
    listens: str,
) -> None:
    wire, work, cleaned_up = Wire(), Work(), []

    async def parts() -> AsyncIterator[bytes]:
        yield b"first"
        await work()

    async def background() -> None:
        await anyio.lowlevel.checkpoint()
        cleaned_up.append(True)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if listens == "after":  # after the middleware
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
async def test_work_after_a_complete_response_is_not_cancelled() -> None:
    wire, done = Wire(), list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        wire.deliver(b"")
        await wire.received_from()
        await answer(send)  # the wire then reports a disconnect
        await anyio.wait_all_tasks_blocked()
        done.append(int(await batcher(torch.tensor(1))))
        assert (await receive())["body"] == b""  # received ahead by the middleware
        assert (await receive())["type"] == "http.disconnect"

    async with aiopar.Batcher(lambda batch: batch) as batcher:
        await wire.serve(watched(app))
    assert done == [1]


@pytest.mark.anyio
async def test_error_of_the_servers_receive_is_raised_by_the_applications() -> None:
    wire, met = Wire(), anyio.Event()

    async def receive_with_limit() -> Message:
        await anyio.lowlevel.checkpoint()
        met.set()
        raise ValueError("too large")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await met.wait()  # the middleware has received
        for _ in range(2):
            with pytest.raises(ValueError, match="too large"):
                await receive()
        await answer(send)

    await watched(app)(wire.scope, receive_with_limit, wire.send)
    assert wire.statuses == [200]


def _answering_late(work: Work) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(anyio.get_cancelled_exc_class()):
            await work()
        await PlainTextResponse("what there was by then")(scope, receive, send)

    return app


@pytest.mark.anyio
async def test_late_response_is_sent_on_asyncio_and_cancelled_on_trio(
    anyio_backend: tuple[str, dict[str, Any]],
) -> None:
    wire, work, log = Wire(), Work(), list[object]()
    app = _Logged(watched(_answering_late(work)), log)
    async with client_leaves(wire, app, work.began.wait):
        pass
    expected = 200 if anyio_backend[0] == "asyncio" else 499
    assert log == [expected]
    assert wire.statuses == [expected]


@pytest.mark.anyio
async def test_late_response_is_sent_if_the_server_sends_at_once() -> None:
    class AtOnce(Wire):
        async def send(self, message: Message) -> None:  # as uvicorn does
            self.sent.append(message)

    wire, work = AtOnce(), Work()
    async with client_leaves(wire, watched(_answering_late(work)), work.began.wait):
        pass
    assert [message.get("status") for message in wire.sent] == [200, None]


# Cancelled once, on asyncio: cleanup may await.


@pytest.mark.asyncio
async def test_application_that_is_about_to_go_on_is_cancelled_at_its_next_await() -> None:
    """Its wait has ended, but its task was not resumed: a cancellation has no effect there."""
    work, log = Work(), list[str]()
    result: aiopar.Future[None] = aiopar.Future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            work.began.set()
            await result
            log.append("resumed")
            await work()
        finally:
            await _release(log)

    class Last(Wire):
        async def receive(self) -> Message:
            message = await super().receive()
            if message["type"] == "http.disconnect":
                result.set_result(None)
            return message

    wire = Last()
    async with client_leaves(wire, watched(app), work.began.wait):
        pass
    assert log == ["resumed", "released"]
    assert work.cancelled
    assert wire.statuses == [499]


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["gather", "TaskGroup"])
async def test_tasks_of_asyncio_are_cancelled_once_too(way: str) -> None:
    wire, works, log = Wire(), [Work(), Work()], list[str]()

    async def one(work: Work) -> None:
        try:
            await work()
        finally:
            await _release(log)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if way == "gather":
                await asyncio.wait_for(asyncio.gather(*map(one, works)), 60)
            else:
                async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                    for work in works:
                        group.create_task(one(work))
        finally:
            await _release(log)
            cancelling.append(asyncio.current_task())

    cancelling: list[asyncio.Task[Any] | None] = []

    async def begun() -> None:
        for work in works:
            await work.began.wait()

    async with client_leaves(wire, watched(app), begun):
        pass
    assert log == ["released"] * 3
    assert cancelling[0] is not None
    assert cancelling[0].cancelling() == 0
    assert wire.statuses == [499]


@pytest.mark.asyncio
async def test_cleanup_after_an_endpoint_in_a_thread_may_await() -> None:
    """The thread cannot be stopped, so its resources must not be cleaned up before it ends."""
    wire, log = Wire(), list[str]()

    def endpoint(request: Request) -> Response:
        gate()
        log.append("ends")
        return PlainTextResponse()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await Route("/", endpoint, methods=["POST"]).handle(scope, receive, send)
        finally:
            await _release(log)

    with Gate() as gate:
        async with client_leaves(wire, watched(app), gate.entered):
            await anyio.wait_all_tasks_blocked()
            gate.open()
    assert log == ["ends", "released"]


@pytest.mark.asyncio
async def test_server_that_cancels_the_request_itself_is_obeyed() -> None:
    wire, work, log = Wire(), Work(), list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await work()
        finally:
            log.append("cleanup")
            await anyio.sleep_forever()

    serving = asyncio.create_task(watched(app)(wire.scope, wire.receive, wire.send))
    wire.deliver(b"")
    await work.began.wait()
    await wire.received_from()
    wire.hang_up()
    while not log:
        await anyio.lowlevel.checkpoint()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert wire.statuses == []


# Only requests that wait for a batcher, unless asked for.

_WAYS = ["call", "steps", "gather", "map", "stream", "stream of steps", "task group"]


class Steps:
    """A stepper without end, whose states hold an item; `closed` is set when the first leaves."""

    def __init__(self, on_step: Callable[[], object] = lambda: None) -> None:
        self.on_step = on_step
        self.closed: aiopar.Future[None] = aiopar.Future()

    def start(self, item: torch.Tensor) -> Iterator[int]:
        return itertools.count(int(item))

    def step(self, states: list[Iterator[int]]) -> list[int]:
        self.on_step()
        return [next(state) for state in states]

    def stop(self, _: Iterator[int]) -> None:
        self.closed.set_result(None)


async def _ask(batcher: Any, way: str) -> None:
    """Ask a batcher for two items."""
    items = [torch.tensor(1), torch.tensor(2)]
    if way in ("call", "steps"):
        await batcher(items[0])
    elif way == "gather":
        await asyncio.gather(*map(batcher, items))
    elif way == "map":
        async with aiopar.map(batcher, items, concurrency=2) as outputs:
            async for _ in outputs:
                pass
    elif way.startswith("stream"):
        async with batcher.stream(items[0]) as parts:
            async for _ in parts:
                pass
    else:
        async with anyio.create_task_group() as tasks:
            for item in items:
                tasks.start_soon(batcher, item)


@pytest.mark.anyio
@pytest.mark.parametrize("way", _WAYS)
async def test_request_that_waits_for_a_batcher_is_cancelled_once(
    way: str, anyio_backend: tuple[str, dict[str, Any]]
) -> None:
    if way == "gather" and anyio_backend[0] == "trio":
        pytest.skip("asyncio's")
    wire, log = Wire(), list[str]()

    def held(batch: torch.Tensor) -> torch.Tensor:
        return gate(batch)

    def stream_held(batch: torch.Tensor) -> Iterator[torch.Tensor]:
        yield gate(batch)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _ask(batcher, way)
        finally:
            await _release(log)

    with Gate() as gate:
        made: aiopar.Batcher[Any, Any] | aiopar.ContinuousBatcher[Any, Any, Any]
        if "steps" in way:
            made = aiopar.ContinuousBatcher(Steps(gate))
        else:
            made = aiopar.Batcher(stream_held if way == "stream" else held)
        async with (
            made as batcher,
            client_leaves(wire, _OnlyBatchers(app), gate.entered),
        ):
            while not wire.statuses:
                await anyio.lowlevel.checkpoint()
            gate.open()
    assert log == ["released"]
    assert wire.statuses == [499]


@pytest.mark.anyio
@pytest.mark.parametrize("awaits", ["its own task", "the batcher"])
@pytest.mark.parametrize("body", ["read", "unread"])
async def test_endpoint_that_polls_ends_its_own_task(awaits: str, body: str) -> None:
    wire, polled, go_on, ended = Wire(), anyio.Event(), anyio.Event(), list[str]()

    async def compute(scope: anyio.CancelScope) -> None:
        with scope:
            await batcher(torch.tensor(1))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if body == "read":
            await request.body()
        assert not await request.is_disconnected()
        polled.set()
        try:
            if awaits == "the batcher":
                await batcher(torch.tensor(1))
            async with anyio.create_task_group() as tasks:
                computing = anyio.CancelScope()
                tasks.start_soon(compute, computing)
                await go_on.wait()  # until the next poll
                if await request.is_disconnected():
                    computing.cancel()
                    ended.append("by the poll")
            await answer(send)
        except anyio.get_cancelled_exc_class():
            ended.append("by the middleware")
            raise

    async def begun() -> None:
        await gate.entered()
        await polled.wait()

    with Gate() as gate:
        async with (
            aiopar.Batcher(gate) as batcher,
            client_leaves(wire, _OnlyBatchers(app), begun),
        ):
            await wire.delivered()
            await turns_of_the_loop()
            go_on.set()
            while not ended:
                await anyio.lowlevel.checkpoint()
            gate.open()
    assert ended == ["by the poll" if awaits == "its own task" else "by the middleware"]


@pytest.mark.anyio
@pytest.mark.parametrize("asks_again", [False, True])
async def test_request_is_cancelled_if_it_comes_to_a_batcher_later(asks_again: bool) -> None:
    wire, go_on, began = Wire(), anyio.Event(), anyio.Event()
    log = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await echo(torch.tensor(1))  # this wait is over when the client leaves
            began.set()
            await go_on.wait()
            log.append("goes on")
            if asks_again:
                await batcher(torch.tensor(1))
            await answer(send)
        finally:
            await _release(log)

    with Gate() as gate:
        async with (
            aiopar.Batcher(lambda batch: batch) as echo,
            aiopar.Batcher(gate) as batcher,
            client_leaves(wire, _OnlyBatchers(app), began.wait),
        ):
            await anyio.wait_all_tasks_blocked()
            go_on.set()
            while not wire.statuses:
                await anyio.lowlevel.checkpoint()
            gate.open()
    assert log == ["goes on", "released"]
    assert wire.statuses == [499 if asks_again else 200]


@pytest.mark.asyncio
async def test_request_that_catches_the_cancellation_is_not_cancelled_again() -> None:
    wire, answers = Wire(), list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(anyio.get_cancelled_exc_class()):
            await first(torch.tensor(1))
        await turns_of_the_loop()
        answers.append(int(await second(torch.tensor(2))))
        await answer(send)

    with Gate() as gate:
        async with (
            aiopar.Batcher(gate) as first,
            aiopar.Batcher(lambda batch: batch) as second,
            client_leaves(wire, watched(app), gate.entered),
        ):
            while not wire.statuses:
                await anyio.lowlevel.checkpoint()
            gate.open()
    assert answers == [2]
    assert wire.statuses == [200]


@pytest.mark.asyncio
async def test_cancel_on_disconnect_needs_the_middleware() -> None:
    with pytest.raises(RuntimeError, match=r"call install\(app\)"):
        await cancel_on_disconnect()


# Listening: when, in which context, and without losing a message.


@pytest.mark.anyio
async def test_body_after_expect_is_left_to_the_application() -> None:
    wire = Wire(expect="100-continue")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await turns_of_the_loop()
        assert wire.asked == 0
        wire.deliver(b"asked for")
        assert (await receive())["body"] == b"asked for"
        await wire.received_from()  # now the middleware receives
        wire.hang_up()
        await anyio.sleep_forever()

    await wire.serve(watched(app))
    assert wire.statuses == [499]


@pytest.mark.asyncio
async def test_request_that_ends_within_the_delay_costs_no_task() -> None:
    tasks = set[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        tasks.add(len(asyncio.all_tasks()))
        await answer(send)
        tasks.add(len(asyncio.all_tasks()))

    before = len(asyncio.all_tasks())
    wire = Wire()
    await DisconnectMiddleware(app, delay=60.0)(wire.scope, wire.receive, wire.send)
    assert tasks == {before}


@pytest.mark.anyio
@pytest.mark.parametrize("listens", [False, True])
async def test_listening_ends_with_the_request(listens: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if listens:  # else the request ends before the timer is due
            wire.deliver(b"")
            await wire.received_from()

    wire = Wire()
    await wire.serve(watched(app))
    await turns_of_the_loop()
    assert not wire.receiving
    assert listens or wire.asked == 0


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_other_scopes_pass_through_unchanged(kind: str) -> None:
    wire, seen = Wire(), list[object]()

    async def app(*arguments: object) -> None:
        seen.extend(arguments)

    scope: Scope = {"type": kind}
    receive, send = wire.receive, wire.send
    await _OnlyBatchers(app)(scope, receive, send)
    assert seen[0] is scope
    assert seen[1] is receive
    assert seen[2] is send


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@given(
    parts=st.lists(st.binary(max_size=3), min_size=1, max_size=6),
    steps=st.lists(st.sampled_from(["deliver", "read", "turn"]), max_size=30),
)
@settings(max_examples=60)
def test_no_message_is_lost_and_at_most_one_is_received_ahead(
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


# Streams of a batcher.


class Counting:
    """A generator function without end; `closed` is set when its generator is closed."""

    def __init__(self) -> None:
        self.closed: aiopar.Future[None] = aiopar.Future()

    def __call__(self, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        try:
            for number in itertools.count():
                yield batch + number
        finally:
            self.closed.set_result(None)


class Unread(Wire):
    """A client that reads two parts and then disconnects."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.closed = anyio.Event(), anyio.Event()

    async def send(self, message: Message) -> None:
        if len(self.sent) == 3:  # the start and two parts
            self.full.set()
            await self.closed.wait()  # as uvicorn, which drops what is sent later
        else:
            await super().send(message)


@pytest.mark.anyio
@pytest.mark.parametrize("around", [watched, lambda app: watched(_Logged(app, []))])
@pytest.mark.parametrize("way", ["async with", "async for"])
@pytest.mark.parametrize("kind", [Counting, Steps])
async def test_stream_of_a_suspended_response_is_closed(
    way: str, around: Callable[[ASGIApp], ASGIApp], kind: type[Counting] | type[Steps]
) -> None:
    counting, wire = kind(), Unread()
    kept: list[AsyncGenerator[bytes, None]] = []  # as a reference cycle would keep it

    async def parts(batcher: Any) -> AsyncGenerator[bytes, None]:
        stream = batcher.stream(torch.zeros(()))
        if way == "async with":
            async with stream:
                async for part in stream:
                    yield b"%d" % part
        else:
            async for part in stream:
                yield b"%d" % part

    made: aiopar.Batcher[Any, Any] | aiopar.ContinuousBatcher[Any, Any, Any]
    if isinstance(counting, Steps):
        made = aiopar.ContinuousBatcher(counting)
    else:
        made = aiopar.Batcher(counting)
    async with made as batcher:

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            kept.append(parts(batcher))
            await StreamingResponse(kept[0])(scope, receive, send)

        async with client_leaves(wire, around(app), wire.full.wait):
            await turns_of_the_loop()  # the response gets the disconnect and is cut off
            wire.closed.set()
        with anyio.fail_after(30):
            await counting.closed
        await kept[0].aclose()


@pytest.mark.anyio
async def test_stream_cannot_be_read_after_its_request() -> None:
    """The end of the stream would look like the end of the output."""
    wire = Wire()
    async with aiopar.Batcher(Counting()) as batcher:
        stream = batcher.stream(torch.zeros(()))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await anext(stream)

        await wire.serve(watched(app))
        with pytest.raises(RuntimeError, match="this stream ended with the HTTP request"):
            await anext(stream)


@pytest.mark.anyio
async def test_stream_outlives_a_complete_response() -> None:
    wire = Wire()
    async with aiopar.Batcher(Counting()) as batcher:
        stream = batcher.stream(torch.zeros(()))

        async def parts() -> AsyncIterator[bytes]:
            yield b"%d" % await anext(stream)

        async def background() -> None:
            assert await anext(stream) == 1

        app = StreamingResponse(parts(), background=BackgroundTask(background))
        wire.deliver(b"")
        await wire.serve(watched(app))
        assert await anext(stream) == 2
        await stream.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("between_reads", [True, False])
async def test_stream_that_another_task_reads_is_not_closed(between_reads: bool) -> None:
    wire, ended, read = Wire(), anyio.Event(), list[int]()
    hold: aiopar.Future[None] = aiopar.Future()

    async def read_on() -> None:
        read.append(int(await anext(stream)))
        if between_reads:
            await ended.wait()
        read.append(int(await anext(stream)))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        tasks.start_soon(read_on)
        while not read:
            await anyio.lowlevel.checkpoint()

    def twice(batch: torch.Tensor) -> Iterator[torch.Tensor]:
        yield batch
        hold.wait()
        yield batch + 1

    async with aiopar.Batcher(twice) as batcher, anyio.create_task_group() as tasks:
        stream = batcher.stream(torch.zeros(()))
        await wire.serve(watched(app))
        ended.set()
        hold.set_result(None)
    assert read == [0, 1]
