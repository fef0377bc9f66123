"""Programs in processes of their own, and the clients of a server."""

import contextlib
import functools
import json
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import httpx2
import pytest

from tests import programs

from . import program

PATIENCE = 60.0
"""Seconds to wait for anything: enough for a busy machine."""


class Program:
    """A function of `tests.asgi.program` in a process of its own.

    It writes lines of JSON to stdout, and may write anything to stderr.
    """

    def __init__(self, fn: Callable[..., object], *args: Any) -> None:
        self._events: list[dict[str, Any]] = []
        self._log: list[str] = []
        self._over = False
        self._changed = threading.Condition()
        call = pickle.dumps(functools.partial(fn, *args))
        self._program = programs.start(f"import pickle; pickle.loads({call!r})()", head="")
        self._readers = [
            threading.Thread(target=self._read_events),
            threading.Thread(target=self._log.extend, args=(self._program.stderr,)),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.send_signal(signal.SIGKILL)  # unless it has ended
        for reader in self._readers:
            reader.join()
        if not self._program.stdout.closed:
            self._program.end()

    def _read_events(self) -> None:
        for line in self._program.stdout:
            with self._changed:
                self._events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def events(self, **details: Any) -> list[dict[str, Any]]:
        """The events so far that have these details."""
        with self._changed:
            return [event for event in self._events if details.items() <= event.items()]

    def wait_for(self, count: int = 1, **details: Any) -> dict[str, Any]:
        """Wait until `count` events have these details; return the last of them."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or len(self.events(**details)) >= count, PATIENCE
            )
            if len(found := self.events(**details)) < count:
                pytest.fail(f"{details} did not happen: {self._events}, {self.log}")
            return found[count - 1]

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._program.send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self._program.send_signal(signal.SIGINT)

    def ended(self) -> int:
        """Wait for the end of the process; return its exit code. All its output is known then."""
        for reader in self._readers:
            reader.join(PATIENCE)
        if any(reader.is_alive() for reader in self._readers):
            pytest.fail(f"the process does not end: {self._events}, {self.log}")
        return self._program.end()[0]

    @property
    def log(self) -> str:
        """The output to stderr; complete when the process has ended."""
        return "".join(self._log)


class Served(Program):
    """An application of `tests.asgi.program` under uvicorn."""

    def __init__(
        self, serve: Callable[[program.Options], None] = program.serve, **options: Any
    ) -> None:
        super().__init__(serve, program.Options(**options))

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
        """Send a request and yield its socket, which is closed at the end."""
        with socket.socket() as connection:
            connection.settimeout(PATIENCE)
            if buffer:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            connection.connect(("127.0.0.1", self.port))
            head = "\r\n".join((f"{lines[0]} HTTP/1.1", "Host: localhost", *lines[1:], "", ""))
            connection.sendall(head.encode() + body)
            yield connection
