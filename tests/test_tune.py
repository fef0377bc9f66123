"""`python -m aiopar tune`."""

import io
import os
import re
import signal
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aiopar import __main__ as command
from tests import programs

PROGRAM = """
import threading, time, torch, aiopar
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
item = torch.ones(16)
others = {"short": item}
def random_item():
    return torch.rand(16)

batcher = aiopar.Batcher(model, max_batch_size=2, max_pending=1, timeout=1e-9)
pool = aiopar.Batcher(aiopar.ReplicaPool(model, ["cpu"]), max_batch_size=1)

lock = threading.Lock()

def same(batch):
    # One batch at a time, at the same cost for any number of items.
    with lock:
        time.sleep(0.005)
    return batch

class AtMostThree:
    @staticmethod
    def make():
        return aiopar.Batcher(same, max_batch_size=1, cost=lambda item: 1, max_batch_cost=3)

def parts(batch):
    yield batch
stream = aiopar.Batcher(parts)

class Stepper:
    start = step = None.__init__
steps = aiopar.ContinuousBatcher(Stepper())

def fails(batch):
    raise KeyError("my own error")
failing = aiopar.Batcher(fails)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    """A folder with the program, which is called `service`."""
    (tmp_path / "service.py").write_text(PROGRAM)
    (tmp_path / "others.py").write_text("from service import batcher")
    return tmp_path


def _start(folder: Path, *arguments: str) -> programs.Program:
    return programs.start(
        f"os.chdir({str(folder)!r}); sys.path.insert(0, '')\n"
        "import aiopar.__main__ as command\n"
        f"sys.exit(command.main(['tune', *{arguments}]))"
    )


def _rows(text: str) -> list[tuple[int, int, float]]:
    """The settings in the table: size, concurrency, delay."""
    rows = [line.split() for line in text.splitlines() if line[:14].strip().isdecimal()]
    return [(int(row[0]), int(row[1]), float(row[2])) for row in rows]


def test_it_searches_each_option_and_draws_the_curves(folder: Path) -> None:
    code, out, err = _start(folder, "service:batcher", "--p99", "60s", "--seconds", "5ms").end()
    assert code == 0, err
    rows = _rows(out)
    assert rows[0] == (2, 1, 0), "first the batcher's own, which refuse nothing here"
    for option in range(3):
        assert len({row[option] for row in rows}) > 1
    assert len(set(rows)) == len(rows), "nothing is measured twice"
    assert ElementTree.parse(folder / "tune.svg").getroot().tag.endswith("svg")
    assert "point" not in err, "no progress bar into a pipe"


def test_it_advises_the_largest_size_that_batches_have_reached(folder: Path) -> None:
    arguments = ["--p99", "1s", "--seconds", "20ms", "--item", "service:item"]
    code, out, err = _start(folder, "service:AtMostThree.make", *arguments).end()
    assert code == 0, err
    assert {size for size, _, _ in _rows(out)} == {1, 2, 4}, "larger ones would change nothing"
    verdict = out.rpartition("\n\n")[2]
    assert verdict.startswith("Take max_batch_size=3, "), out
    assert "with the present settings" in verdict
    bounds = re.search(r"^For overload: max_wait=(.*), max_pending=(\d+)\.$", verdict, re.MULTILINE)
    assert bounds is not None
    assert 0 < float(bounds[1]) < 1, "the goal, less the time of a batch"
    assert int(bounds[2]) >= 3, "a batch"


@pytest.mark.parametrize("busy", [False, True])
def test_a_goal_that_no_settings_reach_is_an_error(
    *, busy: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6 if busy else 0.0, 0.0, 0.0))
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    options = ["--item", "service:random_item", "--plot", str(folder / "curves.png")]
    goal = ["--p99", "0.000001s", "--seconds", "1ms"]
    assert command.main(["tune", "service:pool", *options, *goal]) == 1
    monkeypatch.delitem(sys.modules, "service")
    out = capsys.readouterr().out
    assert "No settings keep p99 within 0.001 ms" in out
    assert "max_wait" not in out, "no goal, no bounds"
    assert out.splitlines()[-1].startswith("Not reliable: ") is busy
    assert " points" in terminal.getvalue(), "the progress bar"
    warned = "other programs take time from this one" in terminal.getvalue()
    assert warned is busy


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_ctrl_c_ends_it_without_a_traceback(folder: Path) -> None:
    program = _start(folder, "service:batcher", "--p99", "60s", "--seconds", "200ms")
    while not _rows(program.stdout.readline()):
        assert program.runs()
    program.send_signal(signal.SIGINT)
    code, _, err = program.end()
    assert code == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["service", "--p99", "1s"], "expected module:name, got 'service'"),
        (["service:batcher", "--p99", "50"], "expected a duration such as 50ms or 0.2s, got '50'"),
        (["service:batcher", "--p99", "0ms"], "such as 50ms or 0.2s, got '0ms'"),
        (["service:nothing", "--p99", "1s"], "module 'service' has no 'nothing'"),
        (["service:item", "--p99", "1s"], "service:item must be a Batcher or make one, not Tensor"),
        (["service:steps", "--p99", "1s"], "a Batcher or make one, not ContinuousBatcher"),
        (["service:stream", "--p99", "1s"], "'parts' is a generator function"),
        (["service:batcher", "--p99", "1s", "--item", "service:no"], "has no 'no'"),
        (["others:batcher", "--p99", "1s"], "module 'others' has no 'item': name one with --item"),
        (["service:batcher", "--p99", "1s", "--plot", "no/tune.svg"], "no folder 'no'"),
        (["service:batcher", "--p99", "1s", "--plot", "tune.foo"], "cannot draw '.foo'"),
        (["service:batcher", "--p99", "1s", "--plot", "tune"], "cannot draw ''"),
        (["service:failing", "--p99", "1s"], "my own error"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    with pytest.raises((SystemExit, KeyError)) as refused:
        command.main(["tune", *arguments])
    for module in ("service", "others"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert message in f"{refused.value}{capsys.readouterr().err}"
