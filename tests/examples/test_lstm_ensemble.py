"""The LSTM ensemble, small: every way of running it gives the same bits, inside and out."""

import asyncio
import functools

import pytest
import torch

import aiopar
from examples import lstm_ensemble

SMALL = ["--time", "6", "--batch", "3", "--channels", "16", "--models", "2", "--rounds", "2"]


def test_it_prints_seconds_and_ratios_of_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(lstm_ensemble.main(lstm_ensemble.parse(SMALL)))
    printed = capsys.readouterr().out
    assert "T=6 B=3 C=16, 2 models of 2 directions" in printed
    assert "equal, to the last bit" in printed
    ways = ("sequential", "TorchScript fork", "aiopar.fork", "aiopar.fork, scripted models")
    assert all(f"\n{way} " in printed for way in ways)


make_ensembles = functools.cache(lstm_ensemble.make_ensembles)  # TorchScript is slow


@pytest.mark.parametrize(("channels", "workers"), [(5, 1), (5, 2), (64, 4)])
def test_every_way_gives_the_same_bits_on_any_number_of_workers(
    channels: int, workers: int
) -> None:
    ensembles = make_ensembles(3, channels)
    x = torch.randn(7, 4, channels)
    with torch.inference_mode():
        expected = ensembles["sequential"](x)
    assert expected.shape == (7, 4, 2 * channels)

    async def run_all() -> dict[str, torch.Tensor]:
        async with aiopar.DeviceExecutor(["cpu"] * workers) as executor:
            with aiopar.use_executor(executor):
                tasks = [lstm_ensemble.run(ensemble, x) for ensemble in ensembles.values()]
                return dict(zip(ensembles, await asyncio.gather(*tasks), strict=True))

    outputs = asyncio.run(run_all())
    assert [way for way, output in outputs.items() if not torch.equal(output, expected)] == []
    assert all(output.is_inference() for output in outputs.values())


def test_all_ways_share_one_set_of_weights() -> None:
    ensembles = make_ensembles(3, 5)
    storages = [
        {name: weight.data_ptr() for name, weight in ensemble.named_parameters()}
        for ensemble in ensembles.values()
    ]
    assert len(storages[0]) == 3 * 2 * 4  # models, directions, tensors
    assert all(storage == storages[0] for storage in storages)


def test_a_way_that_differs_is_reported() -> None:
    models = (lstm_ensemble.BidirectionalRecurrentLSTM(5) for _ in range(3))
    ensembles = {**make_ensembles(3, 5), "another": lstm_ensemble.LSTMEnsemble(models)}
    with pytest.raises(RuntimeError, match="another: the output is not"):
        asyncio.run(lstm_ensemble.measure(ensembles, torch.randn(3, 2, 5), rounds=1))
