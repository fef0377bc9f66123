"""`scatter`, `scatter_kwargs` and `gather`, awaited: the copies are made on a worker."""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from .._context import check_no_transform
from .._default import executor_near
from .._devices import Device, parse_devices
from ._gather import check_gather, gather_sync, parse_output_device
from ._scatter import (
    Scattered,
    as_call,
    check_chunk_sizes,
    check_scatter,
    scatter_kwargs_sync,
    scatter_sync,
)

T = TypeVar("T")


def run_near(device: torch.device, fn: Callable[[], T]) -> Coroutine[Any, Any, T]:
    """Await `fn()` on a worker of `device` if the current executor has one, else on any."""
    check_no_transform()
    return executor_near(device).run_sync(fn)


def scatter(
    inputs: Any,
    devices: Iterable[Device],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
) -> Coroutine[Any, Any, list[Any]]:
    """Split the tensors of `inputs` along `dim`, a piece for each device, in order.

    Mirrors `torch.nn.parallel.scatter`. `inputs` may nest tensors in tuples, named tuples, lists,
    dicts, dataclasses and their subclasses; each piece is nested in the same way. Pieces are as
    `torch.chunk` makes them: a batch that does not divide leaves a smaller last piece, one smaller
    than the number of devices makes fewer pieces. A tensor of no dimension, and whatever is no
    tensor, goes to every device. Copies are differentiable; a piece that is on its device already
    is a view, in grad mode the first such piece alone: replicas may then edit theirs in place.
    Shapes are checked when this is called; those of inputs of very many parts, and whether
    containers can be rebuilt, when it is awaited.

    Differences from torch: any devices; tensors whose sizes along `dim` disagree raise (torch
    silently drops data); `Replicated` marks what goes whole to every device; `chunk_sizes`; always
    a list.

    Args:
        inputs: Tensors, nested.
        devices: Where the pieces go; repeats are allowed.
        dim: The batch dimension of every tensor; may be negative.
        chunk_sizes: The size of each device's piece, for unequal devices; 0 gives an empty piece.

    Returns:
        One entry for each piece; entry `i` is on `devices[i]`.

    Raises:
        TypeError: A container cannot be rebuilt, or a tensor cannot be split (sparse, packed).
        ValueError: Sizes disagree, `dim` is out of range, `chunk_sizes` do not fit, or there is
            no such device.

    Example:
        >>> import asyncio, aiopar, torch
        >>> pieces = asyncio.run(aiopar.scatter({"x": torch.arange(5)}, ["cpu", "cpu"]))
        >>> [piece["x"].tolist() for piece in pieces]
        [[0, 1, 2], [3, 4]]
    """
    check_no_transform()  # first: shapes are others within one
    targets = parse_devices(devices)
    sizes = None if chunk_sizes is None else check_chunk_sizes(chunk_sizes, len(targets))
    check_scatter({"inputs": inputs}, targets, dim, sizes)
    return run_near(targets[0], partial(scatter_sync, inputs, targets, dim, chunk_sizes=sizes))


def scatter_kwargs(
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    devices: Iterable[Device],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
) -> Coroutine[Any, Any, Scattered]:
    """Scatter a call's positional and keyword arguments, by one common plan.

    Mirrors `torch.nn.parallel.scatter_gather.scatter_kwargs`; splits as `scatter` does. The two
    results have one entry a piece; without any argument both are empty.

    Differences from torch: sizes have to agree across positional and keyword arguments (torch pads
    the shorter side with empty calls).

    Args:
        inputs: Positional arguments.
        kwargs: Keyword arguments, or None.
        devices: Where the pieces go; repeats are allowed.
        dim: The batch dimension of every tensor.
        chunk_sizes: The size of each device's piece.

    Raises:
        TypeError: As `scatter`.
        ValueError: As `scatter`.

    Example:
        >>> import asyncio, aiopar, torch
        >>> call = aiopar.scatter_kwargs((torch.arange(3),), {"scale": 2}, ["cpu", "cpu"])
        >>> asyncio.run(call)
        (((tensor([0, 1]),), (tensor([2]),)), ({'scale': 2}, {'scale': 2}))
    """
    check_no_transform()  # first, as in `scatter`
    args, named = as_call(inputs, kwargs)
    targets = parse_devices(devices)
    sizes = None if chunk_sizes is None else check_chunk_sizes(chunk_sizes, len(targets))
    check_scatter({"inputs": args, "kwargs": named}, targets, dim, sizes)
    scatter_all = partial(scatter_kwargs_sync, args, named, targets, dim, chunk_sizes=sizes)
    return run_near(targets[0], scatter_all)


def gather(outputs: Sequence[Any], output_device: Device, dim: int = 0) -> Coroutine[Any, Any, Any]:
    """Join the outputs of replicas along `dim`, on one device.

    Mirrors `torch.nn.parallel.gather`. Outputs nest alike; each tensor is the concatenation of its
    namesakes, tensors of no dimension are stacked to a vector. Differentiable.

    Differences from torch: any device (`-1` is the CPU, as in torch); values that are no tensors
    collapse to one if all are equal, else become a list (torch fails, or takes the first);
    outputs that nest differently raise.

    Args:
        outputs: One entry a replica.
        output_device: Where the result goes.
        dim: The dimension to concatenate along.

    Raises:
        TypeError: `outputs` is not a list or tuple.
        ValueError: It is empty, or there is no such device; when awaited: the outputs nest
            differently, or have no such dimension.

    Example:
        >>> import asyncio, aiopar, torch
        >>> asyncio.run(aiopar.gather([{"y": torch.ones(2)}, {"y": torch.zeros(1)}], "cpu"))
        {'y': tensor([1., 1., 0.])}
    """
    target = parse_output_device(output_device)
    check_gather(outputs, dim)
    return run_near(target, partial(gather_sync, outputs, target, dim))
