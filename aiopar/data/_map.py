"""`aiopar.map`: a module or function over a stream of batches, on every device."""

import functools
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from .._base.arguments import is_async, length_of, name_of
from .._base.devices import Device, core_count, default_devices, parse_devices
from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once
from .._base.tree import map_tensors
from ..executor._current import get_executor
from ..executor._executor import DeviceExecutor
from ..futures._future import Future
from ..nn._module_copy import check_replicable, replicate_sync
from ..nn._scatter_gather import move
from ._pipeline import Pipeline, check_concurrency, check_one_value, check_source
from ._stages import MapStep
from ._stream import Stream, progress_bar

T = TypeVar("T")
U = TypeVar("U")

# Async functions wait more than they compute.
_TASKS = 16


@overload
def map(  # noqa: A001  # as below
    fn_or_module: Callable[[T], Awaitable[U]],
    source: Iterable[T] | AsyncIterable[T],
    *,
    devices: Iterable[Device] | None = None,
    concurrency: int | None = None,
    in_order: bool = True,
    progress: bool = False,
) -> Stream[U]: ...


@overload
def map(  # noqa: A001  # as below
    fn_or_module: Callable[[T], U],
    source: Iterable[T] | AsyncIterable[T],
    *,
    devices: Iterable[Device] | None = None,
    concurrency: int | None = None,
    in_order: bool = True,
    progress: bool = False,
) -> Stream[U]: ...


def map(  # noqa: A001  # it is to batches what the built-in is to items
    fn_or_module: Callable[..., Any],
    source: Iterable[Any] | AsyncIterable[Any],
    *,
    devices: Iterable[Device] | None = None,
    concurrency: int | None = None,
    in_order: bool = True,
    progress: bool = False,
) -> Stream[Any]:
    """An async iterator over the outputs of a module or function, one for each item of `source`.

    As the built-in `map`, and `concurrent.futures.Executor.map`; but the source may be
    asynchronous and need not end, and no more items are in flight than workers can take up. The
    state of the caller (grad mode, inference mode, autocast, the current executor, ...) is captured
    when this is called; nothing begins before the first read. See `Stream` for errors and closing:
    `async with aiopar.map(...) as outputs` waits, on leaving, until nothing is left.

    A module runs on replicas, one a device entry, on the current executor's workers; each batch
    goes to a replica that is free. Replicas are made at the first read, as by
    `replicate(detach=True)`: later changes of the module's weights are not seen, and outputs
    have no gradient. A batch that is a tuple or list is the module's arguments, else it is its one
    argument, as for `parallel_apply`; tensors are moved to the replica's device, and outputs
    stay there.

    Of a `Pipeline` it is, in order, one stage more, begun where this is called: what that has
    delivered, for `state_dict`, are the outputs, and its `max_failures`, `executor` and `timeout`
    hold for all of them.

    A plain function gets each item as it is. It runs on CPU threads of the stream's own, or, with
    `devices`, on the current executor's workers there. An `async def` runs as tasks, and so does
    what is awaited elsewhere too: a `DataParallel`, a `ReplicaPool`, a `Batcher`.

    Args:
        fn_or_module: What is called on each batch.
        source: The batches: any iterable (stepped on workers, by one at a time) or async iterable.
        devices: Where it runs, one entry a replica (or worker). None: for a module every
            accelerator, or, where there is none, the CPU once for each core, at least twice.
        concurrency: The most batches in flight, running or waiting for a worker. As many finished
            outputs again (at least two) may wait to be read. Where a module or `devices` is given
            and the source is stepped on a worker, as many batches as both together may also be
            read ahead. None: two for each device entry, so that none is idle; a core each for
            plain functions without devices; 16 for async ones.
        in_order: Whether outputs come in the order of the batches; else each when it is ready.
        progress: Whether there is a bar, with rate and, where `len(source)` is known, time left.

    Raises:
        TypeError: Not callable, not iterable, or a number that is none; a generator function,
            whose items `Pipeline.flat_map` gives; `devices` for an async function; a module that
            cannot be replicated (compiled, say).
        ValueError: There is no such device, the current executor has too few workers on one, or
            `concurrency` is below 1.
        ImportError: There is no tqdm; at the first read.

    Example:
        >>> import asyncio, aiopar, torch
        >>> model = torch.nn.Linear(4, 2)
        >>> async def main():
        ...     with torch.inference_mode():
        ...         outputs = aiopar.map(model, torch.ones(10, 8, 4), devices=["cpu", "cpu"])
        ...     return [tuple(y.shape) async for y in outputs]
        >>> len(asyncio.run(main()))
        10
    """
    check_one_value(fn_or_module)
    check_source(source)
    concurrency = check_concurrency(concurrency)
    on_loop = True
    run: Any = fn_or_module
    if is_async(fn_or_module):
        if devices is not None:
            raise TypeError("an async function runs on the event loop: it takes no devices")
        in_flight = concurrency or _TASKS
    elif isinstance(fn_or_module, nn.Module):
        check_replicable(fn_or_module, list(fn_or_module.modules()))
        targets = default_devices() if devices is None else parse_devices(devices)
        in_flight = concurrency or 2 * len(targets)
        run = _OnDevices(fn_or_module, targets)
    elif devices is not None:
        targets = parse_devices(devices)
        in_flight = concurrency or 2 * len(targets)
        run = _OnDevices(fn_or_module, targets)
    else:
        in_flight = concurrency or max(2, core_count())
        on_loop = False
    name = f"map({name_of(fn_or_module)})"
    step = MapStep(run, in_flight, in_order=in_order, name=name, asynchronous=on_loop)
    bar = functools.partial(progress_bar, length_of(source), unit="batch") if progress else None
    if in_order and isinstance(source, Pipeline):
        return source._through(step, bar)
    return Stream(source, [step], caller=CallerState(), bar=bar, name="map")


