"""`python -m aiopar tune`."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aiopar import __main__ as command

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

def eight(batch):
    # One batch at a time. Up to eight items cost as much as one.
    with lock:
        time.sleep(0.002 * max(1, len(batch) / 8))
    return batch

class Eight:
    @staticmethod
    def make():
        return aiopar.Batcher(eight, max_batch_size=1)

def parts(batch):
    yield batch
stream = aiopar.Batcher(parts)

def fails(batch):
    raise KeyError("my own error")
failing = aiopar.Batcher(fails)
"""

Tune = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).resolve().parent.parent
COMMAND = (
    *(sys.executable, "-uc"),
    f"import sys; sys.path[1:1] = [{str(ROOT)!r}]; import aiopar.__main__ as m; sys.exit(m.main())",
    "tune",
)


@pytest.fixture
def tune(tmp_path: Path) -> Tune:
    """Runs the command in a folder with the program, which is called `service`."""
    (tmp_path / "service.py").write_text(PROGRAM)

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    return run


def _rows(text: str) -> list[tuple[int, int, float]]:
    """The settings in the table: size, concurrency, delay."""
    rows = [line.split() for line in text.splitlines() if line[:14].strip().isdecimal()]
    return [(int(row[0]), int(row[1]), float(row[2])) for row in rows]


def test_it_searches_each_option_and_draws_the_curves(tune: Tune, tmp_path: Path) -> None:
    done = tune("service:batcher", "--p99", "60s", "--seconds", "5ms")
    assert done.returncode == 0, done.stderr
    rows = _rows(done.stdout)
    assert rows[0] == (2, 1, 0), "first the batcher's own, which refuse nothing here"
    for option in range(3):
        assert len({row[option] for row in rows}) > 1
    assert len(set(rows)) == len(rows), "nothing is measured twice"
    assert ElementTree.parse(tmp_path / "tune.svg").getroot().tag.endswith("svg")
    assert "point" in done.stderr, "the progress bar"


def test_it_finds_larger_batches_where_they_cost_nothing(tune: Tune) -> None:
    done = tune("service:Eight.make", "--p99", "10s", "--seconds", "10ms", "--item", "service:item")
    assert done.returncode == 0, done.stderr
    verdict = done.stdout.rpartition("\n\n")[2]
    assert verdict.startswith("Take max_batch_size="), done.stdout
    assert int(verdict.removeprefix("Take max_batch_size=").partition(",")[0]) >= 4


def test_a_goal_that_no_settings_reach_is_an_error(tune: Tune) -> None:
    done = tune(
        *("service:pool", "--item", "service:random_item", "--plot", "curves.png"),
        *("--p99", "0.000001s", "--seconds", "1ms"),
    )
    assert done.returncode == 1, done.stderr
    assert "No settings keep p99 within 0.001 ms" in done.stdout


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(PROGRAM)
    with subprocess.Popen(
        [*COMMAND, "service:batcher", "--p99", "60s"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while not _rows(process.stdout.readline()):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["service", "--p99", "1s"], "expected module:name, got 'service'"),
        (["service:batcher", "--p99", "50"], "expected a duration such as 50ms or 0.2s, got '50'"),
        (
            ["service:batcher", "--p99", "0ms"],
            "expected a duration such as 50ms or 0.2s, got '0ms'",
        ),
        (["service:nothing", "--p99", "1s"], "module 'service' has no 'nothing'"),
        (["service:item", "--p99", "1s"], "service:item must be a Batcher or make one, not Tensor"),
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "service.py").write_text(PROGRAM)
    (tmp_path / "others.py").write_text("from service import batcher")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, KeyError)) as refused:
        command.main(["tune", *arguments])
    for module in ("service", "others"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert message in f"{refused.value}{capsys.readouterr().err}"
