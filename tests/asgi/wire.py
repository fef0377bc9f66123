"""The server's side of one request, in memory: the test delivers the messages."""

import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
from starlette.types import ASGIApp, Message


class Wire:
    """Behaves as uvicorn: one message per `receive`, and a disconnect after the response."""

    def __init__(
        self, url: str = "/", *, method: str = "POST", spec_version: str = "2.3", **headers: str
    ) -> None:
        path, _, query = url.partition("?")
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        self.sent: list[Message] = []
        self.asked = 0
        self.taken = 0
        self.receiving = False
        self._overlapped = False
        self._arrived: deque[Message] = deque()
        self._gone = False
        self._news = anyio.Event()

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.sent if "status" in message]

    async def serve(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        finally:
            assert not self._overlapped, (
                "two concurrent calls of receive: both would return for one message"
            )

    def deliver(self, body: bytes, *, more: bool = False) -> None:
        self._arrived.append({"type": "http.request", "body": body, "more_body": more})
        self._tell()

    def hang_up(self) -> None:
        self._gone = True
        self._tell()

    async def receive(self) -> Message:
        self._overlapped |= self.receiving
        self.receiving = True
        self.asked += 1
        self._tell()
        try:
            await self._until(lambda: bool(self._arrived) or self._gone)
        finally:
            self.receiving = False
            self._tell()
        if not self._arrived:
            return {"type": "http.disconnect"}
        self.taken += 1
        return self._arrived.popleft()

    async def send(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.hang_up()

    async def received_from(self) -> None:
        """Wait until the application or the middleware waits for the next message."""
        await self._until(lambda: self.receiving and not self._arrived)

    async def delivered(self) -> None:
        """Wait until every message is received, also the end of the connection."""
        await self._until(lambda: not self.receiving and not self._arrived)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._news.wait()

    def _tell(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()


async def get(app: ASGIApp, url: str) -> "Answer":
    """The response of the application to a GET request."""
    wire = Wire(url, method="GET")
    wire.deliver(b"")
    await wire.serve(app)
    start, *parts = wire.sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], headers, b"".join(part["body"] for part in parts).decode())


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


async def answer(send: Callable[[Message], Awaitable[None]], body: bytes = b"") -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})
