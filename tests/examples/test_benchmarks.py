"""The benchmarks, as small as can be: every row is measured and reported. No time is judged."""

import asyncio
import json
import math
import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.benchmarks import by_hand, report, run
from examples.benchmarks.harness import QUICK, NotMeasured, Result, Rivals, Row, compare

RESULT = Result("ours", "theirs", 1.0, 2.0, "us", 0.5, 0.4, 0.6, "", 0.55, 15)


def measure(row: str) -> Sequence[Row]:
    return asyncio.run(run.ROWS[row](QUICK))


@pytest.mark.slow  # 5 to 30 seconds each; a quick row is measured below
@pytest.mark.parametrize("row", run.ROWS)
def test_every_row_is_measured(row: str) -> None:
    # In a process of its own: torchdata sets torch's number of threads for the process it runs in.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        results = process.submit(measure, row).result()
    assert results
    for result in results:
        assert isinstance(result, Result)
        numbers = (result.ours, result.theirs, result.value, result.low, result.high)
        assert all(math.isfinite(number) for number in numbers)
        assert result.low <= result.high
        assert result.samples > 0


def test_rivals_take_turns_and_ratios_are_of_pairs() -> None:
    order = []
    ours, theirs = iter([9.0, 1.0, 2.0, 3.0]), iter([9.0, 2.0, 2.0, 2.0])

    async def sample_ours() -> float:
        order.append("A")
        return next(ours)

    async def sample_theirs() -> float:
        order.append("B")
        return next(theirs)

    rivals = Rivals("A", sample_ours, "B", sample_theirs, bound=1.0, unit="s")
    result = asyncio.run(compare(rivals, 3))
    assert "".join(order) == "AB" + "BAABBA"
    assert (result.value, result.low, result.high) == (1.0, 0.75, 1.25)
    assert (result.ours, result.theirs, result.samples) == (2.0, 2.0, 3)


def test_the_table_lines_up_and_says_what_is_missed_or_not_measured() -> None:
    missed = replace(RESULT, what="a longer name", bound=0.1)
    least = replace(RESULT, bound=0.4, at_least=True)
    absent = NotMeasured("ours", "theirs", "it is not there")
    head, *lines = report.as_text([RESULT, missed, least, absent]).splitlines()
    column = len("a longer name  ")
    assert head[column:].startswith("against")
    assert all(line[column:].startswith("theirs") for line in lines)
    ends = ["holds", "MISSED", "at least 0.40  holds", "not measured: it is not there"]
    assert all(line.endswith(end) for line, end in zip(lines, ends, strict=True))


def test_all_is_written(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("# Title\n<!-- begin table -->\nstale\n<!-- end table -->\nrest\n")
    lag = replace(RESULT, value_unit="ms", unit="ms", bound=5.0)
    absent = NotMeasured("ours", "a peer", "it is not there")
    rate = replace(RESULT, bound=0.4, at_least=True)
    run.write_all([RESULT, replace(RESULT, bound=None), lag, rate, absent], tmp_path)
    written = json.loads((tmp_path / "benchmarks.json").read_text())
    assert set(written) == {"machine", "rows"}
    assert written["machine"]["torch"] == torch.__version__
    assert [row["bound"] for row in written["rows"][:-1]] == [0.55, None, 5.0, 0.4]
    assert written["rows"][-1] == asdict(absent)
    assert set(written["rows"][0]) == {*Result.__dataclass_fields__, "holds"}
    plot = (tmp_path / "benchmarks.svg").read_text()
    assert ">against theirs</" in plot
    # Every colour is a name, which has one value for light pages and one for dark ones.
    drawn, style = re.subn("<style.*?</style>", "", plot, flags=re.DOTALL)
    assert style == 1
    assert "prefers-color-scheme:dark" in plot
    assert "var(--" in drawn
    assert not re.search("#[0-9a-f]{6}", drawn)
    text = page.read_text()
    assert text.startswith("# Title\n<!-- begin table -->\n| what | against |")
    assert text.endswith("<!-- end table -->\nrest\n")
    assert "stale" not in text
    assert "| at most 0.55 | holds |" in text


def test_rows_that_are_measured_again_replace_the_old_ones() -> None:
    first, again = replace(RESULT, what="first"), replace(RESULT, what="first", value=0.3)
    absent = NotMeasured("ours", "a peer", "it is not there")
    assert report.updated([first, absent], [RESULT, again]) == [again, absent, RESULT]


def test_rows_are_read_as_they_were_written_if_they_are_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Row] = [RESULT, NotMeasured("ours", "a peer", "it is not there")]
    path = tmp_path / "rows.json"
    assert report.read_json(path) == []
    report.write_json(rows, path)
    assert report.read_json(path) == rows
    monkeypatch.setattr(report, "machine", lambda: {"cores": 64})
    assert report.read_json(path) == []


def test_some_rows_are_measured_and_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run.main(["--only", "four modules", "--quick", "--folder", str(tmp_path)])
    _, row = capsys.readouterr().out.splitlines()
    assert row.startswith("parallel_apply")
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        run.main(["--only", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_the_rivals_by_hand_compute_what_torch_does() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2))
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(by_hand.data_parallel_by_hand(network, x, 2), network(x))
    first, second = by_hand.replicate_by_copies(network, 2)
    assert first is not second
    assert type(first) is nn.Sequential
    with pytest.raises(RuntimeError, match="mat1"):
        by_hand.parallel_apply_by_threads([network] * 2, [torch.zeros(1, 3)] * 2)
