"""The arguments of an `AsyncDataLoader`: they are all checked here."""

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .._base.arguments import check_callable, check_int, check_number, described, is_iterable
from .._base.devices import Device, parse_device, parse_devices
from ..executor._executor import DeviceExecutor, check_executor
from ._cursor import check_generator
from ._pinned import can_pin
from ._processes import ProcessLoader
from ._sampling import DatasetKind, WrappedIterable, kind_of


class LoaderSettings:
    """What `AsyncDataLoader` adds to torch's `DataLoader`, or means otherwise; see there.

    Raises:
        TypeError: A value is of a wrong type.
        ValueError: A number is out of range, or arguments exclude each other.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batched: bool,
        num_workers: int,
        prefetch_factor: int | None,
        in_order: bool,
        timeout: float,
        worker_type: str,
        worker_init_fn: Callable[[int], object] | None,
        multiprocessing_context: Any,
        persistent_workers: bool,
        pin_memory: bool,
        device: Device | None,
        devices: Iterable[Device] | None,
        max_failures: int,
        executor: DeviceExecutor | None,
        progress: bool,
    ) -> None:
        self.kind: DatasetKind = kind_of(dataset, batched=batched)
        self.pin_memory: bool = pin_memory
        self.devices: tuple[torch.device, ...] = _parse_devices(device, devices)
        self.whole: bool = devices is None
        """Whether a batch goes to the device whole, not as a list of chunks."""
        factor = 2 if prefetch_factor is None else prefetch_factor
        self.num_workers: int = check_int("num_workers", num_workers, at_least=1)
        self.prefetch_factor: int = check_int("prefetch_factor", factor, at_least=1)
        self.in_order: bool = in_order
        if isinstance(timeout, int | float) and timeout < 0:
            raise ValueError(f"timeout option should be non-negative, got {timeout}")  # as torch
        self.timeout: float = check_number("timeout", timeout, zero=True)
        if worker_init_fn is not None:
            check_callable(worker_init_fn)
        if worker_type not in ("thread", "process"):
            raise ValueError(f'worker_type must be "thread" or "process", got {worker_type!r}')
        self.processes: bool = worker_type == "process"
        """Whether torch's worker processes load."""
        if not self.processes and multiprocessing_context is not None:
            raise ValueError('multiprocessing_context needs worker_type="process"')
        self.multiprocessing_context: Any = multiprocessing_context
        self.worker_init_fn: Callable[[int], object] | None = worker_init_fn
        self.persistent_workers: bool = persistent_workers
        self.max_failures: int = check_int("max_failures", max_failures, at_least=0)
        self.executor: DeviceExecutor | None = check_executor(executor)
        self.progress: bool = progress
        if self.kind.is_async and worker_init_fn is not None:
            raise ValueError("worker_init_fn needs workers, and an async dataset is read by tasks")
        if self.kind.is_async and self.processes:
            raise ValueError(
                'worker_type="process" needs a plain dataset: this one is asynchronous'
            )

    @property
    def bound(self) -> int:
        """The most batches that are ready or being fetched."""
        return self.prefetch_factor * self.num_workers

    def torch_loader(self, dataset: Any, **options: Any) -> "DataLoader[Any]":
        """A torch loader of the dataset, which checks its arguments and makes the samplers.

        It is a `ProcessLoader` if worker processes load. Otherwise it is never iterated.

        Args:
            dataset: The dataset.
            options: The arguments of torch's loader for order and batches.

        Raises:
            TypeError: An argument is of a wrong type.
            ValueError: Worker processes cannot share out the dataset; or as torch's.
        """
        iterable = isinstance(dataset, IterableDataset)
        if self.processes:
            if self.kind is DatasetKind.ITERABLE and not iterable:
                raise ValueError(
                    'worker_type="process" needs a map-style dataset or an IterableDataset, which '
                    f"can share itself out among processes; got {type(dataset).__name__}"
                )
            options |= {name: getattr(self, name) for name in _PROCESS_OPTIONS}
        # torch's rules come first, in its words: an argument that must not be given has no type.
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


def _parse_devices(
    device: Device | None, devices: Iterable[Device] | None
) -> tuple[torch.device, ...]:
    if device is not None and devices is not None:
        raise ValueError(f"expected a device or devices, got {device=} and {devices=}")
    if devices is not None:
        return parse_devices(devices)
    return () if device is None else (parse_device(device),)


def arguments_of(dataloader: "DataLoader[Any]") -> dict[str, Any]:
    """The arguments that make an `AsyncDataLoader` of the same settings.

    Raises:
        TypeError: It is no `DataLoader`, or its class has an `__iter__` of its own.
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
