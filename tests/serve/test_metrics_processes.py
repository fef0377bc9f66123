"""`PrometheusMetrics` in several processes, through prometheus-client's multiprocess mode."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from aiopar.serve import PrometheusMetrics
from aiopar.serve._prometheus import exposition

from ..programs import run

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0

APPLICATION = """
import os
import torch
from fastapi import FastAPI
import aiopar
from aiopar.fastapi import install, lifespan
from aiopar.serve import PrometheusMetrics

pool = aiopar.ReplicaPool(torch.nn.Linear(4, 2), ["cpu"], name="tiny")
batcher = aiopar.Batcher(pool)
metrics = PrometheusMetrics(batcher, pool)
app = FastAPI(lifespan=lifespan(batcher, pool))
install(app, dashboard="/aiopar")

@app.get("/run")
async def run() -> int:
    await batcher(torch.ones(4))
    return os.getpid()
"""


class Served:
    """The application under `uvicorn --workers 2`."""

    def __init__(self, folder: Path) -> None:
        (folder / "application.py").write_text(APPLICATION)
        self.shared = folder / "shared"
        self.shared.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "uvicorn", "application:app", "--workers", "2"),
                *("--port", str(self.port), "--log-level", "warning"),
            ],
            cwd=folder,
            env={
                **os.environ,
                "PROMETHEUS_MULTIPROC_DIR": str(self.shared),
                "PYTHONPATH": str(ROOT),
            },
        )

    def get(self, path: str) -> Any:
        """A response on a connection of its own, from whichever worker takes it."""
        return httpx2.get(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition()`; while it raises an error of the connection, it is false."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except httpx2.TransportError:
                pass
            time.sleep(0.05)
        pytest.fail(f"it did not happen: {self.scrape()}")

    def scrape(self, query: str = "") -> dict[str, dict[frozenset[tuple[str, str]], float]]:
        """The values of each metric by labels."""
        found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        for family in text_string_to_metric_families(self.get(f"/metrics{query}").text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
        return found

    def live(self) -> dict[str, Any]:
        """What the live page gets: a process, and the requests of all processes."""
        events = httpx2.stream(
            "GET", f"http://127.0.0.1:{self.port}/aiopar/events", timeout=PATIENCE
        )
        with events as response:
            data = [
                line[6:]
                for line in itertools.islice(response.iter_lines(), 6)
                if line[:6] == "data: "
            ]
        shown: dict[str, Any] = json.loads(data[0])[-1]
        return shown | {"all": json.loads(data[1])}


def _registry(folder: Path) -> CollectorRegistry:
    """The metrics of all processes, as without aiopar."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return registry


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    try:
        yield served
    finally:
        served.process.terminate()
        try:
            served.process.wait(PATIENCE)
        finally:
            served.process.kill()


def test_one_scrape_has_the_metrics_of_all_workers(served: Served) -> None:
    pids: list[int] = []

    def both_answered() -> bool:
        pids.append(served.get("/run").json())
        return len(set(pids)) == 2

    served.until(both_answered)
    answered = frozenset({("batcher", "tiny"), ("outcome", "answered")})
    requests = "aiopar_batcher_requests_total"
    served.until(lambda: served.scrape()[requests][answered] == len(pids))

    def workers() -> set[str]:
        return {dict(labels)["pid"] for labels in served.scrape()["aiopar_worker_busy_ratio"]}

    def ready() -> float:
        states = served.scrape()["aiopar_replica_state"]
        return sum(value for labels, value in states.items() if ("state", "ready") in labels)

    served.until(lambda: workers() == set(map(str, pids)) and ready() == 2)
    found = served.scrape()
    batcher = frozenset({("batcher", "tiny")})
    sizes = found["aiopar_batcher_batch_size_bucket"]
    assert sizes[batcher | {("le", "1.0")}] == len(pids), "requests came one by one"
    assert sizes[batcher | {("le", "+Inf")}] == len(pids)
    assert found["aiopar_batcher_batch_size_count"][batcher] == len(pids)
    assert found["aiopar_batcher_batch_size_sum"][batcher] == len(pids)
    assert found["aiopar_batcher_request_seconds_count"][batcher] == len(pids)
    assert found["aiopar_batcher_queue_length"][batcher] == 0
    assert set(served.scrape(f"?name[]={requests}")) == {requests}

    shown = served.live()
    assert shown["pid"] in pids
    assert shown["parent"] == served.process.pid
    outcomes = {"answered": len(pids), "failed": 0, "refused": 0, "expired": 0, "cancelled": 0}
    assert shown["all"] == {"at": shown["all"]["at"], "processes": 2, **outcomes}

    # A new worker takes the place of a dead one. Counts stay, gauges of the dead worker go.
    os.kill(pids[0], signal.SIGKILL)
    served.until(lambda: str(pids[0]) not in workers() and len(workers()) == 2 and ready() == 2)
    assert served.scrape()[requests][answered] == len(pids)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.parametrize("requests", [0, 2])
