"""Mean and variance of a batch that is in several chunks, and normalizing by them.

Three steps: `moments` of each chunk, where it is; `joined`, those of all of them, in order; and
`normalize`. The first and the last are fused operations with a backward of their own, the second
is made of ordinary ones, so that gradients find their way to every chunk by autograd alone:
nobody waits in a backward, where one thread may serve all replicas. In a backward that is to be
differentiated in turn (`create_graph`), the fused ones are made of ordinary ones too.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ._scatter import move


class Moments(NamedTuple):
    """Mean and variance per channel of one chunk, or of several."""

    size: int
    """How many values each channel has."""
    mean: Tensor
    """(channels,)"""
    var: Tensor
    """(channels,): of the values at hand, divided by their number."""


def moments(x: Tensor) -> Moments | None:
    """Those of one chunk (batch, channels, ...), in float32 at least; None if it is empty."""
    if not x.numel():
        return None
    mean, var = _Moments.apply(x)  # type: ignore[no-untyped-call]
    return Moments(x.numel() // x.size(1), mean, var)


def joined(chunks: Sequence[Moments | None], device: torch.device) -> Moments | None:
    """Those of all chunks together, on `device`; None if all are empty.

    Chan's formula, from the first to the last: whoever computes it gets the same bits, and nothing
    is lost where the mean is large against the deviation, as it would be by sums of squares.
    """
    there = [
        Moments(chunk.size, move(chunk.mean, device), move(chunk.var, device))
        for chunk in chunks
        if chunk is not None
    ]
    return reduce(_join, there) if there else None


def _join(a: Moments, b: Moments) -> Moments:
    size = a.size + b.size
    share = b.size / size
    delta = b.mean - a.mean
    mean = torch.add(a.mean, delta, alpha=share)
    within = torch.lerp(a.var, b.var, share)
    return Moments(size, mean, within.addcmul(delta, delta, value=share * (1 - share)))


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, whole: Moments, eps: float
) -> Tensor:
    """`x` normalized by the moments of the whole batch that it is a chunk of."""
    if not x.numel():
        # torch's kernels divide by zero, and take the process with them.
        return F.batch_norm(x, whole.mean, whole.var, weight, bias, eps=eps)
    result: Tensor = _Normalize.apply(x, weight, bias, whole.mean, whole.var, eps)  # type: ignore[no-untyped-call]
    return result


class _Moments(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        dims = [0, *range(2, x.dim())]
        dtype = torch.promote_types(x.dtype, torch.float32)
        if x.device.type == "cpu":
            # A third of the time of `batch_norm_update_stats`, a tenth of `var_mean` (measured).
            mean = x.mean(dims, keepdim=True, dtype=dtype)
            var, mean = (x - mean).square_().mean(dims), mean.flatten()
        else:
            var, mean = torch.var_mean(x.to(dtype), dims, correction=0)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, mean_grad: Tensor, var_grad: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        size = x.numel() // x.size(1)
        slope, offset = var_grad * (2 / size), mean_grad / size
        if torch.is_grad_enabled():
            x_grad: Tensor = _along(slope, x) * (x - _along(mean, x)) + _along(offset, x)
            return x_grad.to(x.dtype)
        # The same in one pass.
        return _normalized(x, slope, offset, mean, torch.ones_like(mean), 0.0)


class _Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps = eps
        if weight is not None and weight.dtype == x.dtype:
            # All in bfloat16, say: the kernels take parameters of the dtype of the moments.
            weight = weight.to(mean.dtype)
            bias = None if bias is None else bias.to(mean.dtype)
        return _normalized(x, weight, bias, mean, var, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        inverse = (var + ctx.eps).rsqrt()
        # CUDA's kernel has no sums without one.
        weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        if torch.is_grad_enabled():
            dims = [0, *range(2, x.dim())]
            x_grad = (grad * _along(inverse * weight, x)).to(x.dtype)
            weight_grad = (grad * (x - _along(mean, x))).sum(dims) * inverse
            bias_grad = grad.sum(dims, dtype=mean.dtype)
        else:
            # As in evaluation, where mean and variance are given.
            x_grad, weight_grad, bias_grad = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, mean, var, mean, inverse, False, ctx.eps,
                [ctx.needs_input_grad[0], True, True],
            )  # fmt: skip
        # y = (x - mean) * inverse * weight + bias: the sums that these two need are those of
        # weight and bias.
        mean_grad = -inverse * weight * bias_grad
        var_grad = inverse.square() * weight * weight_grad * -0.5
        return (
            x_grad,
            weight_grad if ctx.needs_input_grad[1] else None,
            bias_grad if ctx.needs_input_grad[2] else None,
            mean_grad,
            var_grad,
            None,
        )


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """A value a channel, as a factor or a term of `x`."""
    return channels.view(-1, *[1] * (x.dim() - 2))


def _normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
) -> Tensor:
    y, _, _ = torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)
    return y
