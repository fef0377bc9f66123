"""The arguments of an `AsyncDataLoader`, checked."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .._base.arguments import check_callable, check_int, check_number, described, is_iterable
from .._base.devices import Device, parse_device, parse_devices
from ..executor._executor import DeviceExecutor, check_executor
from ._cursor import check_generator
from ._sampling import Kind, torch_loader


class Workers:
    """Who loads: threads, or tasks, of this process, or worker processes, and how they begin.

    Raises:
        TypeError: The function is none.
        ValueError: Another type of workers, or what only processes have.
    """

    def __init__(
        self,
        worker_type: str,
        multiprocessing_context: Any,
        worker_init_fn: Callable[[int], object] | None,
        persistent: bool,
    ) -> None:
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
        self.persistent: bool = persistent
        """Whether they outlive an epoch."""


class Fetching:
    """How many batches are fetched at once and ahead, in which order, and how long one is awaited.

    Raises:
        TypeError: A number that is none.
        ValueError: A number out of range.
    """

    def __init__(
        self, num_workers: int, prefetch_factor: int | None, *, in_order: bool, timeout: float
    ) -> None:
        factor = 2 if prefetch_factor is None else prefetch_factor
        self.num_workers: int = check_int("num_workers", num_workers, at_least=1)
        self.prefetch_factor: int = check_int("prefetch_factor", factor, at_least=1)
        self.in_order: bool = in_order
        self.timeout: float = _check_timeout(timeout)

    @property
    def bound(self) -> int:
        """The most batches that are ready or being fetched."""
        return self.prefetch_factor * self.num_workers


class Arrival:
    """Where batches arrive: on no device, on one, or dealt to several; or in pinned memory.

    Raises:
        TypeError: No device.
        ValueError: Both `device` and `devices`, or one that this machine does not have.
    """

    def __init__(
        self, device: Device | None, devices: Iterable[Device] | None, *, pin_memory: bool
    ) -> None:
        self.devices: tuple[torch.device, ...] = _parse_devices(device, devices)
        self.whole: bool = devices is None
        """Whether batches go to the only device whole."""
        self.pin_memory: bool = pin_memory


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """What `AsyncDataLoader` adds to torch's `DataLoader`, or means otherwise.

    Raises:
        TypeError: A number or executor that is none.
        ValueError: A number out of range, or what an async dataset excludes.
    """

    kind: Kind
    workers: Workers
    fetching: Fetching
    arrival: Arrival
    max_failures: int
    executor: DeviceExecutor | None
    progress: bool

    def __post_init__(self) -> None:
        failures = check_int("max_failures", self.max_failures, at_least=0)
        object.__setattr__(self, "max_failures", failures)  # frozen, and not made yet
        check_executor(self.executor)
        if self.kind in (Kind.ASYNC_MAP, Kind.ASYNC_ITERABLE):
            _check_async(self.workers)

    def for_torch(self) -> dict[str, Any]:
        """What torch's loader gets for its worker processes."""
        return {
            "num_workers": self.fetching.num_workers,
            "pin_memory": self.arrival.pin_memory,
            "worker_init_fn": self.workers.worker_init_fn,
            "multiprocessing_context": self.workers.multiprocessing_context,
            "prefetch_factor": self.fetching.prefetch_factor,
            "persistent_workers": self.workers.persistent,
            "in_order": self.fetching.in_order,
        }


def _check_async(workers: Workers) -> None:
    if workers.worker_init_fn is not None:
        raise ValueError("worker_init_fn needs workers, and an async dataset is read by tasks")
    if workers.processes:
        raise ValueError('worker_type="process" needs a plain dataset: this one is asynchronous')


def _check_timeout(timeout: float) -> float:
    if isinstance(timeout, int | float) and timeout < 0:  # in torch's words
        raise ValueError(f"timeout option should be non-negative, got {timeout}")
    return check_number("timeout", timeout, zero=True)


def _parse_devices(
    device: Device | None, devices: Iterable[Device] | None
) -> tuple[torch.device, ...]:
    if device is not None and devices is not None:
        raise ValueError(f"expected a device or devices, got {device=} and {devices=}")
    if devices is not None:
        return parse_devices(devices)
    return () if device is None else (parse_device(device),)


def torch_loader_for(dataset: Any, settings: Settings, **options: Any) -> "DataLoader[Any]":
    """A torch loader of the dataset, for its checks and its samplers: it is never iterated.

    Args:
        dataset: That was given.
        settings: Of the loader.
        options: torch's, for order and batches.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: Worker processes cannot share out the dataset; or as torch's.
    """
    if settings.workers.processes:
        _check_shared_out(dataset, settings.kind)
        options = {**options, **settings.for_torch()}
    # torch's rules come first, in its words: what must not be given has no right type.
    loader = torch_loader(dataset, settings.kind, **options)
    for name in ("sampler", "batch_sampler"):
        given = options[name]
        if given is not None and not is_iterable(given):
            raise TypeError(f"{name} must be a Sampler or an iterable, not {described(given)}")
    check_generator(options["generator"])
    if options["collate_fn"] is not None:
        check_callable(options["collate_fn"])
    return loader


def _check_shared_out(dataset: object, kind: Kind) -> None:
    if kind is Kind.ITERABLE and not isinstance(dataset, IterableDataset):
        raise ValueError(
            'worker_type="process" needs a map-style dataset or an IterableDataset, which can '
            f"share itself out among processes; got {type(dataset).__name__}"
        )


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
