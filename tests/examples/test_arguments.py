"""The examples say what makes no sense before they start anything."""

from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("name", "option", "value", "expected"),
    [
        pytest.param("cluster", "--texts", "95", "at least 96", marks=pytest.mark.ray),
        ("embed_corpus", "--files", "0", "at least 1"),
        ("gil", "--texts", "0", "at least 64"),
        ("gil", "--rounds", "0", "at least 1"),
        ("lstm_ensemble", "--time", "0", "at least 1"),
        ("lstm_ensemble", "--rounds", "0", "at least 1"),
        ("quickstart", "--limit", "0", "at least 1"),
        ("routing_simulation", "--replicas", "8", "at least 9"),
        ("routing_simulation", "--front-ends", "126", "1 to 125"),
        ("routing_simulation", "--load", "1.0", "more than 0 and less than 1"),
        ("routing_simulation", "--detection", "-1.0", "at least 0"),
        ("train_digits", "--epochs", "0", "at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(
    name: str, option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = import_module(f"examples.{name}")
    start = example.parse if name == "lstm_ensemble" else example.main
    with pytest.raises(SystemExit):
        start([option, value])
    assert f"argument {option}: expected {expected}, got {value}" in capsys.readouterr().err
