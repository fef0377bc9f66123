"""The arguments of an `AsyncDataLoader`, checked."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .._call import check_callable
from .._checks import check_int, check_number
from .._devices import Device, parse_device, parse_devices
from .._executor import DeviceExecutor, check_executor
from ._checks import check_generator, is_iterable
from ._dataset import Kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settings:
    """What `AsyncDataLoader` adds to torch's `DataLoader`, or means otherwise.

    Raises:
        TypeError: A number, function or executor that is none.
        ValueError: A number out of range, or what excludes each other.
    """

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

    def __post_init__(self) -> None:
        numbers = {
            "num_workers": check_int("num_workers", self.num_workers, at_least=1),
            "prefetch_factor": check_int("prefetch_factor", self.prefetch_factor, at_least=1),
            "max_failures": check_int("max_failures", self.max_failures, at_least=0),
            "timeout": _check_timeout(self.timeout),
        }
        for name, number in numbers.items():
            object.__setattr__(self, name, number)  # frozen, and not made yet
        if self.worker_init_fn is not None:
            check_callable(self.worker_init_fn)
        check_executor(self.executor)
        self._check_workers()

    def _check_workers(self) -> None:
        if self.worker_type not in ("thread", "process"):
            raise ValueError(f'worker_type must be "thread" or "process", got {self.worker_type!r}')
        asynchronous = self.kind in (Kind.ASYNC_MAP, Kind.ASYNC_ITERABLE)
        if asynchronous and self.worker_init_fn is not None:
            raise ValueError("worker_init_fn needs workers, and an async dataset is read by tasks")
        if not self.processes and self.multiprocessing_context is not None:
            raise ValueError('multiprocessing_context needs worker_type="process"')
        if self.processes and asynchronous:
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


def _check_timeout(timeout: float) -> float:
    if isinstance(timeout, int | float) and timeout < 0:  # in torch's words
        raise ValueError(f"timeout option should be non-negative, got {timeout}")
    return check_number("timeout", timeout, zero=True)


def check_shared_out(dataset: object, settings: Settings) -> None:
    """Raise ValueError unless worker processes, if they load, can share out the dataset."""
    iterable = settings.kind is Kind.ITERABLE and not isinstance(dataset, IterableDataset)
    if settings.processes and iterable:
        raise ValueError(
            'worker_type="process" needs a map-style dataset or an IterableDataset, which can '
            f"share itself out among processes; got {type(dataset).__name__}"
        )


def check_order(sampler: object, batch_sampler: object, generator: torch.Generator | None) -> None:
    """Raise TypeError unless they can say which samples come, in which order: each may be None."""
    for name, given in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if given is not None and not is_iterable(given):
            raise TypeError(f"{name} must be a Sampler or an iterable, not {type(given).__name__}")
    check_generator(generator)


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
