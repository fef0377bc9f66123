"""Moments of chunks, and of all of them together."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from aiopar.nn._sync_batchnorm import Moments, joined, moments, normalize

CPU = torch.device("cpu")
SHAPE = (6, 2, 3)  # (batch, channels, length)


def values(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_of(*chunks: Tensor) -> Moments:
    whole = joined([moments(chunk) for chunk in chunks], CPU)
    assert whole is not None
    return whole


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
def test_joined_they_are_those_of_the_whole(sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    x = torch.randn(sum(sizes), *SHAPE[1:], generator=generator, dtype=torch.float64) * 3 - 40
    size, mean, var = whole_of(*torch.split(x, sizes))
    assert size == x.numel() // 2
    torch.testing.assert_close(mean, x.mean((0, 2)), rtol=1e-12, atol=0)
    torch.testing.assert_close(var, x.var((0, 2), correction=0), rtol=1e-10, atol=1e-20)


def test_of_nothing_there_are_none() -> None:
    assert moments(values()[:0]) is None
    assert joined([None, None], CPU) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_in_float32_at_least(dtype: torch.dtype) -> None:
    x = (values() + 100).to(dtype)
    _, mean, var = whole_of(x)
    assert mean.dtype == var.dtype == torch.float32
    torch.testing.assert_close(var, x.float().var((0, 2), correction=0), rtol=1e-4, atol=0)


def test_gradients_of_moments() -> None:
    def joint(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        _, mean, var = whole_of(a, b)
        return mean, var

    first, second = (x.requires_grad_() for x in (values(1), values(2)[:1]))
    assert gradcheck(joint, (first, second))
    assert gradgradcheck(joint, (first, second), fast_mode=True)


@pytest.mark.parametrize("given", ["weight and bias", "weight", "nothing"])
def test_gradients_of_normalize(given: str) -> None:
    weight = None if given == "nothing" else torch.tensor([2.0, -1.0]).double().requires_grad_()
    bias = torch.ones(2).double().requires_grad_() if "bias" in given else None
    mean = torch.tensor([0.5, -3.0]).double().requires_grad_()
    var = torch.tensor([0.2, 4.0]).double().requires_grad_()

    def of(x: Tensor, *rest: Tensor) -> Tensor:
        return normalize(x, weight, bias, Moments(18, mean, var), 0.1)

    inputs = [t for t in (values().requires_grad_(), weight, bias, mean, var) if t is not None]
    assert gradcheck(of, inputs)
    assert gradgradcheck(of, inputs, fast_mode=True)


def test_a_single_value_has_no_variance_and_a_gradient() -> None:
    x = values()[:1, :, :1].requires_grad_()
    _, mean, var = whole_of(x)
    assert var.tolist() == [0, 0]
    (grad,) = torch.autograd.grad((mean + var).sum(), x)
    assert grad.flatten().tolist() == [1, 1]
