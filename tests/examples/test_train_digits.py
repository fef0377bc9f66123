"""The digits, trained for two epochs: three ways, one curve."""

import re
from pathlib import Path

import pytest
import torch

from examples import train_digits

CPU = torch.device("cpu")


def test_it_trains_three_ways_and_draws_the_curves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "curves.png"
    train_digits.main(["--epochs", "2", "--plot", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for way in ("one_device", "data_parallel", "parallel"):
        pattern = rf"^{way} +[\d.]+ +([\d.]+) +([\d.]+)% +(\S+)$"
        [(loss, accuracy, difference)] = re.findall(pattern, printed, re.MULTILINE)
        assert float(loss) < 1
        assert float(accuracy) > 50
        assert float(difference) < train_digits.TOLERANCE


def test_a_curve_of_its_own_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train_digits, "TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="one_device: a loss differs"):
        train_digits.main(["--epochs", "1", "--plot", str(tmp_path / "curves.png")])


def test_the_digits_are_split_once_and_for_all() -> None:
    train, test = train_digits.read_digits(CPU)
    assert train.images.shape == (1437, 1, 8, 8)
    assert test.images.shape == (360, 1, 8, 8)
    assert train.images.min().item() == 0
    assert train.images.max().item() == 1
    assert set(test.labels.tolist()) == set(range(10))
    again, _ = train_digits.read_digits(CPU)
    assert torch.equal(train.images, again.images)
