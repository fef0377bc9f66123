"""The service of the README under a real uvicorn: what it answers, and what it refuses."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"
PATIENCE = 100.0


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    directory = tmp_path_factory.mktemp("service")
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert program is not None
    (directory / "main.py").write_text(program[1])
    command = [sys.executable, "-m", "uvicorn", "main:app", "--port", "0", "--no-access-log"]
    with subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            log = ""
            for line in process.stderr:
                log += line
                if running := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                    yield int(running[1])
                    break
            else:
                pytest.fail(f"it does not start: {log}")
            process.terminate()
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def _get(port: int, path: str) -> str:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def _post(port: int, body: bytes | Iterator[bytes], **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        headers |= {"content-type": "application/json"}
        connection.request("POST", "/classify", body, headers, encode_chunked=True)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    return response.status, json.loads(text) if text.startswith(("{", "[")) else text


def test_it_answers(port: int) -> None:
    status, scores = _post(port, b"[5.1, 3.5, 1.4, 0.2]")
    assert status == 200
    assert len(scores) == 3
    assert all(isinstance(score, float) for score in scores)


def test_its_metrics_count_the_requests(port: int) -> None:
    def counts() -> dict[str, float]:
        found = re.findall(r"^(aiopar_\w+)\{.*\} (\S+)$", _get(port, "/metrics"), re.MULTILINE)
        totals = dict.fromkeys((name for name, _ in found), 0.0)
        for name, value in found:
            totals[name] += float(value)
        return totals

    before = counts()
    assert _post(port, b"[5.1, 3.5, 1.4, 0.2]")[0] == 200
    after = counts()
    for name in ("aiopar_batcher_requests_total", "aiopar_replica_calls_total"):
        assert after[name] - before[name] == 1


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1e39", '"nan"'])
def test_numbers_that_the_model_cannot_use_are_refused(port: int, number: str) -> None:
    status, answer = _post(port, b"[5.1, 3.5, 1.4, %s]" % number.encode())
    assert status == 422
    assert answer == {"detail": "features must be lengths of 0 to 100 cm"}
    assert _post(port, b"[5.1, 3.5, 1.4, 0.2]")[0] == 200


def test_large_bodies_are_refused_before_they_are_read(port: int) -> None:
    status, _ = _post(port, b"", **{"content-length": "100000000"})  # and the body never comes
    assert status == 413


def test_large_bodies_of_unknown_length_are_refused(port: int) -> None:
    chunks = iter([b"[" + b"1," * 4_000, b"1," * 4_000])
    status, _ = _post(port, chunks, **{"transfer-encoding": "chunked"})
    assert status == 413
