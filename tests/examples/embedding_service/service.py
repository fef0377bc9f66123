"""The embedding service in a process of its own, as `make serve` starts it, and its clients."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import IPPROTO_TCP, SO_RCVBUF, SOL_SOCKET, TCP_MAXSEG, socket
from typing import NamedTuple, Self

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]
CORPUS_SIZE = 24
MODEL = "all-MiniLM-L6-v2"
# Seconds for whatever has to happen: long enough for a machine that has other things to do.
PATIENCE = 100.0


def asking(path: str, texts: list[str]) -> dict[str, object]:
    """The body of a request to `path` with the texts."""
    if path == "/v1/embeddings":
        return {"model": MODEL, "input": texts}
    return {"texts": texts} | ({"source": "x"} if path == "/similarity" else {})


def embeddings_of(response: httpx2.Response) -> list[list[float]]:
    """The embeddings in a response of /v1/embeddings or /embed/stream, in order."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/x-ndjson":
        found = [json.loads(line) for line in response.text.splitlines()]
    else:
        found = response.json()["data"]
    assert [each["index"] for each in found] == list(range(len(found)))
    return [each["embedding"] for each in found]


class Counts(NamedTuple):
    """What the batcher of the service says of its items."""

    queued: int
    in_flight: int
    completed: int
    cancelled: int

    @property
    def idle(self) -> bool:
        return not self.queued and not self.in_flight


class Service:
    """Two replicas on the CPU, and a small corpus, on a port of the loopback.

    Args:
        workers: The environment variable WORKERS: where the replicas run.
    """

    def __init__(self, workers: str = "threads") -> None:
        options = f"--port 0 --devices cpu cpu --corpus-size {CORPUS_SIZE} --timeout {PATIENCE}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "examples.embedding_service", *options.split()],
            cwd=ROOT,
            # A Ray of its own: it does not join the cluster of another test.
            env=os.environ | {"WORKERS": workers, "RAY_ADDRESS": "local"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._log: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        try:
            self._listening.wait(PATIENCE)
            running = re.search(r"running on (http://\S+)", self.log)
            assert running is not None, f"it does not start: {self.log}"
            self.url = running[1]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # if it has not ended
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line)
            if "running on" in line:
                self._listening.set()
        self._listening.set()  # it has ended, maybe before it listened

    @property
    def log(self) -> str:
        return "".join(self._log)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Wait until it has ended, as it should."""
        status = self._process.wait(PATIENCE)
        self._reader.join()
        assert status in {0, -signal.SIGTERM}, self.log
        assert "Traceback" not in self.log
        assert "ERROR" not in self.log

    def worker_pids(self) -> set[int]:
        """The processes of its replicas: children of the fork server, or of Ray's raylet."""
        found = set()
        for child in psutil.Process(self._process.pid).children():
            for process in child.children():
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    name = process.name()
                    if name.startswith("ray::HostActor") or not name.startswith("ray::"):
                        found.add(process.pid)
        return found

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE)

    def async_client(self) -> httpx2.AsyncClient:
        """For many requests at a time, on connections of their own.

        uvicorn closes one that was idle for 5 s, maybe just when a client that had no turn for as
        long sends its next request there.
        """
        limits = httpx2.Limits(max_connections=64, max_keepalive_connections=0)
        return httpx2.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=limits)

    def post(self, path: str, body: object) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json=body)

    @contextmanager
    def connection(self, path: str, *headers: str, small: bool = False) -> Iterator[socket]:
        """A connection on which the head of a POST is sent; at the end it is hung up.

        Small: it holds little that the client has not read. Small segments make buffers small.
        """
        url = httpx2.URL(self.url)
        with socket() as connection:
            connection.settimeout(PATIENCE)
            if small:
                connection.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
                connection.setsockopt(IPPROTO_TCP, TCP_MAXSEG, 536)
            connection.connect((url.host, url.port))
            lines = [f"POST {path} HTTP/1.1", f"Host: {url.host}", *headers]
            lines += ["Content-Type: application/json", "", ""]
            connection.sendall("\r\n".join(lines).encode())
            yield connection

    def counts(self) -> Counts:
        with self.client() as client:
            text = client.get("/metrics").text
        read = {
            (sample.name, sample.labels.get("outcome")): int(sample.value)
            for family in text_string_to_metric_families(text)
            if family.name.startswith("aiopar_batcher_")
            for sample in family.samples
        }
        return Counts(
            read["aiopar_batcher_queue_length", None],
            read["aiopar_batcher_in_flight", None],
            read["aiopar_batcher_requests_total", "completed"],
            read["aiopar_batcher_requests_total", "cancelled"],
        )

    def wait_until(self, condition: Callable[[Counts], bool]) -> Counts:
        """Look again and again; what was seen when the condition held."""
        deadline = time.monotonic() + PATIENCE
        while not condition(counts := self.counts()):
            if time.monotonic() > deadline:
                pytest.fail(f"it does not happen: {counts}, {self.log}")
            time.sleep(0.02)
        return counts
