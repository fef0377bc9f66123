"""What the benchmarks of servers are made of: load, servers, environments of their own, plots."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.benchmarks import environments, load, tuning
from examples.benchmarks.server import start

ECHO = """
import http.server, sys

class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200 if self.path == "/echo" else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Echo).serve_forever()
"""
COMMAND = (sys.executable, "-c", ECHO)
PROBE = load.post("/echo", b"probe")


@pytest.mark.asyncio
@pytest.mark.may_block("a server's output goes to a file")
async def test_clients_send_every_request_once() -> None:
    bodies = [b"%d" % number for number in range(20)]
    requests = [load.post("/echo", body) for body in bodies]
    async with start(COMMAND, PROBE) as server:
        assert await server.send(requests) == bodies
        assert await server.requests_per_second(requests, clients=3) > 0


@pytest.mark.asyncio
@pytest.mark.may_block("a server's output goes to a file")
async def test_the_program_prints_the_rate_and_the_latency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = tmp_path / "body.json"
    body.write_text("[1, 2]")
    async with start(COMMAND, PROBE) as server:
        options = ["--clients", "2", "--requests", "20"]
        with server.awake():
            await asyncio.to_thread(load.main, [str(server.port), "/echo", str(body), *options])
    assert re.fullmatch(
        r"2 clients: \d+ requests/s, p50 [\d.]+ ms, p99 [\d.]+ ms\n", capsys.readouterr().out
    )


@pytest.mark.asyncio
@pytest.mark.may_block("a server's output goes to a file")
async def test_an_answer_that_is_no_success_is_an_error() -> None:
    async with start(COMMAND, PROBE) as server:
        with pytest.raises(load.UnexpectedAnswer, match="404"):
            await server.requests_per_second([load.post("/elsewhere", b"")] * 4, clients=2)


@pytest.mark.asyncio
@pytest.mark.may_block("a server's output goes to a file")
async def test_a_server_that_does_not_start_says_why() -> None:
    command = (sys.executable, "-c", "raise SystemExit('no such model')")
    with pytest.raises(RuntimeError, match="ended with 1") as raised:
        async with start(command, PROBE):
            pass
    assert "no such model" in raised.value.__notes__[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where environments are made, and their requirements are."""
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(environments, "REQUIREMENTS", tmp_path)
    return tmp_path


def test_an_environment_is_made_once_and_sees_the_packages_of_this_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "peer.txt").write_text("")
    python = environments.environment("peer")
    code = "import sys, importlib.util as util; print(sys.prefix, util.find_spec('torch').origin)"
    prefix, torch = subprocess.check_output([python, "-c", code], text=True).split()
    assert Path(prefix) == folder / "peer"
    assert not Path(torch).is_relative_to(folder)
    asked: list[object] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command))
    assert environments.environment("peer") == python
    assert not asked
    (folder / "peer.txt").write_text("# another")
    environments.environment("peer")
    assert len(asked) == 1


def test_the_plots_for_tuning_are_drawn(tmp_path: Path) -> None:
    points = [tuning.Point(1, 100.0, 0.01, 0.02), tuning.Point(2, 150.0, 0.02, 0.03)]
    curves = [tuning.Curve("at most 1", points), tuning.Curve("at most 8", points)]
    tuning.write_plot(tuning.Curves(curves, curves), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
