"""`AsyncDataLoader`: torch's `DataLoader`, awaited."""

import inspect
import warnings
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data._utils.pin_memory import pin_memory

from .._base.arguments import (
    AsyncOnly,
    check_callable,
    check_int,
    check_number,
    described,
    is_iterable,
    length_of,
    short_repr,
)
from .._base.destructors import destructor
from .._base.devices import Device, parse_device, parse_devices
from .._base.thread_state import CallerState
from ..executor._executor import DeviceExecutor, check_executor
from ._cursor import check_generator
from ._epoch import COPY, LOAD, Epoch, LoaderStats, LoaderStream
from ._fetch import NO_BATCH, AsyncFetch, Collate, FailedSample, Fetch, Loaded, WorkerInit
from ._pinned import DeviceCopies, can_pin
from ._processes import ProcessBatches, ProcessLoader
from ._sampling import (
    AsyncRequests,
    DatasetKind,
    Sampling,
    Source,
    WrappedIterable,
    draw_requests,
    kind_of,
)
from ._steps import MapStep, StopFlag
from ._stream import Stream, progress_bar

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Batch_co = TypeVar("Batch_co", covariant=True, default=Any)
else:  # CPython 3.11 knows no defaults
    from typing import TypeVar

    Batch_co = TypeVar("Batch_co", covariant=True)


