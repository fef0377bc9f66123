"""`backward`: torch's function, awaited, on a worker."""

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .._base.arguments import returns_coroutine, shown_as
from .._base.devices import accelerators_in_use, current_stream, is_accelerator, record_event
from ._current import executor_near
from ._worker import current_worker

_Differentiable: TypeAlias = Tensor | GradientEdge

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # unlisted


@returns_coroutine
def backward(
    loss_or_losses: _Differentiable | Iterable[_Differentiable],
    grad_tensors: Tensor | Iterable[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: _Differentiable | Iterable[_Differentiable] | Mapping[str, Tensor] | None = None,
) -> Coroutine[Any, Any, None]:
    """Accumulate the gradients of a loss, or of the sum of several, off the event loop.

    Mirrors `torch.autograd.backward`. It runs on a worker of the first loss's device, or on any
    worker if the current executor has no worker on that device. `backward` captures the caller's
    state when it is called, and queues the work when it is awaited. After the `await`, `.grad` of
    every leaf is complete on its device.

    Several backwards may run at once, also into the same parameters: only the order in which
    gradients are added varies. They must not share a graph, unless each backward retains it. As
    with torch, no optimizer may step meanwhile.

    If the `await` is cancelled, a backward that has not started is dropped, and no gradient
    changes. A running backward is awaited before the cancellation goes on. Hooks of CPU tensors run
    on the worker, with the caller's context variables. Hooks of accelerator tensors run on torch's
    own thread per device.

    Differences from torch: `backward` is awaited. `inputs` may be any mapping. Lengths that differ,
    no loss and empty `inputs` raise `ValueError` (torch: `RuntimeError` or no error). There is no
    deprecated `grad_variables`.

    Args:
        loss_or_losses: One or several tensors or gradient edges.
        grad_tensors: The gradient of each loss, in the shape of the loss. None for a loss with one
            element.
        retain_graph: Whether the graph can be used again. None: the value of `create_graph`.
        create_graph: Whether the gradients can be differentiated.
        inputs: The leaves that get gradients. None: all leaves.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: The numbers of losses and gradients differ, or there is no loss or no input.
        NotImplementedError: The workers do not share the tensors of this process.
        RuntimeError: When awaited, from torch: a loss does not require grad, has several elements
            and no gradient, or has a gradient of another shape.
        ExecutorShutdown: A `RuntimeError`, when awaited: the current executor is shut down.

    Example:
        >>> import asyncio, aiopar, torch
        >>> weight = torch.ones(3, requires_grad=True)
        >>> async def main():
        ...     losses = [(weight * n).sum() for n in range(4)]
        ...     await asyncio.gather(*[aiopar.backward(loss) for loss in losses])
        ...     return weight.grad
        >>> asyncio.run(main())
        tensor([6., 6., 6.])
    """
    losses = _as_tuple("losses", loss_or_losses)
    given = [None] * len(losses) if grad_tensors is None else grad_tensors
    gradients = _as_tuple("grad_tensors", given, or_none=True)
    if len(gradients) != len(losses):
        raise ValueError(
            f"grad_tensors has {len(gradients)} entries, but there are {len(losses)} losses"
        )
    if isinstance(inputs, Mapping):
        inputs = inputs.values()
    wanted = None if inputs is None else _as_tuple("inputs", inputs)
    call = partial(_backward, losses, gradients, retain_graph, create_graph, wanted)
    executor = executor_near(_device_of(losses[0]))
    executor._dispatcher.check_shares_memory(
        "backward()",
        "use a DeviceExecutor; to train in processes or on machines, use torch's "
        "DistributedDataParallel",
    )
    return shown_as(executor.run_sync(call), "backward")


def _as_tuple(name: str, given: Any, *, or_none: bool = False) -> tuple[Any, ...]:
    """Return one or several tensors as a tuple, checked."""
    if isinstance(given, _Differentiable):
        given = (given,)
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a tensor or several, not {type(given).__name__}")
    several = tuple(given)
    if not (several or or_none):
        raise ValueError(f"{name} is empty: expected at least one tensor")
    for index, one in enumerate(several):
        if not isinstance(one, Tensor | None if or_none else _Differentiable):
            expected = "a tensor or None" if or_none else "a tensor"
            raise TypeError(f"{name}[{index}] must be {expected}, not {type(one).__name__}")
    return several


def _device_of(loss: _Differentiable) -> torch.device:
    if isinstance(loss, Tensor):
        return loss.device
    device: torch.device = loss.node._input_metadata[loss.output_nr].device
    return device


def _backward(
    losses: tuple[_Differentiable, ...],
    gradients: tuple[Tensor | None, ...],
    retain_graph: bool | None,
    create_graph: bool,
    inputs: tuple[_Differentiable, ...] | None,
) -> None:
    # Shared parameters need no lock. All live graphs share the AccumulateGrad node of a parameter,
    # which adds under a mutex and, on an accelerator, on one stream. A later graph has a new node,
    # on another stream, only after the earlier graphs were freed. By then their kernels are done: a
    # call holds its losses, and so the graph, until its kernels are done (`Launches`).
    torch.autograd.backward(
        losses,  # type: ignore[arg-type]  # mixes of tensors and edges, which torch takes
        gradients,
        retain_graph,
        create_graph,
        inputs=inputs,  # type: ignore[arg-type]  # as above
    )
    _await_other_devices(losses)


def _await_other_devices(losses: Sequence[_Differentiable]) -> None:
    """Make the worker wait for gradients on other accelerators than its own.

    The call ends with an event on the worker's own stream. On other accelerators, torch lets the
    current stream of this thread wait for the gradients.
    """
    worker = current_worker()
    own = torch.device("cpu") if worker is None else worker.device
    if not set(accelerators_in_use()) - {own}:
        return
    # Only devices with gradients: an event on an unused device would claim memory there.
    for device in _gradient_devices(losses) - {own}:
        if is_accelerator(device):
            event = record_event(current_stream(device))
            if is_accelerator(own):
                current_stream(own).wait_event(event)
            else:
                event.synchronize()


def _gradient_devices(losses: Sequence[_Differentiable]) -> set[torch.device]:
    """The devices of the losses and of the leaves below them."""
    found = {_device_of(loss) for loss in losses}
    roots = [loss.grad_fn if isinstance(loss, Tensor) else loss.node for loss in losses]
    seen: set[Node | None] = {None}
    while roots:
        node = roots.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(node, _AccumulateGrad):
                found.add(node.variable.device)
            roots.extend(parent for parent, _ in node.next_functions)
    return found
