"""`DataParallel` as a module: its state dict, its copies, its modes."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aiopar

from .comparisons import same
from .sample_modules import batch, make

CPUS = ["cpu", "cpu"]


class TestState:
    def test_state_dict_is_that_of_torchs_wrapper(self) -> None:
        module = make("containers")
        ours, theirs = aiopar.DataParallel(module, CPUS), nn.DataParallel(module)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert all(name.startswith("module.") for name in ours.state_dict())
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
        theirs.load_state_dict(ours.state_dict())
        ours.load_state_dict(theirs.state_dict())
        plain = make("containers")
        plain.load_state_dict(
            {name.removeprefix("module."): value for name, value in ours.state_dict().items()}
        )
        with pytest.raises(RuntimeError, match="Missing key"):
            ours.load_state_dict(module.state_dict())

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        "duplicate",
        [
            copy.deepcopy,
            lambda dp: pickle.loads(pickle.dumps(dp)),
            lambda dp: torch.load(_saved(dp), weights_only=False),
        ],
        ids=["deepcopy", "pickle", "torch.save"],
    )
    async def test_copies_of_a_used_one(self, duplicate: Callable[[Any], Any]) -> None:
        dp = aiopar.DataParallel(nn.Linear(6, 3), CPUS)
        with torch.no_grad():
            await dp(batch())
        # In a worker: torch.save opens a zip file.
        again = await aiopar.run_sync(duplicate, dp)
        assert list(again.children()) == [again.module]
        assert again.module is not dp.module
        assert again.device_ids == dp.device_ids
        with torch.no_grad():
            assert same(await again(batch()), dp.module(batch()))
            again.module.weight.zero_()
            assert same(await again(batch()), again.module.bias.expand(8, 3))
            assert same(await dp(batch()), dp.module(batch()))

    def test_modes_reach_the_module(self) -> None:
        dp = aiopar.DataParallel(make("batch-norm"), CPUS)
        assert not dp.eval().module.training
        assert dp.double().module[0].weight.dtype == torch.float64  # type: ignore[index]
        assert not any(
            parameter.requires_grad for parameter in dp.requires_grad_(False).parameters()
        )


def _saved(dp: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(dp, file)
    file.seek(0)
    return file