class _OnDevices:
    """A module or function, called on the worker with the fewest calls; awaited by tasks.

    Raises:
        ValueError: The current executor has too few workers on a device.
    """

    def __init__(self, fn: Callable[..., Any], devices: Sequence[torch.device]) -> None:
        self._fn = fn
        self._devices = devices
        self._workers = _distinct_workers(get_executor(), devices)
        self._loads = [0] * len(devices)
        self._replicas: Future[list[Any]] | None = None

    async def __call__(self, batch: Any) -> Any:
        loads = self._loads
        index = loads.index(min(loads))
        loads[index] += 1
        try:
            worker = self._workers[index]
            if not isinstance(self._fn, nn.Module):
                return await worker.run_sync(self._fn, batch)
            if self._replicas is None:
                replicate = functools.partial(replicate_sync, detach=True)
                self._replicas = self._workers[0].submit(replicate, self._fn, self._devices)
            replicas = await self._replicas
            return await worker.run_sync(_apply, replicas[index], batch, self._devices[index])
        except Exception as error:
            add_note_once(error, f"in replica {index} on device {self._devices[index]}")
            raise
        finally:
            loads[index] -= 1


def _apply(replica: nn.Module, batch: Any, device: torch.device) -> Any:
    moved = map_tensors(functools.partial(move, device=device), batch)
    with torch.no_grad():
        return replica(*moved) if isinstance(moved, list | tuple) else replica(moved)


def _distinct_workers(
    executor: DeviceExecutor, devices: Sequence[torch.device]
) -> list[DeviceExecutor]:
    """A worker for each entry: the k-th on a device for its k-th repeat."""
    dispatcher = executor._dispatcher
    seen: Counter[torch.device] = Counter()
    workers = []
    for device, group in zip(devices, dispatcher.groups_on(devices), strict=True):
        worker = group[seen[device]]
        seen[device] += 1
        workers.append(executor.on(worker=dispatcher.workers.index(worker)))
    return workers
