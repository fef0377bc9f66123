"""The arguments of an `AsyncDataLoader`, checked."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .._call import check_callable
from .._devices import Device, parse_device, parse_devices
from .._executor import DeviceExecutor
from ._dataset import Kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settings:
    """What `AsyncDataLoader` adds to torch's `DataLoader`, or means otherwise."""

    kind: Kind
    num_workers: int
    timeout: float
    worker_init_fn: Callable[[int], object] | None
    pin_memory: bool
    multiprocessing_context: Any
    prefetch_factor: int
    persistent_workers: bool
    in_order: bool
    worker_type: str
    max_failures: int
    executor: DeviceExecutor | None
    progress: bool
    devices: tuple[torch.device, ...]
    whole: bool
    """Whether batches go to the only device whole."""

    @property
    def processes(self) -> bool:
        """Whether torch's worker processes load."""
        return self.worker_type == "process"

    @property
    def bound(self) -> int:
        """The most batches that are ready or being fetched."""
        return self.prefetch_factor * self.num_workers

    def for_torch(self) -> dict[str, Any]:
        """What torch's loader gets for its worker processes."""
        return {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "worker_init_fn": self.worker_init_fn,
            "multiprocessing_context": self.multiprocessing_context,
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": self.persistent_workers,
            "in_order": self.in_order,
        }


def check_numbers(
    num_workers: int, timeout: float, prefetch_factor: int | None, max_failures: int
) -> int:
    """Raise unless they are in range; the prefetch factor, which is 2 where it is None."""
    if prefetch_factor is None:
        prefetch_factor = 2
    bounds = {"num_workers": 1, "prefetch_factor": 1, "max_failures": 0}
    values = (num_workers, prefetch_factor, max_failures)
    for (name, least), value in zip(bounds.items(), values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, not {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if timeout < 0:
        raise ValueError(f"timeout option should be non-negative, got {timeout}")
    return prefetch_factor


def check_functions(*functions: Callable[..., object] | None) -> None:
    """Raise TypeError unless workers can call them."""
    for function in functions:
        if function is not None:
            check_callable(function)


def check_workers(
    dataset: object,
    kind: Kind,
    worker_type: str,
    worker_init_fn: object,
    multiprocessing_context: object,
    executor: object,
) -> None:
    """Raise unless there are such workers for such a dataset."""
    if worker_type not in ("thread", "process"):
        raise ValueError(f'worker_type must be "thread" or "process", got {worker_type!r}')
    if executor is not None and not isinstance(executor, DeviceExecutor):
        raise TypeError(f"executor must be a DeviceExecutor, not {type(executor).__name__}")
    asynchronous = kind in (Kind.ASYNC_MAP, Kind.ASYNC_ITERABLE)
    if asynchronous and worker_init_fn is not None:
        raise ValueError("worker_init_fn needs workers, and an async dataset is read by tasks")
    if worker_type == "thread":
        if multiprocessing_context is not None:
            raise ValueError('multiprocessing_context needs worker_type="process"')
        return
    if asynchronous:
        raise ValueError('worker_type="process" needs a plain dataset: this one is asynchronous')
    if kind is Kind.ITERABLE and not isinstance(dataset, IterableDataset):
        raise ValueError(
            'worker_type="process" needs a map-style dataset or an IterableDataset, which can '
            f"share itself out among processes; got {type(dataset).__name__}"
        )


def check_devices(
    device: Device | None, devices: Iterable[Device] | None
) -> tuple[torch.device, ...]:
    """Where batches go; nowhere if neither was given."""
    if device is not None and devices is not None:
        raise ValueError(f"expected a device or devices, got {device=} and {devices=}")
    if devices is not None:
        return parse_devices(devices)
    return () if device is None else (parse_device(device),)


def arguments_of(dataloader: "DataLoader[Any]") -> dict[str, Any]:
    """The arguments that make an `AsyncDataLoader` of the same settings.

    Raises:
        TypeError: It is no `DataLoader`, or iterates in a way of its own.
    """
    if not isinstance(dataloader, DataLoader):
        raise TypeError(f"expected a torch DataLoader, got {type(dataloader).__name__}")
    if type(dataloader).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"{type(dataloader).__name__} iterates in a way of its own: as any iterable, it can be "
            "the dataset of an AsyncDataLoader with batch_size=None"
        )
    names = inspect.signature(DataLoader).parameters.keys() - {
        *("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"),
        *("num_workers", "prefetch_factor", "pin_memory_device"),
    }
    arguments = {name: getattr(dataloader, name) for name in names}
    if isinstance(dataloader.dataset, IterableDataset):
        arguments.update(batch_size=dataloader.batch_size, drop_last=dataloader.drop_last)
    elif dataloader.batch_size is None and dataloader.batch_sampler is not None:
        arguments.update(batch_sampler=dataloader.batch_sampler)
    else:
        arguments.update(
            batch_size=dataloader.batch_size,
            sampler=dataloader.sampler,
            drop_last=dataloader.drop_last,
        )
    if dataloader.num_workers:
        arguments.update(
            worker_type="process",
            num_workers=dataloader.num_workers,
            prefetch_factor=dataloader.prefetch_factor,
        )
    return arguments
