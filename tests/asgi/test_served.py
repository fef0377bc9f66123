"""A real uvicorn: error responses, disconnects, bodies, slow readers."""

import hashlib
import http.client
import os
import random
from collections.abc import Iterator

import pytest

from .served import PATIENCE, Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(base_http_middleware=True) as served:
        yield served
        served.terminate()
        served.ended()
        assert "Exception in ASGI application" not in served.log  # a disconnect is no error


def test_startup_is_complete_before_the_first_answer(served: Served) -> None:
    assert served.get("/readyz").json() == {"status": "ready"}
    started = [
        {"event": "opened", "name": "hall"},
        {"event": "opened", "name": "second hall"},
        {"event": "own startup", "hall_ready": True},
    ]
    assert served.events()[1:4] == started
    assert served.get("/state").text == "state"


_HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def test_disconnected_websocket_is_no_error(served: Served) -> None:
    """The fixture checks the log for errors."""
    lines = [f"{name}: {value}" for name, value in _HANDSHAKE.items()]
    with served.connection("GET /wait-connected", *lines):
        served.wait_for(event="entered", name="connected")
    served.post("/let-out")
    served.wait_for(event="failed", name="connected")


@pytest.mark.parametrize(
    ("request_line", "body"),
    [("GET /wait?name=", b""), ("POST /wait?name=unread", b"body")],
)
def test_disconnect_cancels_the_request(served: Served, request_line: str, body: bytes) -> None:
    name = f"gone-{request_line[:8]}".replace(" /", "-")
    length = f"Content-Length: {len(body)}"
    with served.connection(f"{request_line.split('=', maxsplit=1)[0]}={name}", length, body=body):
        served.wait_for(event="entered", name=name)
    served.wait_for(event="cancelled", name=name)


@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
@pytest.mark.parametrize("path", ["/echo", "/read-slowly"])
def test_large_bodies_arrive_complete(served: Served, path: str, chunked: bool) -> None:
    body = random.Random(chunked).randbytes(2_000_000)

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]

    with served.client() as client:
        response = client.post(path, content=chunks() if chunked else body)
    assert response.json() == {"size": len(body), "sha": hashlib.sha256(body).hexdigest()}


def test_slow_reader_gets_the_whole_response(served: Served) -> None:
    count = 400  # parts of 64 KiB: much more than the buffers of sockets hold
    before = len(served.events(event="streamed"))
    with served.connection(
        f"GET /stream?count={count}", "Connection: close", buffer=4096
    ) as connection:
        got = connection.recv(1000)
        assert len(served.events(event="streamed")) == before  # the response waits for the reader
        with connection.makefile("rb") as rest:
            got += rest.read()
    assert got.count(b"10000\r\n") == count  # one chunk per part
    assert served.wait_for(before + 1, event="streamed")["all"]


def test_slow_reader_that_disconnects_ends_the_stream(served: Served) -> None:
    before = len(served.events(event="streamed"))
    with served.connection("GET /stream?count=400", buffer=4096) as connection:
        connection.recv(1000)
    assert not served.wait_for(before + 1, event="streamed")["all"]


def test_connection_is_kept_for_short_and_long_requests(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
    connection.connect()
    first = connection.sock
    for index in range(10):
        body = os.urandom(index * 1000)
        for method, path, sent in (
            ("POST", "/echo", body),  # ends within the delay of the middleware
            ("GET", f"/work?name={index}", None),  # ends after the delay
            ("POST", "/read-slowly", body),
        ):
            connection.request(method, path, sent)
            answer = connection.getresponse().read().decode()
            assert str(len(body) if sent is not None else index) in answer
    assert connection.sock is first
    connection.close()
