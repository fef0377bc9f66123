"""BatchNorm over the whole batch of a `DataParallel` call."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._gang import Replica, current_replica
from ._batch_statistics import Moments, joined, moments, normalize
from ._callback_context import CallbackContext


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
