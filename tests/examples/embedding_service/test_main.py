"""The command line: what makes no sense is said before anything is started."""

import pytest

from examples.embedding_service.__main__ import main


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
    ],
)
def test_bad_arguments_are_told(
    option: str,
    value: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: pytest.fail("it serves"))
    with pytest.raises(SystemExit) as ended:
        main([option, value])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("python -m examples.embedding_service: error: ")
    assert message in last
