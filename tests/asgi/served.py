"""A server in a process of its own, and what its clients need."""

import contextlib
import functools
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest

_ROOT = Path(__file__).parents[2]
# For whatever has to happen: long enough for a machine that has other things to do.
PATIENCE = 60.0


class Program:
    """A program that writes lines of JSON, and may write to stderr."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._events: list[dict[str, Any]] = []
        self._over = False
        self._changed = threading.Condition()
        self._log: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_events),
            threading.Thread(target=self._read_log),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # if it has not ended
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        self._log.extend(self._process.stderr)

    def events(self, **details: Any) -> list[dict[str, Any]]:
        """Those up to now that have these details."""
        with self._changed:
            return [event for event in self._events if details.items() <= event.items()]

    def wait_for(self, count: int = 1, **details: Any) -> dict[str, Any]:
        """Wait until so many events have these details; return the last of them."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or len(self.events(**details)) >= count, PATIENCE
            )
            if len(found := self.events(**details)) < count:
                pytest.fail(f"{details} did not happen: {self._events}, {self.log}")
            return found[count - 1]

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """Wait for its end; its exit status, by then all that it wrote is known."""
        try:
            status = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end: {self._events}, {self.log}")
        for reader in self._readers:
            reader.join()
        return status

    @property
    def log(self) -> str:
        """What it has written to stderr; all of it, once it has ended."""
        return "".join(self._log)


class Served(Program):
    """`tests.asgi.program` under uvicorn."""

    def __init__(self, **options: Any) -> None:
        super().__init__("-m", "tests.asgi.program", json.dumps(options))

    @functools.cached_property
    def port(self) -> int:
        port: int = self.wait_for(event="listening")["port"]
        return port

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE)

    def get(self, path: str) -> httpx2.Response:
        with self.client() as client:
            return client.get(path)

    def post(self, path: str) -> httpx2.Response:
        with self.client() as client:
            return client.post(path)

    @contextlib.contextmanager
    def connection(
        self, *lines: str, body: bytes = b"", buffer: int = 0
    ) -> Iterator[socket.socket]:
        """Send a request and leave the rest to the caller; at the end it is hung up."""
        with socket.socket() as connection:
            connection.settimeout(PATIENCE)
            if buffer:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            connection.connect(("127.0.0.1", self.port))
            head = "\r\n".join((f"{lines[0]} HTTP/1.1", "Host: localhost", *lines[1:], "", ""))
            connection.sendall(head.encode() + body)
            yield connection
