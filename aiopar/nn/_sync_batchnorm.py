"""BatchNorm whose statistics are those of the whole batch, across the replicas of a module."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .._base.tracebacks import add_note_once
from ..executor._gang import Replica, current_replica
from ._callbacks import CallbackContext
from ._module_copy import check_module
from ._scatter_gather import move

M = TypeVar("M", bound=nn.Module)


class _Moments(NamedTuple):
    """Mean and variance per channel, of one chunk or of several."""

    size: int  # how many values each channel has
    mean: Tensor  # (channels,)
    var: Tensor  # (channels,): the biased variance


class _Chunk(NamedTuple):
    """The contribution of a replica to the meeting of one layer."""

    ctx: CallbackContext
    moments: _Moments | None  # None if the chunk is empty


class _SynchronizedBatchNorm(_BatchNorm):
    _copy: tuple[CallbackContext, int] | None = None
    """The context of the replication, and the id of this copy; None if the module is no copy."""

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self._copy = ctx, copy_id

    def __getstate__(self) -> dict[str, Any]:
        # A deepcopy or pickle of a replica is an ordinary module.
        return {name: value for name, value in self.__dict__.items() if name != "_copy"}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name for it
        uses_batch = self.training or (self.running_mean is None and self.running_var is None)
        if self._copy is None or not uses_batch:
            return super().forward(input)
        ctx, copy_id = self._copy
        try:
            return self._forward_copy(input, ctx, copy_id)
        except Exception as error:
            where = f"layer {ctx._path!r}" if ctx._path else "the module"
            add_note_once(error, f"in {where} ({type(self).__name__})")
            raise

    def _forward_copy(self, input: Tensor, ctx: CallbackContext, copy_id: int) -> Tensor:  # noqa: A002
        replica = self._current_replica(copy_id)
        if replica.count == 1:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        has_size = self.weight is not None or self.running_mean is not None
        if has_size and input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels, got {input.size(1)}")
        moments = None
        if input.numel():
            mean, var = _ComputeMoments.apply(input)  # type: ignore[no-untyped-call]
            moments = _Moments(input.numel() // input.size(1), mean, var)
        whole = self._meet(replica, _Chunk(ctx, moments), input.device)
        if whole is None:
            return super().forward(input)  # all chunks are empty
        if whole.size == 1:
            raise ValueError(  # torch's words
                "Expected more than 1 value per channel when training, got input size "
                f"{input.size()}"
            )
        options = self.weight, self.bias, whole.mean, whole.var, self.eps
        if input.numel():
            result: Tensor = _ApplyNorm.apply(input, *options)  # type: ignore[no-untyped-call]
        else:  # torch's kernels in `_ApplyNorm` divide by zero, which ends the process
            result = F.batch_norm(input, whole.mean, whole.var, *options[:2], eps=self.eps)
        if copy_id == 0 and self.training and self.track_running_stats:
            self._update_running_stats(whole)  # the buffers of copy 0 are the module's own
        return result

    def _current_replica(self, copy_id: int) -> Replica:
        name = type(self).__name__
        if torch._C._current_graph_task_id() != -1:
            # One thread runs the backward of all replicas on the CPU: to wait here is a deadlock.
            raise RuntimeError(
                f"{name} was called in a backward pass, where replicas cannot meet: do not use it "
                "inside torch.utils.checkpoint"
            )
        try:
            replica = current_replica()
        except NotImplementedError:
            raise
        except RuntimeError:
            raise RuntimeError(
                f"copy {copy_id} of {name} was called outside of a parallel call: replicas meet in "
                "an aiopar.parallel_apply of all copies"
            ) from None
        if replica.index != copy_id:
            raise RuntimeError(
                f"copy {copy_id} of {name} was called in replica {replica.index} of another "
                "parallel call: copies meet in the call that they were made for"
            )
        return replica

    def _meet(self, replica: Replica, chunk: _Chunk, device: torch.device) -> _Moments | None:
        """The moments of the whole batch on `device`; None if all chunks are empty."""
        chunks = replica.exchange(chunk)
        for index, other in enumerate(chunks):
            if not isinstance(other, _Chunk) or other.ctx is not chunk.ctx:
                theirs = f"layer {other.ctx._path!r}" if isinstance(other, _Chunk) else "a meeting"
                raise RuntimeError(
                    f"replica {replica.index} called a {type(self).__name__} "
                    f"({chunk.ctx._path!r}) while replica {index} called {theirs}: all replicas "
                    "must call the same layers in the same order"
                )
        return _combine([other.moments for other in chunks], device)

    @torch.no_grad()
    def _update_running_stats(self, whole: _Moments) -> None:
        """As `_BatchNorm.forward` does."""
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
    """BatchNorm1d whose statistics are those of the whole batch, across all replicas.

    In training in a `DataParallel`, outputs, running statistics and all gradients are those of
    `torch.nn.BatchNorm1d` on the whole batch, within the accuracy of the dtype. Statistics of
    float16 and bfloat16 are computed in float32. Chunks may differ in size, have one value per
    channel, or be empty. Otherwise this layer is `torch.nn.BatchNorm1d`: without `DataParallel`, on
    one device, in evaluation, and in a `parallel_apply` of different modules.

    The copies of one replication meet in the parallel call that they were made for. Therefore:

    - All replicas must call the same layers in the same order, one at a time. A replica must not
      call two of them at once in calls that it forks.
    - If a replica fails or returns without calling a layer, or the call is cancelled, the waiting
      replicas raise `ReplicaAborted`. Later layers keep their running statistics.
    - Run one backward per call. A backward from the outputs of one replica computes gradients for
      the inputs of all replicas, and frees what a second backward would need.
    - In a `DataParallel` on several devices that runs inside a replica, the batch is the chunk of
      that replica. In any other parallel call inside a replica, copies of the outer module raise.
    - For replicas that you make with `replicate`, call `exec_data_parallel_replication_callback`,
      and run each replica at its own index in `parallel_apply`. Without the callback each replica
      uses its own statistics.

    Mirrors jactorch's `SynchronizedBatchNorm1d` (Synchronized-BatchNorm-PyTorch). Differences:
    the deviation is `sqrt(var + eps)` as in torch (there `sqrt(max(var, eps))`); variances are
    combined by Chan's formula (there by sums of squares, which lose all precision if the mean is
    much larger than the deviation); all options of torch, and any device; an error where jactorch
    hangs. `torch.nn.SyncBatchNorm` is for one process per device.

    Args:
        num_features: The number of channels. All arguments are those of `torch.nn.BatchNorm1d`.

    Shape:
        (batch, channels) or (batch, channels, length), in and out.

    Raises:
        ValueError: In a call as a replica: the shape does not fit, or all chunks together have one
            value per channel.
        ReplicaAborted: Another replica failed or returned without calling this layer, or the call
            was cancelled.
        RuntimeError: Another replica called another layer; the replica does not run in the parallel
            call that it was made for; or it runs in a backward (of `torch.utils.checkpoint`), where
            waiting would deadlock.

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


