"""`backward`, awaited: gradients are computed on a worker."""

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .._base.devices import accelerators_in_use, current_stream, is_accelerator, record_event
from ._current import executor_near
from ._worker import current_worker

_Differentiable: TypeAlias = Tensor | GradientEdge

_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # it has


def backward(
    loss_or_losses: _Differentiable | Iterable[_Differentiable],
    grad_tensors: Tensor | Iterable[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: _Differentiable | Iterable[_Differentiable] | Mapping[str, Tensor] | None = None,
) -> Coroutine[Any, Any, None]:
    """Accumulate the gradients of a loss, or of the sum of several, off the event loop.

    Mirrors `torch.autograd.backward`, which it calls on a worker of the (first) loss's device, or,
    where the current executor has none there, on any of its workers. Arguments are checked, and
    the state of the caller is captured, when this is called; the call is queued when it is
    awaited. Then `.grad` of every leaf is complete, on whichever device it is.

    Any number of backwards may be awaited at once, also into the same parameters: the gradients
    are those of one after the other, up to the order of the sums. They must not share a graph
    (unless each retains it) and, as with torch, an optimizer must not step meanwhile.

    If the `await` is cancelled, a call that has not started is dropped, and no gradient changes;
    one that runs is awaited first. Hooks of CPU tensors run on the worker, with the caller's
    context variables; those of accelerators on torch's own thread for the device, as ever.

    Differences from torch: it is awaited; `inputs` may be any mapping; lengths that differ, no
    loss and empty `inputs` raise `ValueError` (torch: `RuntimeError`, or nothing at all); there is
    no `grad_variables`, which torch has deprecated.

    Args:
        loss_or_losses: Tensors or gradient edges, or one. A loss without a gradient of its own in
            `grad_tensors` has one element.
        grad_tensors: The gradient of each loss, of its shape; None for a loss that is a scalar.
        retain_graph: Whether the graph can be used again; None: as `create_graph`.
        create_graph: Whether the gradients can be differentiated in turn.
        inputs: The only leaves to accumulate into; None: all.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: The lengths of losses and gradients differ, or there is no loss or no input.
        RuntimeError: In torch's words: a loss does not require grad, has several elements and no
            gradient, or one of another shape.
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
    losses = _checked("losses", loss_or_losses)
    gradients = _checked_gradients(grad_tensors, losses)
    if isinstance(inputs, Mapping):
        inputs = inputs.values()
    wanted = None if inputs is None else _checked("inputs", inputs)
    call = partial(_backward, losses, gradients, retain_graph, create_graph, wanted)
    return executor_near(_device_of(losses[0])).run_sync(call)


def _checked(
    name: str, given: _Differentiable | Iterable[_Differentiable]
) -> tuple[_Differentiable, ...]:
    if isinstance(given, _Differentiable):
        return (given,)
    checked = _as_tuple(name, given)
    if not checked:
        raise ValueError(f"{name} is empty: expected at least one tensor")
    for index, one in enumerate(checked):
        if not isinstance(one, _Differentiable):
            raise TypeError(f"{name}[{index}] must be a tensor, not {type(one).__name__}")
    return checked


def _as_tuple(name: str, given: Iterable[Any]) -> tuple[Any, ...]:
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a tensor or several, not {type(given).__name__}")
    return tuple(given)


def _checked_gradients(
    given: Tensor | Iterable[Tensor | None] | None, losses: Sequence[_Differentiable]
) -> tuple[Tensor | None, ...]:
    if given is None:
        given = [None] * len(losses)
    checked = (given,) if isinstance(given, Tensor) else _as_tuple("grad_tensors", given)
    if len(checked) != len(losses):
        raise ValueError(
            f"grad_tensors has {len(checked)} entries, but there are {len(losses)} losses"
        )
    for index, (loss, gradient) in enumerate(zip(losses, checked, strict=True)):
        if gradient is not None and not isinstance(gradient, Tensor):
            kind = type(gradient).__name__
            raise TypeError(f"grad_tensors[{index}] must be a tensor or None, not {kind}")
        if isinstance(loss, Tensor):  # of an edge, torch knows the shape
            _check_loss(index, loss, gradient)
    return checked


def _check_loss(index: int, loss: Tensor, gradient: Tensor | None) -> None:
    if not loss.requires_grad:
        raise RuntimeError(
            f"element {index} of tensors does not require grad and does not have a grad_fn"
        )
    if gradient is None and loss.numel() != 1:
        raise RuntimeError(
            "grad can be implicitly created only for scalar outputs: "
            f"element {index} of tensors has a shape of {tuple(loss.shape)}"
        )
    if gradient is not None and gradient.shape != loss.shape:
        raise RuntimeError(
            f"Mismatch in shape: grad_output[{index}] has a shape of {tuple(gradient.shape)} and "
            f"output[{index}] has a shape of {tuple(loss.shape)}."
        )


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
    # No lock is needed for parameters that several calls share. All graphs that are alive share
    # the one AccumulateGrad node of a parameter, which adds up under a mutex and, on an
    # accelerator, on one stream. What would race there is a graph that is freed while its kernels
    # still run: the next one would have another node, perhaps on another stream. But the call
    # holds its losses, and so the graph, until its kernels are done (`Launches`).
    torch.autograd.backward(
        losses,  # type: ignore[arg-type]  # mixes of tensors and edges, which torch takes
        gradients,
        retain_graph,
        create_graph,
        inputs=inputs,  # type: ignore[arg-type]  # as above
    )
    _await_other_devices(losses)


def _await_other_devices(losses: Sequence[_Differentiable]) -> None:
    """Have the calling worker wait for gradients on other accelerators than its own.

    Its own event, by which the call ends, is recorded on its own stream. On every other accelerator
    torch has made this thread's current stream wait for the gradients there.
    """
    worker = current_worker()
    own = torch.device("cpu") if worker is None else worker.device
    if not set(accelerators_in_use()) - {own}:
        return
    # Only those that have gradients: an event on a device that the process does not use would
    # claim memory there.
    for device in _gradient_devices(losses) - {own}:
        if is_accelerator(device):
            event = record_event(current_stream(device))
            if is_accelerator(own):
                current_stream(own).wait_event(event)
            else:
                event.synchronize()


def _gradient_devices(losses: Sequence[_Differentiable]) -> set[torch.device]:
    """The devices of the leaves below `losses`; half a microsecond a node."""
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
