"""The embedding service in a process of its own, as `make serve` starts it, and its clients."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socket import IPPROTO_TCP, SO_RCVBUF, SOL_SOCKET, TCP_MAXSEG, socket
from typing import NamedTuple

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.examples.served_example import PATIENCE, ServedExample

CORPUS_SIZE = 24
MODEL = "all-MiniLM-L6-v2"


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
    answered: int
    cancelled: int

    @property
    def idle(self) -> bool:
        return not self.queued and not self.in_flight


class Service(ServedExample):
    """Two replicas on the CPU, and a small corpus, on a port of the loopback.

    Args:
        workers: The environment variable WORKERS: where the replicas run.
    """

    def __init__(self, workers: str = "threads") -> None:
        options = f"--devices cpu cpu --corpus-size {CORPUS_SIZE} --timeout {PATIENCE}"
        # A Ray of its own: it does not join the cluster of another test.
        super().__init__("embedding_service", options, WORKERS=workers, RAY_ADDRESS="local")

    def worker_pids(self) -> set[int]:
        """The processes of its replicas: children of the fork server, or of Ray's raylet."""
        found = set()
        for child in psutil.Process(self.pid).children():
            for process in child.children():
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    name = process.name()
                    if name.startswith("ray::HostActor") or not name.startswith("ray::"):
                        found.add(process.pid)
        return found

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
            read["aiopar_batcher_requests_total", "answered"],
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
