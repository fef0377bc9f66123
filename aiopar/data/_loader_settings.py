"""The arguments of an `AsyncDataLoader` and their checks."""

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .._base.arguments import check_callable, check_int, check_number, described, is_iterable
from .._base.devices import Device, parse_device, parse_devices
from ..executor._executor import DeviceExecutor, check_executor
from ._cursor import check_generator
from ._pinned import can_pin
from ._processes import ProcessLoader
from ._sampling import DatasetKind, WrappedIterable


@dataclass(eq=False, kw_only=True)
class LoaderSettings:
    """The checked arguments that `AsyncDataLoader` does not leave to torch's `DataLoader`."""

    kind: DatasetKind
    num_workers: int
    prefetch_factor: int
    in_order: bool
    timeout: float
    worker_type: str
    worker_init_fn: Callable[[int], object] | None
    multiprocessing_context: Any
    persistent_workers: bool
    pin_memory: bool
    devices: tuple[torch.device, ...]
    whole: bool
    """Whether a batch goes to the device whole, not as a list of chunks."""
    max_failures: int
    executor: DeviceExecutor | None
    progress: bool

    def __post_init__(self) -> None:
        self.num_workers = check_int("num_workers", self.num_workers, at_least=1)
        self.prefetch_factor = check_int("prefetch_factor", self.prefetch_factor, at_least=1)
        if isinstance(self.timeout, int | float) and self.timeout < 0:  # torch's words
            raise ValueError(f"timeout option should be non-negative, got {self.timeout}")
        self.timeout = check_number("timeout", self.timeout, zero=True)
        self.max_failures = check_int("max_failures", self.max_failures, at_least=0)
        executor = check_executor(self.executor)
        if executor is not None:
            executor._dispatcher.check_shares_memory("AsyncDataLoader", 'use worker_type="process"')
        if self.worker_type not in ("thread", "process"):
            raise ValueError(f'worker_type must be "thread" or "process", got {self.worker_type!r}')
        if not self.processes and self.multiprocessing_context is not None:
            raise ValueError('multiprocessing_context needs worker_type="process"')
        if self.worker_init_fn is not None:
            check_callable(self.worker_init_fn)
            if self.kind.is_async:
                raise ValueError(
                    "worker_init_fn needs workers, and an async dataset is read by tasks"
                )
        if self.kind.is_async and self.processes:
            raise ValueError(
                'worker_type="process" needs a plain dataset: this one is asynchronous'
            )

    @property
    def processes(self) -> bool:
        """Whether torch's worker processes load."""
        return self.worker_type == "process"

    @property
    def bound(self) -> int:
        """The most batches that are ready or being fetched."""
        return self.prefetch_factor * self.num_workers

    def torch_loader(self, dataset: Any, **options: Any) -> "DataLoader[Any]":
        """A torch loader of the dataset, which checks its own arguments and makes the samplers.

        It is a `ProcessLoader` if worker processes load. Otherwise it is never iterated.
        """
        iterable = isinstance(dataset, IterableDataset)
        if self.processes:
            if self.kind is DatasetKind.ITERABLE and not iterable:
                raise ValueError(
                    'worker_type="process" needs a map-style dataset or an IterableDataset, which '
                    f"can share itself out among processes; got {type(dataset).__name__}"
                )
            options |= {name: getattr(self, name) for name in _PROCESS_OPTIONS}
        # After torch's own checks: its message on an excluded argument is the better one.
        loader: DataLoader[Any]
        if self.processes:
            loader = ProcessLoader(dataset, **options)
        elif self.kind.by_index or (iterable and self.kind is DatasetKind.ITERABLE):
            loader = DataLoader(dataset, **options)
        else:
            loader = DataLoader(WrappedIterable(dataset), **options)
        for name in ("sampler", "batch_sampler"):
            given = options[name]
            if given is not None and not is_iterable(given):
                raise TypeError(f"{name} must be a Sampler or an iterable, not {described(given)}")
        check_generator(options["generator"])
        if options["collate_fn"] is not None:
            check_callable(options["collate_fn"])
        if self.pin_memory and not self.processes and not can_pin():
            warnings.warn(
                "'pin_memory' argument is set as true but no accelerator is found, then device "
                "pinned memory won't be used.",
                stacklevel=3,  # the line that makes the loader
            )
        return loader


_PROCESS_OPTIONS = (
    *("num_workers", "prefetch_factor", "pin_memory", "in_order"),
    *("worker_init_fn", "multiprocessing_context", "persistent_workers"),
)

_DECIDE_BATCHES = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
"""What a subclass of torch's `DataLoader` may override to give other batches."""


def devices_of(device: Device | None, devices: Iterable[Device] | None) -> tuple[torch.device, ...]:
    """The devices of a loader with these arguments; none: batches are not copied."""
    if device is not None and devices is not None:
        raise ValueError(f"expected a device or devices, got {device=} and {devices=}")
    if devices is not None:
        return parse_devices(devices)
    return () if device is None else (parse_device(device),)


def arguments_of(dataloader: "DataLoader[Any]") -> dict[str, Any]:
    """The arguments of an `AsyncDataLoader` with the same settings."""
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"expected a torch DataLoader, got {type(dataloader).__name__}")
    for name in _DECIDE_BATCHES:
        # Static: two of them are properties. One object may have a method of its own.
        if inspect.getattr_static(dataloader, name) is not vars(DataLoader)[name]:
            raise TypeError(
                f"{type(dataloader).__name__} iterates in a way of its own ({name}): use it as the "
                "dataset of an AsyncDataLoader with batch_size=None"
            )
    names = inspect.signature(DataLoader).parameters.keys() - {
        *("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"),
        *("num_workers", "prefetch_factor", "pin_memory_device"),
    }
    arguments = {name: getattr(dataloader, name) for name in names}
    if dataloader.batch_size is None and dataloader.batch_sampler is not None:
        arguments["batch_sampler"] = dataloader.batch_sampler
    else:
        arguments.update(batch_size=dataloader.batch_size, drop_last=dataloader.drop_last)
        if not isinstance(dataloader.dataset, IterableDataset):
            arguments["sampler"] = dataloader.sampler
    if dataloader.num_workers:
        arguments.update(
            worker_type="process",
            num_workers=dataloader.num_workers,
            prefetch_factor=dataloader.prefetch_factor,
        )
    return arguments
