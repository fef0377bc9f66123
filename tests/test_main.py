"""`python -m aiopar`."""

import pytest

import aiopar
from aiopar import __main__ as command


def test_without_a_command_it_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    printed = capsys.readouterr()
    assert not printed.out, "a program that reads the output must not take the help for it"
    for name in ("doctor", "tune", "--version"):
        assert name in printed.err


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--version"])
    assert capsys.readouterr().out == f"aiopar {aiopar.__version__}\n"


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["docter"])
    assert "invalid choice: 'docter'" in capsys.readouterr().err
