"""`AsyncDataLoader`: torch's `DataLoader`, awaited."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal

import torch
from torch.utils.data import DataLoader, Sampler

from .._base.arguments import AsyncOnly, short_repr
from .._base.devices import Device
from ..executor._executor import DeviceExecutor
from ._epoch import Epoch, EpochFactory, LoaderStats, LoaderStream
from ._fetch import FailedSample
from ._loader_settings import LoaderSettings, arguments_of, devices_of
from ._sampling import Sampling, Source, kind_of

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
    that they fetch. Works under asyncio and trio. `state_dict` saves the position at any batch.

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
        timeout: The most seconds to wait for one batch; 0: no limit. No batch is lost by a timeout:
            the next read continues to wait. After a timeout, the end of `async with` does not wait
            for threads, which cannot be interrupted.
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
        device: The device on which batches arrive, copied as by `Pipeline.to` while the consumer
            computes.
        devices: Several devices: a batch is a list of chunks, one per device, as by
            `aiopar.scatter`.
        max_failures: How many samples of an epoch may fail. They are skipped, and recorded in
            `failures`. Samples that fail together (in `__getitems__`, in `collate_fn`, in a worker
            process) are skipped together, and count once. An error of a sampler or an iterable is
            always raised.
        executor: The executor whose CPU workers load. None, or if it has none: `num_workers`
            threads of the loader's own.
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
        self._settings = LoaderSettings(
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
            devices=devices_of(device, devices),
            whole=devices is None,
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
        self._epochs = EpochFactory(self._settings, self._sampling)

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
                loaders of PyG do. Use it as the dataset, with `batch_size=None`.

        Example:
            >>> import torch
            >>> from aiopar.data import AsyncDataLoader
            >>> theirs = torch.utils.data.DataLoader(range(10), batch_size=4, drop_last=True)
            >>> len(AsyncDataLoader.from_dataloader(theirs))
            2
        """
        return cls(
            **arguments_of(dataloader),
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
        generator: torch.Generator | None = self._torch_loader.generator
        return generator

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
        return LoaderStream(self._epoch)

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
        and in later epochs. Batches that were fetched ahead and not delivered do not count. After
        the last batch, before the loop has ended, the rest of the epoch is empty.

        The state has the number of delivered batches, and the states of the generators at the start
        of the epoch. After loading, the indices of the delivered batches are drawn again, and their
        samples are not fetched. If a sampler, an iterable dataset or the dataset's iterator has
        `state_dict()` and `load_state_dict`, its own state is saved instead. If a dataset keeps a
        loaded state for all later epochs, as Hugging Face's do, its state from before the first
        epoch is loaded after the resumed epoch. Other iterables are read again from their start. So
        are iterables in worker processes, and datasets whose `state_dict` takes arguments.

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