_Classes = Mapping[type[nn.Module], type[nn.Module]]
_SYNCHRONIZED: _Classes = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
}
_PLAIN: _Classes = {synchronized: plain for plain, synchronized in _SYNCHRONIZED.items()}


def convert_sync_batchnorm(module: M) -> M:
    """Make every BatchNorm in `module` a synchronized one, in place; return `module`.

    Mirrors `torch.nn.SyncBatchNorm.convert_sync_batchnorm`. Difference: torch creates new layers
    without hooks. Here each layer remains the same object and only its class changes, so
    parameters, buffers, hooks, attributes, modes and all references to the layer stay valid.

    Only layers of exactly `torch.nn.BatchNorm1d`, `2d` and `3d` are converted: not subclasses,
    whose `forward` may differ (torch replaces them), TorchScript modules, InstanceNorm, or
    `torch.nn.SyncBatchNorm`, which is for several processes.

    Args:
        module: A model, or a BatchNorm itself.

    Raises:
        TypeError: `module` is not a module.
        ValueError: A lazy BatchNorm has not seen data yet. Nothing is converted then.

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
    return _change_classes(module, _SYNCHRONIZED)


def revert_sync_batchnorm(module: M) -> M:
    """Make every synchronized BatchNorm in `module` a plain one, in place; return `module`.

    This undoes `convert_sync_batchnorm`; layers remain the same objects. torch has no counterpart.

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
    return _change_classes(module, _PLAIN)


def _change_classes(root: M, classes: _Classes) -> M:
    for module in root.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]
    return root


def _combine(chunks: Sequence[_Moments | None], device: torch.device) -> _Moments | None:
    """The moments of all chunks together, on `device`; None if all are empty."""
    # In the order of the chunks, so that every replica computes the same bits.
    present = [
        _Moments(chunk.size, move(chunk.mean, device), move(chunk.var, device))
        for chunk in chunks
        if chunk is not None
    ]
    return reduce(_combine_two, present) if present else None


def _combine_two(a: _Moments, b: _Moments) -> _Moments:
    # Chan's formula: sums of squares lose all precision if the mean is much above the deviation.
    size = a.size + b.size
    share = b.size / size
    delta = b.mean - a.mean
    mean = torch.add(a.mean, delta, alpha=share)
    within = torch.lerp(a.var, b.var, share)
    return _Moments(size, mean, within.addcmul(delta, delta, value=share * (1 - share)))


class _ComputeMoments(Function):
    """The moments of a chunk (batch, channels, ...) that is not empty, at least in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        dims = [0, *range(2, x.dim())]
        dtype = torch.promote_types(x.dtype, torch.float32)
        if x.device.type == "cpu":  # much faster there than `var_mean`
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
        one = torch.ones_like(mean)  # for the same, in one kernel
        return torch.native_batch_norm(x, slope, offset, mean, one, False, 0.0, 0.0)[0]


class _ApplyNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *options: Any) -> Tensor:
        weight, bias, mean, var, eps = options
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps = eps
        if weight is not None and weight.dtype == x.dtype:
            # If all tensors are bfloat16: the kernels need parameters of the dtype of the moments.
            weight = weight.to(mean.dtype)
            bias = None if bias is None else bias.to(mean.dtype)
        return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        inverse = (var + ctx.eps).rsqrt()
        # Without a weight, CUDA's kernel computes no sums.
        weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        if torch.is_grad_enabled():
            dims = [0, *range(2, x.dim())]
            x_grad = (grad * _along(inverse * weight, x)).to(x.dtype)
            weight_grad = (grad * (x - _along(mean, x))).sum(dims) * inverse
            bias_grad = grad.sum(dims, dtype=mean.dtype)
        else:
            # The kernel for evaluation, because mean and variance are given.
            x_grad, weight_grad, bias_grad = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, mean, var, mean, inverse, False, ctx.eps,
                [ctx.needs_input_grad[0], True, True],
            )  # fmt: skip
        # y = (x - mean) * inverse * weight + bias: the gradients of mean and variance need the same
        # sums as those of weight and bias.
        mean_grad = -inverse * weight * bias_grad
        var_grad = inverse.square() * weight * weight_grad * -0.5
        return (
            x_grad,
            weight_grad if ctx.needs_input_grad[1] else None,
            bias_grad if ctx.needs_input_grad[2] else None,
            *(mean_grad, var_grad, None),
        )


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """One value per channel, in a shape that broadcasts with `x`."""
    return channels.view(-1, *[1] * (x.dim() - 2))
