"""The algorithms of `torch.nn.parallel`, which need CUDA, written for the CPU for comparison."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def parallel_apply_by_threads(modules: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Any]:
    """Run modules as `torch.nn.parallel.parallel_apply` does: a new thread per module and call."""
    lock = threading.Lock()
    results: dict[int, Any] = {}
    grad_enabled, autocast_enabled = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def worker(index: int, module: nn.Module, x: Tensor) -> None:
        torch.set_grad_enabled(grad_enabled)
        try:
            with torch.autocast("cpu", enabled=autocast_enabled):
                output = module(x)
            with lock:
                results[index] = output
        except Exception as error:  # noqa: BLE001  # the caller raises it, as in torch
            with lock:
                results[index] = error

    threads = [
        threading.Thread(target=worker, args=(index, module, x))
        for index, (module, x) in enumerate(zip(modules, inputs, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    return [results[index] for index in range(len(modules))]


def replicate_by_copies(network: nn.Module, count: int) -> list[nn.Module]:
    """Copy every module, parameter and buffer, as `torch.nn.parallel.replicate` does."""
    modules = list(network.modules())
    positions = {module: position for position, module in enumerate(modules)}
    replicas = []
    for _ in range(count):
        copies = [module._replicate_for_data_parallel() for module in modules]  # type: ignore[no-untyped-call]
        for module, copied in zip(modules, copies, strict=True):
            for name, child in module._modules.items():
                setattr(copied, name, None if child is None else copies[positions[child]])
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                setattr(copied, name, None if tensor is None else tensor.detach().clone())
        replicas.append(copies[0])
    return replicas


def data_parallel_by_hand(network: nn.Module, x: Tensor, count: int) -> Tensor:
    """Scatter, replicate, parallel_apply and gather, as `torch.nn.DataParallel.forward` does."""
    pieces = x.chunk(count)
    replicas = replicate_by_copies(network, len(pieces))
    return torch.cat(parallel_apply_by_threads(replicas, pieces))
