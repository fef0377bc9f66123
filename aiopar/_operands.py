"""The tensors a call computes with: its arguments, and the weights of the module it calls."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ._call import Call
from ._tree import tensors


def operands(call: Call[Any]) -> Iterator[torch.Tensor]:
    """The tensors of its arguments, and the weights of the module that it calls."""
    yield from tensors((call.args, call.kwargs))
    fn = call.fn
    if isinstance(fn, partial):
        yield from tensors((fn.args, fn.keywords))
        fn = fn.func
    if isinstance(fn, torch.nn.Module):
        for weights in (fn.parameters(), fn.buffers()):
            yield from (weight for weight in weights if not is_lazy(weight))
