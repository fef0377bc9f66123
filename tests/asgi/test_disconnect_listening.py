"""Listening for a client that goes away: when, in which context, and no message is lost by it."""

import asyncio
import contextvars

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings, strategies as st
from starlette.types import Message, Receive, Scope, Send

from aiopar.asgi import DisconnectMiddleware

from .watched import turns_of_the_loop, watched
from .wire import Wire, answer

_VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable")


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
