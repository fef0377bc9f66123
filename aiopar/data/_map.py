"""`aiopar.map`: calls a module or function on each batch of a stream, on every device."""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import nn

from .._base.arguments import check_bound, check_int, expected_length, is_async, name_of
from .._base.devices import Device, default_devices, parse_devices
from .._base.inputs import call_module, function_of_batch
from .._base.operator_threads import core_count
from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once
from ..executor._current import get_executor
from ..executor._executor import DeviceExecutor, check_executor
from ..executor._worker import retry_lost
from ..futures._future import Future
from ..nn._module_copy import Forward, check_replicable, replicate_sync
from ..nn._scatter_gather import move_tree
from ._pipeline import Pipeline, check_one_value, check_source
from ._steps import MapStep
from ._stream import Stream, progress_bar

T = TypeVar("T")
U = TypeVar("U")

_TASKS = 16  # more than for threads, because async functions mostly wait


@overload
def map(  # noqa: A001  # see below
    fn_or_module: Forward[U],
    source: Iterable[Any] | AsyncIterable[Any],
    *,
    devices: Iterable[Device] | None = None,
    executor: DeviceExecutor | None = None,
    concurrency: int | None = None,
    in_order: bool = True,
    progress: bool = False,
    total: int | None = None,
) -> Stream[U]: ...


@overload
def map(  # noqa: A001  # see below
    fn_or_module: Callable[[T], Awaitable[U]],
    source: Iterable[T] | AsyncIterable[T],
    *,
    devices: Iterable[Device] | None = None,
    executor: DeviceExecutor | None = None,
    concurrency: int | None = None,
    in_order: bool = True,
    progress: bool = False,
    total: int | None = None,
) -> Stream[U]: ...


@overload
def map(  # noqa: A001  # see below
    fn_or_module: Callable[[T], U],
    source: Iterable[T] | AsyncIterable[T],
    *,
    devices: Iterable[Device] | None = None,
    executor: DeviceExecutor | None = None,
    concurrency: int | None = None,
    in_order: bool = True,
    progress: bool = False,
    total: int | None = None,
) -> Stream[U]: ...


