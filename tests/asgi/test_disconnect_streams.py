"""A client goes away while its response, cut off where it sends, still holds a batcher's stream."""

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

import anyio
import anyio.lowlevel
import pytest
import torch
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import aiopar

from .watched import turns_of_the_loop, watched
from .wire import Wire


class Counting:
    """Yields without end, and tells when that is over."""

    def __init__(self) -> None:
        self.closed: aiopar.Future[None] = aiopar.Future()

    def __call__(self, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        try:
            for number in itertools.count():
                yield batch + number
        finally:
            self.closed.set_result(None)


class Unread(Wire):
    """Its client reads two parts, no more, and goes away."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.closed = anyio.Event(), anyio.Event()

    async def send(self, message: Message) -> None:
        if len(self.sent) == 3:  # the start too
            self.full.set()
            await self.closed.wait()  # as in uvicorn: from then on what is sent is dropped
        else:
            await super().send(message)


async def _pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
    return await call_next(request)


def _in_middleware(app: ASGIApp) -> ASGIApp:
    # It completes the response, whoever has gone.
    return BaseHTTPMiddleware(app, _pass_on)


@pytest.mark.anyio
@pytest.mark.parametrize("around", [watched, lambda app: watched(_in_middleware(app))])
@pytest.mark.parametrize("way", ["async with", "async for"])
async def test_stream_that_a_response_leaves_suspended_is_left(
    way: str, around: Callable[[ASGIApp], ASGIApp]
) -> None:
    counting, wire = Counting(), Unread()
    kept: list[AsyncGenerator[bytes, None]] = []  # instead of a cycle

    async def parts(batcher: aiopar.Batcher) -> AsyncGenerator[bytes, None]:
        stream = batcher.stream(torch.zeros(()))
        if way == "async with":
            async with stream:
                async for part in stream:
                    yield b"%d" % part
        else:
            async for part in stream:
                yield b"%d" % part

    async with aiopar.Batcher(counting) as batcher:

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            kept.append(parts(batcher))
            await StreamingResponse(kept[0])(scope, receive, send)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.serve, around(app))
            wire.deliver(b"")
            await wire.full.wait()
            await wire.received_from()
            wire.hang_up()
            await turns_of_the_loop()  # the response has heard of it, and was cut off
            wire.closed.set()
        with anyio.fail_after(30):
            await counting.closed
        await kept[0].aclose()


@pytest.mark.anyio
async def test_reading_on_without_an_answer_is_an_error() -> None:
    """Its end would look as that of all parts."""
    wire = Wire()
    async with aiopar.Batcher(Counting()) as batcher:
        stream = batcher.stream(torch.zeros(()))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await anext(stream)

        await wire.serve(watched(app))
        with pytest.raises(RuntimeError, match="ended with the request"):
            await anext(stream)


@pytest.mark.anyio
async def test_stream_outlives_a_response_that_is_complete() -> None:
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
async def test_stream_that_another_task_has_read_is_not_left() -> None:
    """It is between two reads when the request ends."""
    wire, ended = Wire(), anyio.Event()
    read: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def read_on() -> None:
            read.append(int(await anext(stream)))
            await ended.wait()
            read.append(int(await anext(stream)))
            await stream.aclose()

        tasks.start_soon(read_on)
        while not read:
            await anyio.lowlevel.checkpoint()

    async with aiopar.Batcher(Counting()) as batcher, anyio.create_task_group() as tasks:
        stream = batcher.stream(torch.zeros(()))
        await wire.serve(watched(app))
        ended.set()
    assert read == [0, 1]


@pytest.mark.anyio
async def test_stream_that_another_task_reads_is_not_left() -> None:
    wire = Wire()
    hold: aiopar.Future[None] = aiopar.Future()
    read: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def read_on() -> None:
            read.append(int(await anext(stream)))
            read.append(int(await anext(stream)))

        tasks.start_soon(read_on)
        await anyio.sleep_forever()

    def twice(batch: torch.Tensor) -> Iterator[torch.Tensor]:
        yield batch
        hold.wait()
        yield batch + 1

    async with aiopar.Batcher(twice) as batcher, anyio.create_task_group() as tasks:
        stream = batcher.stream(torch.zeros(()))
        async with anyio.create_task_group() as serving:
            serving.start_soon(wire.serve, watched(app))
            wire.deliver(b"")
            await wire.received_from()
            while not read:  # the first part has come, and the next is waited for
                await anyio.lowlevel.checkpoint()
            wire.hang_up()
        hold.set_result(None)
    assert read == [0, 1]
