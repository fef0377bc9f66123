"""Cheap HTTP clients: requests are made beforehand, and only the length of answers is parsed.

As a program it sends one body again and again to a service on this machine, and prints the rate and
the latency: `python load.py 8000 /predict body.json --clients 32`. It needs nothing but Python.
"""

import argparse
import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import quantiles

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
HEAD_ENDS = b"\r\n\r\n"


def post(path: str, body: bytes, content_type: str = "application/octet-stream") -> bytes:
    """The bytes of a POST request on a connection that stays open."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def requests_per_second(port: int, requests: Sequence[bytes], clients: int) -> float:
    """The rate at which closed-loop clients, one connection each, get all requests answered."""
    rate, _ = await measure(port, requests, clients)
    return rate


async def measure(
    port: int, requests: Sequence[bytes], clients: int
) -> tuple[float, Sequence[float]]:
    """The same rate, and the seconds that each request took."""
    load = _Load(requests)
    loop = asyncio.get_running_loop()
    connections = [
        await loop.create_connection(lambda: _Client(load), "127.0.0.1", port)
        for _ in range(clients)
    ]
    began = time.perf_counter()
    try:
        for _, client in connections:
            client.send_next()
        await load.done
        return len(requests) / (time.perf_counter() - began), load.seconds
    finally:
        for transport, _ in connections:
            transport.abort()


async def send(port: int, requests: Sequence[bytes]) -> list[bytes]:
    """Send requests one after the other, and return the bodies of the answers."""
    load = _Load(requests)
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(lambda: _Client(load), "127.0.0.1", port)
    try:
        client.send_next()
        await load.done
        return load.bodies
    finally:
        transport.abort()


class UnexpectedAnswer(Exception):
    """A status other than 200, or an answer without a length."""


class _Load:
    """The requests that the clients send, and the bodies that they have received."""

    def __init__(self, requests: Sequence[bytes]) -> None:
        self.waiting: Iterator[bytes] = iter(requests)
        self.expected = len(requests)
        self.bodies: list[bytes] = []
        self.seconds: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answered(self, body: bytes, seconds: float) -> None:
        self.bodies.append(body)
        self.seconds.append(seconds)
        if len(self.bodies) == self.expected and not self.done.done():
            self.done.set_result(None)

    def failed(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Client(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._received = b""
        self._waits = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send_next(self) -> None:
        request = next(self._load.waiting, None)
        self._waits = request is not None
        if request is not None:
            self._sent = time.perf_counter()
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(HEAD_ENDS)
        if not found:
            return
        length = LENGTH.search(head + b"\r\n")
        if not head.startswith(b"HTTP/1.1 200 ") or length is None:
            self._load.failed(UnexpectedAnswer(repr(self._received)))
        elif len(body) >= int(length[1]):
            self._received = b""
            self._load.answered(body, time.perf_counter() - self._sent)
            self.send_next()

    def connection_lost(self, error: Exception | None) -> None:
        if self._waits:  # otherwise all requests are answered
            self._load.failed(error or ConnectionError("the server closed the connection"))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a service, after as many requests to warm up."""
    parser = argparse.ArgumentParser(description="Load a service on this machine.")
    parser.add_argument("port", type=int)
    parser.add_argument("path")
    parser.add_argument("body", type=Path, help="a file with the body of the requests")
    parser.add_argument("--content-type", default="application/json")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2_000)
    given = parser.parse_args(argv)
    request = post(given.path, given.body.read_bytes(), given.content_type)
    for _ in range(2):
        run = measure(given.port, [request] * given.requests, given.clients)
        rate, seconds = asyncio.run(run)
    p50, p99 = (1e3 * quantiles(seconds, n=100)[percent - 1] for percent in (50, 99))
    print(f"{given.clients} clients: {rate:.0f} requests/s, p50 {p50:.3g} ms, p99 {p99:.3g} ms")


if __name__ == "__main__":
    main()
