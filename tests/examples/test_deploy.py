"""examples/deploy/: each file by a checker of its kind; its commands and nginx as they run."""

import inspect
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_connection, create_server
from subprocess import PIPE, STDOUT
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml

from aiopar.asgi import lifespan
from examples.embedding_service.answers import MAX_BODY

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
BIN = Path(sys.executable).parent  # where pip puts the commands of packages
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/bin:/opt/homebrew/bin")
PATIENCE = 100.0
JSON = {"Content-Type": "application/json"}


def _check(*command: str | Path) -> str:
    """Run a checker, which must succeed, and return what it says."""
    done = subprocess.run(command, check=False, text=True, stdout=PIPE, stderr=STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("hadolint", "Dockerfile"),
        ("check-jsonschema --builtin-schema vendor.compose-spec", "compose.yaml"),
        ("kubernetes-validate --strict", "kubernetes.yaml"),
        (
            "check-jsonschema --builtin-schema vendor.github-workflows",
            "../../.github/workflows/ci.yml",
        ),
    ],
)
def test_its_checker_accepts_each_file(command: str, file: str) -> None:
    name, *options = command.split()
    _check(BIN / name, *options, DEPLOY / file)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    # It looks for the interpreter, so the unit must name one that is here.
    unit = tmp_path / "embedding.service"
    text = (DEPLOY / unit.name).read_text()
    unit.write_text(text.replace("/opt/aiopar/.venv/bin/python", sys.executable))
    assert _check("systemd-analyze", "verify", "--man=no", unit) == ""


def _kubernetes() -> Any:
    return next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))["spec"]["template"]


def test_every_platform_waits_until_the_service_is_drained() -> None:
    # After `shutdown_timeout` it may take two seconds until the process ends: see `lifespan`.
    drain = inspect.signature(lifespan).parameters["shutdown_timeout"].default + 2
    pod = _kubernetes()["spec"]
    before = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before + drain
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["embedding"]
    assert int(compose["stop_grace_period"].removesuffix("s")) > drain
    text = (DEPLOY / "embedding.service").read_text()
    unit = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert unit is not None
    assert int(unit[1]) > drain


def _free_port() -> int:
    with create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _status(url: str, body: bytes | None = None) -> int:
    try:
        with urlopen(Request(url, body, JSON), timeout=PATIENCE) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


@pytest.mark.timeout(PATIENCE * 2)
def test_the_container_starts_is_healthy_and_ends_after_sigterm() -> None:
    port = str(_free_port())
    # The Dockerfile has two: that of the health check and its own.
    found = re.findall(r"^ *CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    health, start = (
        [sys.executable, *json.loads(command.replace("8000", port))[1:]] for command in found
    )

    def healthy() -> bool:
        return subprocess.run(health, check=False, stderr=subprocess.DEVNULL).returncode == 0

    assert not healthy()
    with subprocess.Popen([*start, "--corpus-size", "24"], cwd=ROOT) as service:
        try:
            _wait_until(healthy, service)
            container = _kubernetes()["spec"]["containers"][0]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                path = container[probe]["httpGet"]["path"]
                assert _status(f"http://127.0.0.1:{port}{path}") == 200
            guide = (ROOT / "docs" / "guides" / "deployment.md").read_text()
            ask = re.search(r"^curl localhost:8000(\S+) .*\s+-d '(.*)'$", guide, re.MULTILINE)
            assert ask is not None
            assert _status(f"http://127.0.0.1:{port}{ask[1]}", ask[2].encode()) == 200
        finally:
            service.terminate()
        assert service.wait(PATIENCE) in {0, -15}
    assert not healthy()


class _Handler(BaseHTTPRequestHandler):
    """In place of the service: a stream of events whose second event waits for the client."""

    protocol_version = "HTTP/1.1"
    first_seen: threading.Event

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"data: 1\n\n")
        self.first_seen.wait(PATIENCE)
        self.wfile.write(b"data: 2\n\n")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[str]:
    """The URL of nginx before a `_Handler`."""
    if NGINX is None:
        pytest.skip("there is no nginx")
    _Handler.first_seen = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as service:
        serving = threading.Thread(target=service.serve_forever)
        serving.start()
        port = _free_port()
        server = (DEPLOY / "nginx.conf").read_text()
        server = server.replace("listen 80;", f"listen 127.0.0.1:{port};")
        server = server.replace("127.0.0.1:8000", f"127.0.0.1:{service.server_port}")
        config = tmp_path / "nginx.conf"
        config.write_text(
            f"daemon off; master_process off; pid {tmp_path}/pid; events {{}}\n"
            f"http {{ access_log off; client_body_temp_path {tmp_path}/bodies; {server} }}\n"
        )
        command = [NGINX, "-e", "stderr", "-p", str(tmp_path), "-c", str(config)]
        with subprocess.Popen(command) as process:

            def listens() -> bool:
                try:
                    create_connection(("127.0.0.1", port)).close()
                except ConnectionRefusedError:
                    return False
                return True

            try:
                _wait_until(listens, process)
                yield f"http://127.0.0.1:{port}"
            finally:
                _Handler.first_seen.set()
                process.terminate()
                service.shutdown()
        serving.join()


def test_nginx_passes_on_events_at_once(nginx: str) -> None:
    with urlopen(f"{nginx}/events", timeout=PATIENCE) as stream:
        assert stream.readline() == b"data: 1\n"
        _Handler.first_seen.set()
        assert stream.read() == b"\ndata: 2\n\n"


def test_nginx_leaves_large_bodies_to_the_service_and_hides_what_is_for_operators(
    nginx: str,
) -> None:
    assert _status(f"{nginx}/v1/embeddings", bytes(MAX_BODY)) == 204
    assert _status(f"{nginx}/v1/embeddings", bytes(2 * MAX_BODY)) == 413
    hidden = ("/metrics", "/healthz", "/readyz", "/aiopar", "/aiopar/events")
    assert [_status(f"{nginx}{path}") for path in hidden] == [404] * len(hidden)
