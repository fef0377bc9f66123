"""Converting the BatchNorm layers of a module to synchronized ones, and back."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ..executor._gang import Replica, current_replica
from ._callbacks import CallbackContext
from ._module_copy import check_module
from ._scatter_gather import move


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


class _Chunk(NamedTuple):
    """What a replica brings to the meeting in one layer."""

    ctx: CallbackContext
    moments: Moments | None


class _SynchronizedBatchNorm(_BatchNorm):
    _copy: tuple[CallbackContext, int] | None = None
    """Which copy this is, and of which replication; None in a module that is no replica."""

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self._copy = ctx, copy_id

    def __getstate__(self) -> dict[str, Any]:
        # What is deepcopied or pickled in a replica is no replica.
        return {name: value for name, value in self.__dict__.items() if name != "_copy"}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name for it
        if self._copy is None or not self._takes_statistics():
            return super().forward(input)
        ctx, copy_id = self._copy
        replica = self._replica(copy_id)
        if replica.count == 1:
            return super().forward(input)
        self._check_shape(input)
        whole = self._meet(replica, _Chunk(ctx, moments(input)), input.device)
        if whole is None:
            return super().forward(input)  # nothing in any replica
        if whole.size == 1:
            # torch's words.
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{input.size()}"
            )
        result = normalize(input, self.weight, self.bias, whole, self.eps)
        if copy_id == 0 and self.training and self.track_running_stats:
            self._track(whole)  # the buffers of copy 0 are the module's own
        return result

    def _takes_statistics(self) -> bool:
        """Whether it normalizes by the batch, not by its running statistics; as in torch."""
        return self.training or (self.running_mean is None and self.running_var is None)

    def _check_shape(self, x: Tensor) -> None:
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        has_size = self.weight is not None or self.running_mean is not None
        if has_size and x.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels, got {x.size(1)}")

    def _replica(self, copy_id: int) -> Replica:
        """The replica that this copy runs in."""
        name = type(self).__name__
        if torch._C._current_graph_task_id() != -1:
            # The others may be behind this one in the same thread: it must not wait for them.
            raise RuntimeError(
                f"{name} was called in a backward pass, where replicas cannot meet: leave it out "
                "of what torch.utils.checkpoint computes again"
            )
        try:
            replica = current_replica()
        except RuntimeError:
            raise RuntimeError(
                f"copy {copy_id} of {name} was called outside of an aiopar.parallel_apply of all "
                "copies, which is where replicas meet"
            ) from None
        if replica.index != copy_id:
            raise RuntimeError(
                f"copy {copy_id} of {name} was called in replica {replica.index} of another "
                "parallel call: copies meet in the call that they were made for"
            )
        return replica

    def _meet(self, replica: Replica, chunk: _Chunk, device: torch.device) -> Moments | None:
        """The moments of all replicas' chunks together."""
        chunks = replica.exchange(chunk)
        for index, other in enumerate(chunks):
            if not isinstance(other, _Chunk) or other.ctx is not chunk.ctx:
                raise RuntimeError(
                    f"replica {replica.index} came to a {type(self).__name__} where replica {index}"
                    " came to something else: all of them must come to the same layers, in the"
                    " same order"
                )
        return joined([other.moments for other in chunks], device)

    @torch.no_grad()
    def _track(self, whole: Moments) -> None:
        """Update running statistics, as `_BatchNorm.forward` does."""
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is not None:
            self.running_mean.lerp_(whole.mean.to(self.running_mean.dtype), factor)
        if self.running_var is not None:
            unbiased = whole.var * (whole.size / (whole.size - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class SynchronizedBatchNorm1d(_SynchronizedBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d whose statistics are those of the whole batch, over all replicas.

    In training in a `DataParallel`, outputs, running statistics and gradients, of inputs and
    parameters, are those of `torch.nn.BatchNorm1d` on the batch that was not split, to the accuracy
    of the dtype; float16 and bfloat16 are summed in float32. Chunks may differ in size, have one
    value a channel, or none. Everywhere else it is `torch.nn.BatchNorm1d`: without `DataParallel`,
    on one device, in evaluation, in a `parallel_apply` of different modules.

    The copies of one replication meet (`current_replica().exchange`), in the call that they were
    made for. Therefore:

    - All replicas come to the same layers in the same order, one at a time: no two of them at once
      in calls that a replica has forked.
    - If a replica fails before it comes, returns without coming, or the call is cancelled, the
      others are released. Running statistics are as before, in the layers not reached.
    - One call has one backward: from outputs of one replica alone, gradients come to the inputs of
      all, and free what a second backward would need. Nobody waits in it.
    - In a `DataParallel` within a replica, over several devices, the batch is that replica's chunk.
      In any other parallel call within a replica, copies of the outer module raise.
    - Replicas that you make yourself (`replicate`) need `exec_data_parallel_replication_callback`,
      and each runs at its place in `parallel_apply`; without it each is BatchNorm for itself.

    Mirrors jactorch's `SynchronizedBatchNorm1d` (Synchronized-BatchNorm-PyTorch). Differences: the
    deviation is `sqrt(var + eps)`, as in torch (there `sqrt(max(var, eps))`); variances are joined
    by Chan's formula (there by sums of squares, which lose everything where the mean is large
    against the deviation); all of torch's options and any device; errors in place of a hang.
    `torch.nn.SyncBatchNorm` is for processes, one a device.

    Args:
        num_features: How many channels; this and all else as for `torch.nn.BatchNorm1d`.

    Shape:
        (batch, channels) or (batch, channels, length), in and out.

    Raises, when it is called as a replica:
        ValueError: The shape does not fit, or there is one value a channel in all chunks together.
        ReplicaAborted: Another replica failed or returned without coming, or all was cancelled.
        RuntimeError: Another replica came to another layer; it does not run in the parallel call
            that its replication was for; or in a backward (`torch.utils.checkpoint` recomputes in
            it), where nobody may wait.

    Example:
        >>> import asyncio, aiopar, torch
        >>> x = torch.randn(8, 4)  # (batch=8, channels=4)
        >>> dp = aiopar.DataParallel(aiopar.SynchronizedBatchNorm1d(4), ["cpu", "cpu"])
        >>> torch.allclose(asyncio.run(dp(x)), torch.nn.BatchNorm1d(4)(x), atol=1e-6)
        True
    """


class SynchronizedBatchNorm2d(_SynchronizedBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d whose statistics are those of the whole batch; see `SynchronizedBatchNorm1d`.

    Shape:
        (batch, channels, height, width), in and out.

    Example:
        >>> import aiopar
        >>> sorted(aiopar.SynchronizedBatchNorm2d(3).state_dict())
        ['bias', 'num_batches_tracked', 'running_mean', 'running_var', 'weight']
    """


class SynchronizedBatchNorm3d(_SynchronizedBatchNorm, nn.BatchNorm3d):
    """BatchNorm3d whose statistics are those of the whole batch; see `SynchronizedBatchNorm1d`.

    Shape:
        (batch, channels, depth, height, width), in and out.

    Example:
        >>> import aiopar
        >>> isinstance(aiopar.SynchronizedBatchNorm3d(3), torch.nn.BatchNorm3d)
        True
    """


M = TypeVar("M", bound=nn.Module)

_Classes = Mapping[type[nn.Module], type[nn.Module]]
_SYNCHRONIZED: _Classes = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
}
_PLAIN: _Classes = {synchronized: plain for plain, synchronized in _SYNCHRONIZED.items()}


def convert_sync_batchnorm(module: M) -> M:
    """Make every BatchNorm in `module` a synchronized one, in place, and return `module`.

    Mirrors `torch.nn.SyncBatchNorm.convert_sync_batchnorm`. Difference: layers stay the objects
    that they are, and only their class is another. Parameters, buffers, hooks, attributes, modes
    and whoever refers to a layer (an optimizer, a list, a second parent) are as before. torch makes
    new layers, without hooks.

    Converted are `torch.nn.BatchNorm1d`, `2d` and `3d` themselves. All else is left as it is:
    subclasses, whose `forward` is their own (torch replaces them too), what TorchScript has
    compiled, InstanceNorm, and `torch.nn.SyncBatchNorm`, which is for processes.

    Args:
        module: A model, or a BatchNorm itself.

    Raises:
        TypeError: `module` is not a module.
        ValueError: A lazy BatchNorm in it has not seen data; then nothing is converted.

    Example:
        >>> import aiopar
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        >>> type(aiopar.convert_sync_batchnorm(model)[1]).__name__
        'SynchronizedBatchNorm2d'
    """
    check_module(module)
    for path, each in module.named_modules():
        if isinstance(each, nn.LazyBatchNorm1d | nn.LazyBatchNorm2d | nn.LazyBatchNorm3d):
            raise ValueError(
                f"module {path!r} is a {type(each).__name__} that has not seen data: run a batch "
                "through the model first"
            )
    return _with_classes(module, _SYNCHRONIZED)


def revert_sync_batchnorm(module: M) -> M:
    """Make every synchronized BatchNorm in `module` a plain one: undo `convert_sync_batchnorm`.

    In place; layers stay the objects that they are. torch has no counterpart.

    Args:
        module: A model, or a synchronized BatchNorm itself.

    Raises:
        TypeError: `module` is not a module.

    Example:
        >>> import aiopar
        >>> type(aiopar.revert_sync_batchnorm(aiopar.SynchronizedBatchNorm1d(4)))
        <class 'torch.nn.modules.batchnorm.BatchNorm1d'>
    """
    check_module(module)
    return _with_classes(module, _PLAIN)


def _with_classes(root: M, classes: _Classes) -> M:
    for module in root.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]
    return root
