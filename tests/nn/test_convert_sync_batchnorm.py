"""Converting BatchNorm to the synchronized one, and back."""

import asyncio
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiopar

KINDS = [
    (nn.BatchNorm1d, aiopar.SynchronizedBatchNorm1d),
    (nn.BatchNorm2d, aiopar.SynchronizedBatchNorm2d),
    (nn.BatchNorm3d, aiopar.SynchronizedBatchNorm3d),
]


@pytest.mark.parametrize(("plain", "synchronized"), KINDS)
def test_there_and_back(plain: type[nn.Module], synchronized: type[nn.Module]) -> None:
    for module in plain(3), nn.Sequential(nn.ModuleDict({"inner": plain(3)})):
        before = list(module.modules())
        state = {name: value.data_ptr() for name, value in module.state_dict().items()}
        parameters = list(module.parameters())
        assert aiopar.convert_sync_batchnorm(module) is module
        assert type(list(module.modules())[-1]) is synchronized
        assert issubclass(synchronized, plain)
        assert aiopar.convert_sync_batchnorm(module) is module
        assert all(a is b for a, b in zip(before, module.modules(), strict=True))
        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
        assert {name: value.data_ptr() for name, value in module.state_dict().items()} == state
        assert aiopar.revert_sync_batchnorm(module) is module
        assert type(list(module.modules())[-1]) is plain


def test_options_hooks_and_attributes_stay() -> None:
    options: dict[str, Any] = {"eps": 0.1, "momentum": None, "affine": False}
    norm: Any = nn.BatchNorm1d(3, **options, dtype=torch.float64, device="meta").eval()
    seen: list[nn.Module] = []
    norm.register_forward_pre_hook(lambda module, args: seen.append(module))
    norm.note = "mine"
    aiopar.convert_sync_batchnorm(norm)
    assert (norm.eps, norm.momentum, norm.affine, norm.training) == (0.1, None, False, False)
    assert norm.running_mean.dtype == torch.float64
    assert norm.running_mean.is_meta
    assert norm.note == "mine"
    norm(torch.ones(2, 3, dtype=torch.float64, device="meta"))
    assert seen == [norm]


class Subclass(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) * 2


def test_other_layers_stay_unchanged() -> None:
    others = [
        Subclass(3),
        nn.InstanceNorm2d(3),
        nn.SyncBatchNorm(3),
        nn.GroupNorm(1, 3),
        torch.jit.script(nn.BatchNorm2d(3)),
    ]
    kinds = list(map(type, others))
    model = nn.ModuleList(others)
    assert list(map(type, aiopar.convert_sync_batchnorm(model))) == kinds
    assert list(map(type, aiopar.revert_sync_batchnorm(model))) == kinds


def test_a_lazy_layer_is_refused_until_it_has_seen_data() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(ValueError, match=r"module '1.0' is a LazyBatchNorm1d that has not seen"):
        aiopar.convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d
    model(torch.randn(4, 3))
    aiopar.convert_sync_batchnorm(model)
    assert type(model[1][0]) is aiopar.SynchronizedBatchNorm1d  # type: ignore[index]


@pytest.mark.parametrize("convert", [aiopar.convert_sync_batchnorm, aiopar.revert_sync_batchnorm])
def test_something_else_than_a_module(convert: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got list"):
        convert([nn.BatchNorm1d(3)])


def test_a_wrapper_in_use_and_state_dicts_of_both_kinds() -> None:
    x = torch.randn(8, 3, dtype=torch.float64)
    model = nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64))
    dp = aiopar.DataParallel(model, ["cpu", "cpu"])
    whole = copy.deepcopy(model)
    with torch.no_grad():
        first = asyncio.run(dp(x))  # from now on replicas are kept
        aiopar.convert_sync_batchnorm(dp)
        second = asyncio.run(dp(x))
    assert not torch.allclose(first, second, rtol=1e-3)
    torch.testing.assert_close(second, whole(x).detach())
    whole.load_state_dict(model.state_dict())
    model.load_state_dict(whole.state_dict())
    assert repr(aiopar.revert_sync_batchnorm(dp.module)) == repr(whole)
