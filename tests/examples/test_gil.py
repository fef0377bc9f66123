"""Threads against processes, small: every way gives the same scores, and is measured and drawn."""

import re
from pathlib import Path

import pytest
import torch

from examples import gil


def test_it_prints_a_table_with_ratios_and_draws_a_plot(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "gil.svg"
    gil.main(["--texts", "64", "--rounds", "1", "--plot", str(picture)])
    assert "<svg" in picture.read_text()
    printed = capsys.readouterr().out
    for way in ("one thread", "two threads", "two processes", "two plain processes"):
        assert re.search(rf"^{way}( +[\d.]+){{4}}$", printed, re.MULTILINE)
    for what, bound in (
        ("p99 of the lag, processes / threads", "at most 0.4"),
        ("texts/s, processes / plain processes", "at least 0.8"),
    ):
        assert re.search(rf"^{what} +[\d.]+   {bound}$", printed, re.MULTILINE)


def test_the_tokenizer_merges_the_most_frequent_pairs_first() -> None:
    tokenizer = gil.Tokenizer(["low lower lowest slow"], merges=2)
    ids = tokenizer(["low slow", "x"])
    assert ids.shape == (2, 3)
    (low, s, also_low), other = ids.tolist()
    assert low == also_low != s
    assert other == [1, 0, 0]  # unknown, padding
    assert ids.max() < tokenizer.size


def test_the_model_ignores_padding() -> None:
    tokenizer = gil.Tokenizer(gil.read_manual(8))
    model = gil.make_model(tokenizer)
    alone = gil.classify(tokenizer, model, [["for"], ["a longer text"]])
    torch.testing.assert_close(alone, gil.classify(tokenizer, model, [["for", "a longer text"]]))