class AsyncDataLoader(AsyncOnly, Generic[Batch_co]):
    """Batches of a dataset, fetched ahead and awaited; torch's `DataLoader` with `async for`.

    Mirrors `torch.utils.data.DataLoader`, with the same arguments and checks. For the same seed and
    sampler it gives the same batches in the same order, and draws the same numbers from the
    generator (if the dataset itself draws none). It has torch's attributes, read-only.

    The dataset decides what fetches:

    - a map-style dataset (`__getitem__` or `__getitems__`): `num_workers` threads, one batch each;
    - a map-style dataset whose method is an `async def`: tasks on the event loop, `num_workers`
      *samples* at once; two threads collate;
    - an `IterableDataset` or any other iterable: threads advance its one iterator in turn, and
      collate at the same time. The dataset yields each sample once, even if it shards itself by
      `torch.utils.data.get_worker_info()`, which is None in threads. Worker processes interleave
      their shards, as in torch;
    - an async iterable: one task advances it; two threads collate.

    At most `prefetch_factor * num_workers` batches are ready or being fetched.

    Each `aiter(loader)` (each `async for`) is one epoch. Only one epoch runs at a time: another
    `aiter` raises `RuntimeError` until the first epoch has ended, was closed, or was collected.
    Leaving the loop stops fetching. `async with loader as stream: async for batch in stream` (or
    `aclose`) also waits until threads, tasks and processes have ended; threads finish the samples
    that they fetch. `state_dict` saves the position at any batch.

    Differences from torch:

    - `num_workers` is at least 1, because the event loop's thread loads nothing. Samplers run in a
      worker.
    - An error is raised after all earlier batches, with a note that names sample, batch and worker.
      It ends the epoch.
    - `timeout` raises `TimeoutError`. Worker processes that still fetch half a second after the
      loader was closed are terminated; torch gives each of them 5 seconds.
    - If an iterable has more samples than its `len`, one warning comes at the end of the epoch.
    - The deprecated `pin_memory_device` is not accepted.
    - Threads seed an `IterDataPipe` for each epoch, as torch does, but do not shard it among ranks
      (`sharding_filter`).
    - A sampler that draws in its `__iter__` does so once per epoch, as in torch without processes;
      with processes torch makes it draw twice.

    Args:
        dataset: See above.
        batch_size: Samples per batch. None: no batching, `dataset` yields batches.
        shuffle: As in torch.
        sampler: As in torch.
        batch_sampler: As in torch.
        num_workers: How many fetches run at once.
        collate_fn: As in torch; called in a worker. For type checkers, its result is the type of
            the batches. Without it batches are `Any`, or as declared: `AsyncDataLoader[Tensor]`.
        pin_memory: Whether batches come in pinned memory, if there is an accelerator. Not needed
            with `device`.
        drop_last: As in torch.
        timeout: The most seconds to wait for one batch; 0: no limit. After a timeout, the next read
            continues to wait, and the end of `async with` does not wait for stuck threads.
        worker_init_fn: Called in each worker with its number, before it fetches. Not with async
            datasets. In threads, `get_worker_info()` is None, and each sample begins with the
            caller's state, whatever this function changes of torch's state or context variables.
        multiprocessing_context: As in torch, with `worker_type="process"`.
        generator: As in torch.
        prefetch_factor: Batches ahead per worker, those being fetched included. Worker processes
            may be one or two batches further ahead.
        persistent_workers: Whether threads or processes outlive an epoch, until `aclose`.
        in_order: Whether batches come in their order, or as soon as they are ready.
        worker_type: "thread", or "process": torch's own worker processes, for map-style datasets
            and subclasses of `IterableDataset`.
        device: The device to which batches are copied while the consumer computes, as by
            `Pipeline.to`.
        devices: Several devices: a batch is a list of chunks, as by `aiopar.scatter`.
        max_failures: How many failed samples of an epoch are skipped, and recorded in `failures`.
            Samples that fail together (in `__getitems__`, in `collate_fn`, in a worker process)
            count once. An error of a sampler or an iterable is always raised.
        executor: The executor whose CPU workers load; they must be threads. If None, or if the
            executor has no CPU workers: `num_workers` threads of the loader's own.
        progress: Whether each epoch has a progress bar, with the rate and, if `len` is known, the
            time left. Needs tqdm.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: Arguments exclude each other, or a number is out of range; with torch's message
            if the rule is torch's.
        NotImplementedError: The workers of `executor` are processes or actors.

    Example:
        >>> import asyncio, torch
        >>> from aiopar.data import AsyncDataLoader
        >>> async def main():
        ...     loader = AsyncDataLoader(torch.arange(5), batch_size=2, num_workers=2)
        ...     async with loader as stream:
        ...         return [batch.tolist() async for batch in stream]
        >>> asyncio.run(main())
        [[0, 1], [2, 3], [4]]
    """

    _epoch: Epoch | None = None
    _entered: LoaderStream[Batch_co] | None = None

    def __init__(
        self,
        dataset: Source,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[Any] | Iterable[Sequence[Any]] | None = None,
        num_workers: int = 1,
        collate_fn: Callable[[Any], Batch_co] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = 2,
        persistent_workers: bool = False,
        in_order: bool = True,
        worker_type: Literal["thread", "process"] = "thread",
        device: Device | None = None,
        devices: Iterable[Device] | None = None,
        max_failures: int = 0,
        executor: DeviceExecutor | None = None,
        progress: bool = False,
    ) -> None:
        batched = batch_size is not None or batch_sampler is not None
        kind = kind_of(dataset, batched=batched)
        self._settings = _Settings(
            kind=kind,
            num_workers=num_workers,
            prefetch_factor=2 if prefetch_factor is None else prefetch_factor,
            in_order=in_order,
            timeout=timeout,
            worker_type=worker_type,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            device=device,
            devices=devices,
            max_failures=max_failures,
            executor=executor,
            progress=progress,
        )
        self._torch_loader = self._settings.torch_loader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            generator=generator,
        )
        self._sampling = Sampling(self._torch_loader, kind, persistent=persistent_workers)
        self._epochs = _EpochFactory(self._settings, self._sampling)

    @short_repr
    def __repr__(self) -> str:
        source, size = type(self.dataset).__name__, self.batch_size
        return f"of {source}, batch_size {size}, {self.num_workers} workers"

    @classmethod
    def from_dataloader(
        cls,
        dataloader: "DataLoader[Any]",
        *,
        device: Device | None = None,
        devices: Iterable[Device] | None = None,
        max_failures: int = 0,
        executor: DeviceExecutor | None = None,
        progress: bool = False,
    ) -> "AsyncDataLoader[Any]":
        """A loader with the dataset, the samplers and the settings of a torch `DataLoader`.

        The new loader has as many worker processes, or one thread if there are none.

        Args:
            dataloader: The torch loader. Its dataset, samplers and generator are not copied.
            device: As for the class.
            devices: As for the class.
            max_failures: As for the class.
            executor: As for the class.
            progress: As for the class.

        Raises:
            TypeError: `dataloader` is not a `DataLoader`, or iterates in a way of its own, as the
                loaders of PyG do. Use such a loader as the dataset, with `batch_size=None`.

        Example:
            >>> import torch
            >>> from aiopar.data import AsyncDataLoader
            >>> theirs = torch.utils.data.DataLoader(range(10), batch_size=4, drop_last=True)
            >>> len(AsyncDataLoader.from_dataloader(theirs))
            2
        """
        if not isinstance(dataloader, DataLoader):
            raise TypeError(f"expected a torch DataLoader, got {type(dataloader).__name__}")
        # What a subclass may override to give other batches.
        for name in ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation"):
            # A static lookup: it runs no property, and finds a method of this object alone.
            if inspect.getattr_static(dataloader, name) is not vars(DataLoader)[name]:
                raise TypeError(
                    f"{type(dataloader).__name__} iterates in a way of its own ({name}): use it as "
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
        return cls(
            **arguments,
            device=device,
            devices=devices,
            max_failures=max_failures,
            executor=executor,
            progress=progress,
        )

    # The attributes of torch's loader.

    @property
    def dataset(self) -> Any:
        """The dataset."""
        return self._sampling.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples per batch; None without batching, or with a batch sampler."""
        return self._torch_loader.batch_size

    @property
    def sampler(self) -> Any:
        """The sampler of indices."""
        return self._torch_loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The sampler of lists of indices; None without batching."""
        return self._torch_loader.batch_sampler

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that the samplers draw from."""
        return self._torch_loader.generator  # type: ignore[no-any-return]

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is dropped."""
        return self._torch_loader.drop_last

    @property
    def collate_fn(self) -> Callable[[Any], Any]:
        """The function that makes a batch of samples."""
        return self._torch_loader.collate_fn

    @property
    def num_workers(self) -> int:
        """How many fetches run at once."""
        return self._settings.num_workers

    @property
    def prefetch_factor(self) -> int:
        """Batches ahead per worker."""
        return self._settings.prefetch_factor

    @property
    def worker_init_fn(self) -> Callable[[int], object] | None:
        """The function that each worker calls before it fetches."""
        return self._settings.worker_init_fn

    @property
    def persistent_workers(self) -> bool:
        """Whether workers outlive an epoch."""
        return self._settings.persistent_workers

    @property
    def multiprocessing_context(self) -> Any:
        """The context of worker processes; None: the default context of multiprocessing."""
        return self._torch_loader.multiprocessing_context

    @property
    def pin_memory(self) -> bool:
        """Whether batches come in pinned memory."""
        return self._settings.pin_memory

    @property
    def timeout(self) -> float:
        """The most seconds to wait for one batch; 0: no limit."""
        return self._settings.timeout

    @property
    def in_order(self) -> bool:
        """Whether batches come in their order."""
        return self._settings.in_order

    def __len__(self) -> int:
        """The number of batches per epoch; for an iterable, computed from its own `len`.

        Raises:
            TypeError: The sampler or the iterable has no length.
        """
        return len(self._torch_loader)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch(epoch)` of the samplers and of the dataset, if they have it."""
        self._sampling.set_epoch(epoch)

    # Reading.

    def __aiter__(self) -> LoaderStream[Batch_co]:
        """The batches of the next epoch, or the rest of the epoch whose state was loaded.

        Raises:
            RuntimeError: An iteration of this loader is running.
        """
        if self._is_iterated:
            raise RuntimeError(
                "this loader is iterated already, one epoch at a time: read the first iteration to "
                "its end or close it (`aclose`), or make another loader"
            )
        self._epoch = self._epochs.begin()
        return LoaderStream(self._epoch, self._epochs)

    @property
    def _is_iterated(self) -> bool:
        return self._epoch is not None and not self._epoch.closed

    async def __aenter__(self) -> LoaderStream[Batch_co]:
        self._entered = aiter(self)
        return self._entered

    async def __aexit__(self, *exc_info: object) -> None:
        stream, self._entered = self._entered, None
        if stream is not None:
            await stream.__aexit__(*exc_info)

    async def aclose(self) -> None:
        """End the running iteration and persistent workers, and wait until they have ended.

        This also waits for earlier iterations that were left early. The loader can be iterated
        again.
        """
        await self._epochs.aclose()

    @property
    def failures(self) -> Sequence[FailedSample]:
        """The failed samples that the last iteration skipped, in the order of their batches."""
        return () if self._epoch is None else tuple(self._epoch.failures)

    def stats(self) -> LoaderStats | None:
        """The statistics of the last iteration; None before the first."""
        return None if self._epoch is None else self._epoch.stats()

    # Resuming.

    def state_dict(self) -> dict[str, Any]:
        """The position of the consumer: after which batch of which epoch.

        A loader with the same arguments that loads the state continues with the next batch, in this
        and in later epochs. Batches that were fetched ahead and not delivered do not count. A state
        from after the last batch, but before the end of the loop, continues with an empty rest.

        The state has the number of delivered batches, and the states of the generators at the start
        of the epoch. After loading, the indices of the delivered batches are drawn again, and their
        samples are not fetched. If a sampler, an iterable dataset or the dataset's iterator has
        `state_dict()` (without arguments) and `load_state_dict`, its own state is saved instead.
        Some datasets, such as Hugging Face's, begin all later epochs at a loaded state. After the
        resumed epoch they get back their state from before the first epoch. Other iterables are
        read again from their start, and so are all iterables in worker processes.

        Without `generator`, the state includes the present state of torch's default generator, and
        loading sets the generator. Other sources of randomness are not saved: `random`, or
        generators that are no attribute of a sampler.

        Returns:
            Plain values and tensors, for `torch.save` and `torch.load(weights_only=True)`, unless
            the own state of a sampler or dataset has other objects.

        Raises:
            RuntimeError: Worker processes load with `in_order=False`: torch does not tell which
                batches came.
            ValueError: The `state_dict` of a sampler or dataset raised an error. The epoch
                continues, and the state after a later batch may be available.
        """
        if self._settings.processes and not self._settings.in_order:
            raise RuntimeError(
                "the state of worker processes needs in_order=True: torch does not tell which of "
                "its batches came"
            )
        return self._sampling.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`: the next iteration has the rest of the saved epoch.

        A user's own `batch_sampler` must make batches of the same size as before.

        Args:
            state: The result of `state_dict`.

        Raises:
            RuntimeError: An iteration is running.
            TypeError: `state` is not a mapping.
            ValueError: The state is from a loader with other generators or samplers; or it is from
                within an epoch with another `batch_size` or, if worker processes share the dataset,
                another `num_workers`.
        """
        if self._is_iterated:
            raise RuntimeError("this loader is being iterated: close the iteration first")
        self._sampling.load_state_dict(state)


@dataclass(eq=False, kw_only=True)
class _Settings:
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
    device: Device | None
    devices: Iterable[Device] | None
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
            executor._dispatcher.check_shares_memory(
                "AsyncDataLoader",
                'use worker_type="process", or Pipeline(indices, executor=executor).map(load)',
            )
        if self.worker_type not in ("thread", "process"):
            raise ValueError(f'worker_type must be "thread" or "process", got {self.worker_type!r}')
        if self.device is not None and self.devices is not None:
            device, devices = self.device, self.devices
            raise ValueError(f"expected a device or devices, got {device=} and {devices=}")
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
    def bound(self) -> int:
        """How many batches may be ready or being fetched."""
        return self.prefetch_factor * self.num_workers

    @property
    def processes(self) -> bool:
        return self.worker_type == "process"

    def torch_loader(self, dataset: Any, **options: Any) -> "DataLoader[Any]":
        """A torch loader, which checks its arguments; only a `ProcessLoader` is ever iterated."""
        iterable = isinstance(dataset, IterableDataset)
        if self.processes:
            if self.kind is DatasetKind.ITERABLE and not iterable:
                raise ValueError(
                    'worker_type="process" needs a map-style dataset or an IterableDataset, which '
                    f"can share itself out among processes; got {type(dataset).__name__}"
                )
            names = (
                *("num_workers", "prefetch_factor", "pin_memory", "in_order"),
                *("worker_init_fn", "multiprocessing_context", "persistent_workers"),
            )
            options |= {name: getattr(self, name) for name in names}
        # torch checks first, because its messages on excluded arguments are better.
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


_COLLATORS = 2  # the threads that collate what tasks have fetched


class _EpochFactory:
    """Makes the epochs of a loader; owns the workers and buffers that outlive an epoch."""

    def __init__(self, settings: _Settings, sampling: Sampling) -> None:
        self._executor: DeviceExecutor | None = None  # the persistent threads; for the destructor
        self._settings = settings
        self._sampling = sampling
        self._copies: DeviceCopies | None = None
        if settings.device is not None:
            self._copies = DeviceCopies([parse_device(settings.device)], whole=True)
        elif settings.devices is not None:
            self._copies = DeviceCopies(parse_devices(settings.devices), whole=False)
        self._init: WorkerInit | None = None
        self._epochs: list[Epoch] = []  # those that may still run

    @destructor
    def __del__(self) -> None:
        # Without a GIL an idle thread keeps what it has used. Persistent processes would then wait
        # for a garbage collection, in which torch cannot end them.
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def begin(self) -> Epoch:
        """A new epoch; nothing starts before it is read."""
        settings, caller, stop = self._settings, CallerState(), StopFlag()
        executor, owned = self._workers()
        copy = None if self._copies is None else partial(self._copies, readers=caller.streams)
        finish: Callable[[Any], Any] | None = None
        bound = settings.bound
        if copy is None:
            finish = pin_memory if settings.pin_memory and can_pin() else None
        elif not settings.processes and settings.prefetch_factor == 1:
            # The buffer has no room for batches that wait to be copied, so the load step copies.
            copy, finish = None, copy
        elif not settings.processes:
            bound -= 1
        source, load, delivered = self._load(caller, stop, executor, finish, bound)
        steps = [load]
        if copy is not None:
            # One batch is copied while the consumer computes. More would take more device memory.
            copying = partial(_copied, copy=copy)
            steps.append(MapStep(copying, 1, 1, settings.in_order, COPY, described=False))
        bar: Callable[[], Any] | None = None
        if settings.progress:
            total, initial = length_of(self._sampling.loader), self._sampling.skipped
            bar = partial(progress_bar, total, initial=initial, unit="batch")
        stream: Stream[Loaded] = Stream(
            source,
            steps,
            caller=caller,
            executor=executor,
            timeout=settings.timeout or None,
            bar=bar,
            name="AsyncDataLoader",
            in_threads=not settings.processes,
        )
        limits = settings.max_failures, settings.bound
        epoch = Epoch(stream, self._sampling, stop, owned, delivered, *limits)
        self._epochs = [*(other for other in self._epochs if not other.gone), epoch]
        return epoch

    def _load(
        self,
        caller: CallerState,
        stop: StopFlag,
        executor: DeviceExecutor,
        finish: Callable[[Any], Any] | None,
        bound: int,
    ) -> tuple[Iterable[Any] | AsyncIterable[Any], MapStep, Callable[[], object] | None]:
        """The source, the stage that loads batches, and a callback for each delivered batch."""
        settings, sampling, kind = self._settings, self._sampling, self._settings.kind
        workers, in_order = settings.num_workers, settings.in_order
        if isinstance(sampling.loader, ProcessLoader):
            batches = ProcessBatches(sampling, sampling.loader, stop, settings.max_failures)
            return batches, MapStep(None, bound=1, name=LOAD), None
        collate = Collate(sampling, caller, settings.max_failures, stop, finish)
        if kind is DatasetKind.ASYNC_ITERABLE:
            requests = AsyncRequests(sampling, executor, settings.bound)
            collators = min(workers, _COLLATORS)
            step = MapStep(collate.content, collators, bound, in_order, LOAD, described=False)
            return requests, step, requests.room.release
        fetch: Callable[[Any], Any]
        begin_worker: Callable[[], object] | None = None
        if kind is DatasetKind.ASYNC_MAP:
            fetch = AsyncFetch(sampling.dataset, collate, executor, workers)
        elif kind is DatasetKind.MAP:
            fetch = Fetch(sampling.dataset, collate, self._worker_init())
        else:
            # The requests have the samples already, so the workers only collate.
            fetch, init = collate.content, self._worker_init()
            begin_worker = None if init is None else partial(init, caller)
        drawn = draw_requests(sampling, stop, begin_worker)
        return drawn, MapStep(fetch, workers, bound, in_order, LOAD, described=False), None

    def _workers(self) -> tuple[DeviceExecutor, DeviceExecutor | None]:
        """The executor, and the executor again if it must end with the epoch."""
        settings = self._settings
        if settings.executor is not None:
            with suppress(ValueError):  # the executor has no CPU workers
                return settings.executor.on("cpu"), None
        if self._executor is not None and self._executor._dispatcher.pool.closed:
            self._executor = self._init = None  # a forked process has no threads
        if self._executor is not None:
            return self._executor, None
        one_by_one = settings.processes or settings.kind.is_async
        threads = _COLLATORS if one_by_one else settings.num_workers
        executor = DeviceExecutor(["cpu"] * threads, thread_name_prefix="aiopar-loader")
        if not settings.persistent_workers:
            return executor, executor
        self._executor = executor
        return executor, None

    def _worker_init(self) -> WorkerInit | None:
        fn = self._settings.worker_init_fn
        if fn is not None and (self._init is None or self._executor is None):
            self._init = WorkerInit(fn)
        return self._init

    async def aclose(self) -> None:
        """End all epochs and persistent workers, and wait until nothing runs."""
        async with AsyncExitStack() as stack:  # close everything, even if a generator raises
            stack.push_async_callback(self._close_workers)
            for epoch in self._epochs:
                stack.push_async_callback(epoch.aclose)

    async def _close_workers(self) -> None:
        loader = self._sampling.loader
        if isinstance(loader, ProcessLoader):
            async with DeviceExecutor(["cpu"]) as executor:
                await executor.run_sync(loader.close)
        threads, self._executor = self._executor, None
        if threads is not None:
            await threads.aclose()


def _copied(loaded: Loaded, copy: Callable[[Any], Any]) -> Loaded:
    if loaded.batch is NO_BATCH:
        return loaded
    return loaded._replace(batch=copy(loaded.batch))