def map(  # noqa: A001  # it does to batches what the built-in does to items
    fn_or_module: Callable[..., Any],
    source: Iterable[Any] | AsyncIterable[Any],
    *,
    devices: Iterable[Device] | None = None,
    executor: DeviceExecutor | None = None,
    concurrency: int | None = None,
    in_order: bool = True,
    progress: bool = False,
    total: int | None = None,
) -> Stream[Any]:
    """Call a module or function on each batch of a stream, and return the stream of outputs.

    Like the built-in `map` and `concurrent.futures.Executor.map`. Unlike them, the source may be
    asynchronous or endless, and the number of batches in flight is bounded. The state of the caller
    (grad mode, inference mode, autocast, the current executor, ...) is captured by this call.
    `async with aiopar.map(...) as outputs` waits, when it is left, until nothing runs any more; see
    `Stream` for errors and closing.

    A module runs on replicas, one for each entry of `devices`, on the workers of `executor`. Each
    batch goes to the replica with the fewest batches. The replicas are made at the first read, as
    by `replicate(detach=True)`: later changes of the weights are not seen, and the outputs have no
    gradient. A tuple or list is unpacked to the module's arguments, as by `parallel_apply`. A
    mapping becomes keyword arguments if `forward` takes these names. Any other batch is the only
    argument. Tensors are moved to the device of the replica, and so are objects with a method
    `to(device)`. The outputs stay there.

    A plain function gets each item unchanged. It runs on the workers of `executor`. If neither
    `executor` nor `devices` are given, it runs on CPU threads of the stream's own. An `async def`
    runs as tasks on the event loop; so do a `DataParallel`, a `ReplicaPool` and a `Batcher`.

    If the source is a `Pipeline` and `in_order` is true, the call is one more stage of an iteration
    of that pipeline. The pipeline's `state_dict` then counts outputs, and its `max_failures` and
    `timeout` apply to all stages. Only the functions of the pipeline run on the pipeline's
    `executor`, and a plain function without `executor` and `devices`.

    Args:
        fn_or_module: Called on each batch.
        source: The batches: an async iterable, or an iterable, which workers advance.
        devices: One entry for each replica or worker. None: the devices of `executor`. Without an
            `executor`, if the current executor's workers are threads: every accelerator; if there
            is none, the CPU once for each core, at least twice.
        executor: The executor whose workers call `fn_or_module`: threads, processes or actors. It
            is not closed. Everything else runs in this process. None: the current executor.
        concurrency: The most batches that run or wait for a worker. As many finished outputs (at
            least two) may wait to be read. With a module, `executor` or `devices`, the same number
            of batches may be read ahead. None: two per entry of `devices`; one per core for a plain
            function on threads of the stream's own; 16 for an async function.
        in_order: Whether outputs come in the order of the batches, or as soon as they are ready.
        progress: Whether to show a progress bar, with time left if the number of batches is known.
            It counts the batches whose output was read, not the items in them.
        total: The number of batches, for the progress bar. None: the length of `source`. The length
            of a `Pipeline` is known unless it has a `filter` or `flat_map`.

    Raises:
        TypeError: `fn_or_module` is not callable, is a generator function (use
            `Pipeline.flat_map`), or is a module that cannot be replicated, such as a compiled one.
            `source` is not iterable. `concurrency` or `total` is not an int. `executor` is no
            `DeviceExecutor`. `devices` or an `executor` were given for an async function.
        ValueError: A device does not exist, the executor has too few workers on it, `concurrency`
            is below 1, or `total` is below 0.
        ImportError: `progress` needs tqdm; raised by the first read.

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
    check_executor(executor)
    concurrency = check_bound("concurrency", concurrency)
    if total is not None:
        total = check_int("total", total, at_least=0)
    placed = devices is not None or executor is not None
    run: Any = fn_or_module
    if is_async(fn_or_module):
        if placed:
            what = "devices" if executor is None else "executor"
            raise TypeError(
                f"{name_of(fn_or_module)} is awaited on the event loop: it takes no {what}; give a "
                "plain function or a module, or give a ReplicaPool or Batcher its own executor"
            )
        default, run = _TASKS, function_of_batch(fn_or_module)
    elif isinstance(fn_or_module, nn.Module) or placed:
        if isinstance(fn_or_module, nn.Module):
            check_replicable(fn_or_module, list(fn_or_module.modules()))
        run = _OnDevices(fn_or_module, devices, executor)
        default = 2 * len(run.devices)
    else:
        default = max(2, core_count())
    name = f"map({name_of(fn_or_module)})"
    step = MapStep(run, concurrency or default, in_order=in_order, name=name)
    if progress and total is None:
        total = expected_length(source)
    bar = partial(progress_bar, total, unit="batch") if progress else None
    if in_order and isinstance(source, Pipeline):
        return source._through(step, bar)
    return Stream(source, [step], caller=CallerState(), bar=bar, name="map")


class _OnDevices:
    """Calls a module or function on the worker with the fewest batches; tasks await the calls."""

    def __init__(
        self,
        fn: Callable[..., Any],
        devices: Iterable[Device] | None,
        given: DeviceExecutor | None,
    ) -> None:
        executor = given or get_executor()
        self._shares_memory = executor._dispatcher.shares_memory
        if devices is not None:
            self.devices: tuple[torch.device, ...] = parse_devices(devices)
        elif given is None and self._shares_memory:
            self.devices = default_devices()
        else:
            self.devices = executor.devices
        one_for_each = executor._one_for_each(self.devices)  # raises if there are too few
        self._workers = (
            [executor._on_worker(worker) for worker in one_for_each]
            if self._shares_memory
            else [executor.on(device) for device in self.devices]  # each host has a replica
        )
        self._loads = [0] * len(self.devices)
        self._module = fn if isinstance(fn, nn.Module) else None
        self._fn = executor._dispatcher.keep(fn, replica=True)
        self._replicas: Future[list[Any]] | None = None

    async def __call__(self, batch: Any) -> Any:
        call = partial(self._call, batch)
        # A module may run twice, a function may not.
        return await (call() if self._module is None else retry_lost(call))

    async def _call(self, batch: Any) -> Any:
        loads = self._loads
        index = loads.index(min(loads))
        loads[index] += 1
        worker = self._workers[index]
        try:
            if self._module is None:
                return await worker.run_sync(self._fn, batch)
            replica = await self._replica(self._module, index)
            return await worker.run_sync(_apply, replica, batch, self.devices[index])
        except Exception as error:
            if self._shares_memory:
                add_note_once(error, f"in replica {index} on device {self.devices[index]}")
            raise
        finally:
            loads[index] -= 1

    async def _replica(self, module: nn.Module, index: int) -> Any:
        if not self._shares_memory:
            return self._fn  # each host has a copy
        if self._replicas is None:
            replicate = partial(replicate_sync, detach=True)
            self._replicas = self._workers[0].submit(replicate, module, self.devices)
        return (await self._replicas)[index]


def _apply(replica: nn.Module, batch: Any, device: torch.device) -> Any:
    inputs = batch if isinstance(batch, list | tuple) else (batch,)
    with torch.no_grad():
        return call_module(replica, inputs, place=partial(move_tree, device=device))
