"""The command line."""

import subprocess

import pytest

from examples.chat_service.__main__ import main
from tests.examples.served_example import ROOT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--port x", "--port: invalid int value: 'x'"),
        ("--max-batch-size 0", "max_batch_size must be at least 1, got 0"),
        ("--timeout 0", "timeout must be above 0, got 0"),
        ("--devices foo", "unknown device 'foo'"),
    ],
)
def test_bad_arguments_are_told(
    options: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: pytest.fail("it serves"))
    with pytest.raises(SystemExit) as ended:
        main(["--port", "0", *options.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_make_chat_takes_host_and_port() -> None:
    finished = subprocess.run(
        ["make", "--dry-run", "chat", "PORT=9000", "HOST=::1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "-m examples.chat_service --host ::1 --port 9000" in finished.stdout
