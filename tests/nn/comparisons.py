"""Tensors and gradients, compared wherever they are."""

from typing import Any

import torch
from torch import Tensor, nn


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.cpu()
        for name, parameter in module.named_parameters()
    }


def same(ours: Any, theirs: Any) -> bool:
    """Equal up to rounding in float32: kernels depend on the CPU and the batch size."""
    return bool(torch.allclose(ours.cpu(), theirs.cpu(), atol=1e-5))


def same_grads(ours: nn.Module, theirs: nn.Module) -> bool:
    left, right = grads(ours), grads(theirs)
    assert left.keys() == right.keys()
    return all(
        (left[name] is None and right[name] is None) or same(left[name], right[name])
        for name in left
    )
