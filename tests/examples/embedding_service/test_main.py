"""The command line: what makes no sense is said before anything is started."""

import os
import re
import socket
import subprocess
import sys

import pytest

from examples.embedding_service.__main__ import main
from tests.examples.served_example import ROOT


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--port", "70000", "--port: must be 0 to 65535, got 70000"),
        ("--port", "-1", "--port: must be 0 to 65535, got -1"),
        ("--corpus-size", "0", "corpus_size must be at least 1, got 0"),
        ("--corpus-size", "-1", "corpus_size must be at least 1, got -1"),
        ("--timeout", "0", "timeout must be above 0, got 0"),
        ("--timeout", "nan", "timeout must be above 0, got nan"),
        ("--devices", "foo", "unknown device 'foo'"),
        ("--workers", "fibers", "--workers: invalid choice: 'fibers'"),
    ],
)
def test_bad_arguments_are_told(
    option: str,
    value: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert message in refused([option, value], capsys, monkeypatch)


def refused(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """The message of the command line, which starts nothing."""
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: pytest.fail("it serves"))
    with pytest.raises(SystemExit) as ended:
        main(["--port", "0", *options])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("python -m examples.embedding_service: error: ")
    return last


def test_bad_workers_of_the_environment_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "fibers")
    message = "WORKERS must be threads, processes or ray, got 'fibers'"
    assert message in refused([], capsys, monkeypatch)


@pytest.mark.ray
@pytest.mark.parametrize("devices", [["cpu", "cuda"], ["foo"]])
def test_devices_of_actors_are_of_one_kind(
    devices: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"with ray, devices must be all cpu or all cuda, got {devices}"
    options = ["--workers", "ray", "--devices", *devices]
    assert message in refused(options, capsys, monkeypatch)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_port_is_reported_before_the_model_is_loaded(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port = str(taken.getsockname()[1])
        finished = subprocess.run(
            [
                sys.executable,
                *("-X", "importtime", "-m", "examples.embedding_service"),
                *("--host", host, "--port", port),
            ],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert finished.returncode == 2
    assert f"error: cannot listen on {host} port {port} (" in finished.stderr
    assert "try another --port" in finished.stderr
    assert not re.search(r"\| +torch\n", finished.stderr), "the model would be loaded next"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), "--host 127.0.0.1 --port 8000"),
        (("PORT=9000", "HOST=::1"), "--host ::1 --port 9000"),
    ],
)
def test_make_serve_takes_host_and_port(arguments: tuple[str, ...], options: str) -> None:
    finished = subprocess.run(
        ["make", "--dry-run", "serve", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        # conda sets a HOST.
        env={name: os.environ[name] for name in os.environ if name != "PORT"} | {"HOST": "x86_64"},
    )
    assert f"-m examples.embedding_service {options}" in finished.stdout