def test_a_forked_process_writes_its_own_counts_without_those_of_its_parent(
    tmp_path: Path, requests: int
) -> None:
    """As a worker of a `DataLoader`, which has no requests, or of `gunicorn --preload`."""
    code, out, err = run(
        f"""
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = {str(tmp_path)!r}
        batcher = aiopar.Batcher(torch.neg, name="neg")
        metrics = aiopar.serve.PrometheusMetrics(batcher)
        async def use(count):
            async with batcher:
                for _ in range(count):
                    await batcher(torch.ones(2))
        asyncio.run(use(3))
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            metrics.close()
        elif {requests}:
            asyncio.run(use({requests}))  # the last values are written at the end of the process
        print(os.getpid())
        """
    )
    assert (code, err) == (0, "")
    child, parent = out.split()
    writers = {file.stem.rpartition("_")[2] for file in tmp_path.iterdir()}
    assert writers == ({child, parent} if requests else {parent})
    registry = _registry(tmp_path)
    labels = {"batcher": "neg"}
    for name in ("batch_size_count", "compute_seconds_count", "request_seconds_count"):
        assert registry.get_sample_value(f"aiopar_batcher_{name}", labels) == 3 + requests
    labels["outcome"] = "answered"
    assert registry.get_sample_value("aiopar_batcher_requests_total", labels) == 3 + requests


def test_close_writes_the_last_values_and_gauges_of_a_removed_resource_are_0(
    tmp_path: Path,
) -> None:
    code, out, err = run(
        f"""
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = {str(tmp_path)!r}
        pool = aiopar.ReplicaPool(torch.nn.Linear(1, 1), ["cpu"], name="old")
        async def main():
            async with pool:
                executor = aiopar.DeviceExecutor(["cpu"], thread_name_prefix="mine")
                metrics = aiopar.serve.PrometheusMetrics(pool, executor)
                await pool(torch.ones(1))
                await executor.submit(time.sleep, 0.01)
                metrics.remove(pool)
                metrics.close()
                os._exit(0)
        asyncio.run(main())
        """
    )
    assert (code, err) == (0, ""), out
    registry = _registry(tmp_path)
    labels = {"pool": "old", "replica": "0", "device": "cpu"}
    for name, value in (("state", 0.0), ("calls_total", 1.0)):
        more = {"state": "ready"} if name == "state" else {"outcome": "completed"}
        assert registry.get_sample_value(f"aiopar_replica_{name}", labels | more) == value
    labels = {"executor": "mine", "worker": "0", "device": "cpu"}
    busy = registry.get_sample_value("aiopar_worker_busy_seconds_total", labels)
    assert busy is not None
    assert busy >= 0.01


def test_a_missing_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="PROMETHEUS_MULTIPROC_DIR must name a folder, got"):
        PrometheusMetrics()


def test_a_file_that_a_new_process_has_just_made_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for kind in ("counter", "gauge_livesum"):
        (tmp_path / f"{kind}_{os.getpid()}.db").touch()
    assert exposition(CollectorRegistry(), "", [])[0] == b""
