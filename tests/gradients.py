"""Leaves of autograd's graph, and hooks on their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def on_gradient(tensor: Tensor, fn: Callable[[Tensor], object]) -> Any:
    """Call `fn` during the backward, on the thread that runs it."""
    return tensor.register_hook(fn)  # type: ignore[no-untyped-call]
