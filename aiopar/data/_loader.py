"""`AsyncDataLoader`: torch's `DataLoader`, awaited."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch.utils.data import DataLoader, Sampler

from .._base.arguments import short_repr
from .._base.devices import Device
from ..executor._executor import DeviceExecutor
from ._epoch import Iterations, LoaderStats, LoaderStream, Record
from ._fetch import FailedSample
from ._loader_settings import Arrival, Fetching, Settings, Workers, arguments_of, torch_loader_for
from ._pinned import can_pin
from ._sampling import Sampling, Source, kind_of


class TorchAttributes:
    """What torch's loader tells of itself, by the same names; read only.

    Args:
        settings: Of the loader.
        torch_loader: Made of the same arguments.
        dataset: That was given.
    """

    def __init__(self, settings: Settings, torch_loader: "DataLoader[Any]", dataset: Any) -> None:
        self._settings = settings
        self._torch_loader = torch_loader
        self._dataset = dataset

    @property
    def dataset(self) -> Any:
        """What it reads from."""
        return self._dataset

    @property
    def batch_size(self) -> int | None:
        """Samples a batch; None without batching, or with a batch sampler."""
        return self._torch_loader.batch_size

    @property
    def sampler(self) -> Any:
        """What yields indices."""
        return self._torch_loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """What yields lists of indices; None without batching."""
        return self._torch_loader.batch_sampler

    @property
    def generator(self) -> torch.Generator | None:
        """What the order is drawn from."""
        generator: torch.Generator | None = self._torch_loader.generator
        return generator

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is left out."""
        return self._torch_loader.drop_last

    @property
    def collate_fn(self) -> Callable[[Any], Any]:
        """What makes a batch of samples."""
        return self._torch_loader.collate_fn

    @property
    def num_workers(self) -> int:
        """How many fetches there are at once."""
        return self._settings.fetching.num_workers

    @property
    def prefetch_factor(self) -> int:
        """Batches ahead for each worker."""
        return self._settings.fetching.prefetch_factor

    @property
    def worker_init_fn(self) -> Callable[[int], object] | None:
        """What is called in each worker before it fetches."""
        return self._settings.workers.worker_init_fn

    @property
    def persistent_workers(self) -> bool:
        """Whether workers live on after an epoch."""
        return self._settings.workers.persistent

    @property
    def multiprocessing_context(self) -> Any:
        """What starts worker processes; None: what multiprocessing starts others by."""
        return self._torch_loader.multiprocessing_context

    @property
    def pin_memory(self) -> bool:
        """Whether batches are to come in pinned memory."""
        return self._settings.arrival.pin_memory

    @property
    def timeout(self) -> float:
        """The most seconds to wait for one batch; 0: for ever."""
        return self._settings.fetching.timeout

    @property
    def in_order(self) -> bool:
        """Whether batches come in their order."""
        return self._settings.fetching.in_order

    def __len__(self) -> int:
        """How many batches an epoch has; of an iterable, what its own `len` makes one expect.

        Raises:
            TypeError: The sampler, or the iterable, has no length.
        """
        return len(self._torch_loader)


class AsyncDataLoader(TorchAttributes):
    """Batches of a dataset, fetched ahead and awaited; torch's `DataLoader` with `async for`.

    Mirrors `torch.utils.data.DataLoader`: the same arguments, the same checks, and for the same
    seed and sampler the same batches in the same order, the default sampler's use of the generator
    included (for datasets that draw no random numbers themselves). `len`, and torch's attributes
    (read only here), are torch's.

    What `dataset` may be, and who fetches:

    - a map-style dataset (`__getitem__` or `__getitems__`): `num_workers` threads, a batch each;
    - one with an `async def` of either: tasks on the event loop, `num_workers` *samples* at once;
      batches are collated on two threads;
    - an `IterableDataset` or any iterable: threads take turns to step its one iterator, and collate
      beside each other. There `torch.utils.data.get_worker_info()` is None, so that a dataset that
      shards itself by it yields everything, once, in its order (with torch's worker processes it
      comes interleaved; with `worker_type="process"` here too);
    - any async iterable: as that, stepped by one task.

    Never more than `prefetch_factor * num_workers` batches are ready or being fetched.

    Each `aiter(loader)` (each `async for`) is one epoch. There is one at a time: a second, while
    the first is neither at its end, closed nor gone, is a `RuntimeError`. Leaving the loop stops
    fetching; `async with loader as stream: async for batch in stream` (or `aclose`) also waits
    until threads, tasks and processes are gone, which is after the samples that they fetch. Works
    under asyncio and trio.

    `state_dict` says where the consumer is, at any batch; see there.

    Differences from torch: `num_workers` is at least 1, for nothing is loaded on the event loop's
    thread; samplers run in a worker; an error is raised once all batches before it were delivered,
    with a note that names sample, batch and worker, and ends the epoch; `timeout` raises
    `TimeoutError`; an iterable that has more than its `len` said is warned of once, at the end; the
    deprecated `pin_memory_device` is not taken. In threads and tasks `get_worker_info()` is None,
    of map-style datasets too, as by torch without processes: there is one dataset, not a copy for
    each worker. An `IterDataPipe` is seeded for each epoch as by torch, but threads do not share it
    out among ranks (`sharding_filter`). A sampler that draws when it is *begun* (not at its first
    index) is begun once an epoch, as by torch without processes; torch's processes begin it twice.

    Args:
        dataset: See above.
        batch_size: Samples a batch. None: `dataset` yields batches.
        shuffle: As torch's.
        sampler: As torch's.
        batch_sampler: As torch's.
        num_workers: How many fetches there are at once.
        collate_fn: As torch's; called in a worker.
        pin_memory: Batches in pinned memory, where there is an accelerator. With `device` this goes
            without saying.
        drop_last: As torch's.
        timeout: The most seconds to wait for one batch; 0: for ever. The wait that is given up
            loses no batch.
        worker_init_fn: Called in each worker with its number, before it fetches. Not with async
            datasets.
        multiprocessing_context: As torch's, with `worker_type="process"`.
        generator: As torch's.
        prefetch_factor: Batches ahead for each worker, those being fetched included. (Worker
            processes are torch's: there, one or two more are on their way to the consumer.)
        persistent_workers: Whether threads or processes live on after an epoch, until `aclose`.
        in_order: Whether batches come in their order, or as they are ready.
        worker_type: "thread", or "process": torch's own worker processes, for map-style datasets
            and `IterableDataset`s.
        device: Where batches arrive: tensors in them are copied, through pinned memory that is
            used again, on a stream of their own while the consumer computes; complete when the
            batch comes.
        devices: Several: batches arrive as a list with a chunk for each, as `aiopar.scatter` deals.
        max_failures: How many samples of an epoch may fail: they are left out of their batches, and
            recorded in `failures`. What fails together (in `__getitems__`, in `collate_fn`, in a
            worker process) is left out together, and counts once. An error of a sampler, or of
            what is iterated, is always raised.
        executor: Whose CPU workers to use, as many as it has. None, or where it has none:
            `num_workers` threads of the loader's own.
        progress: Whether each epoch has a bar, with rate and, where `len` is known, time left.
            Needs tqdm.

    Raises:
        TypeError: An argument is of a wrong type.
        ValueError: Arguments that exclude each other, or out of range; torch's words where it is
            torch's rule.

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

    _entered: LoaderStream | None = None

    def __init__(
        self,
        dataset: Source,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[Any] | Iterable[Sequence[Any]] | None = None,
        num_workers: int = 1,
        collate_fn: Callable[[Any], Any] | None = None,
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
        kind = kind_of(dataset, batched=batch_size is not None or batch_sampler is not None)
        arrival = Arrival(device, devices, pin_memory=pin_memory)
        fetching = Fetching(num_workers, prefetch_factor, in_order=in_order, timeout=timeout)
        workers = Workers(worker_type, multiprocessing_context, worker_init_fn, persistent_workers)
        settings = Settings(kind, workers, fetching, arrival, max_failures, executor, progress)
        order = {"shuffle": shuffle, "sampler": sampler, "batch_sampler": batch_sampler}
        batches = {"batch_size": batch_size, "drop_last": drop_last, "collate_fn": collate_fn}
        theirs = torch_loader_for(dataset, settings, **order, **batches, generator=generator)
        _warn_if_not_pinned(settings)
        self._sampling = Sampling(theirs, kind, persistent=persistent_workers)
        super().__init__(settings, theirs, self._sampling.dataset)
        self._iterations = Iterations(settings, self._sampling)
        self._record = Record()
        self._running: Callable[[], LoaderStream | None] = _nothing

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
    ) -> Self:
        """A loader of the dataset, the samplers and the settings of a torch `DataLoader`.

        With worker processes if that has any, else with one thread.

        Args:
            dataloader: Its dataset, samplers and generator are used, not copied.
            device: As for the class.
            devices: As for the class.
            max_failures: As for the class.
            executor: As for the class.
            progress: As for the class.

        Raises:
            TypeError: It is no `DataLoader`, or one of a class that iterates in its own way.
            ValueError: As from the class.

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

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and dataset, those that have a `set_epoch`, which epoch comes next."""
        self._sampling.set_epoch(epoch)

    # Reading.

    def __aiter__(self) -> LoaderStream:
        """The batches of the next epoch, or what remains of the one that was loaded.

        Raises:
            RuntimeError: An iteration of this loader is under way.
        """
        running = self._running()
        if running is not None and not running.closed:
            raise RuntimeError(
                "this loader is iterated already, one epoch at a time: read the first iteration to "
                "its end or close it (`aclose`), or make another loader"
            )
        self._record = Record()
        stream = self._iterations.begin(self._record)
        self._running = weakref.ref(stream)
        return stream

    async def __aenter__(self) -> LoaderStream:
        self._entered = aiter(self)
        return self._entered

    async def __aexit__(self, *exc_info: object) -> None:
        stream, self._entered = self._entered, None
        if stream is not None:
            await stream.__aexit__(*exc_info)

    async def aclose(self) -> None:
        """End the iteration that is under way, and persistent workers; wait until they are gone.

        So it does for iterations that were broken off: nothing of the loader runs any more. It can
        be iterated again.
        """
        running = self._running()
        if running is not None:
            await running.aclose()
        await self._iterations.aclose()

    @property
    def failures(self) -> Sequence[FailedSample]:
        """The samples that were left out of the last iteration, in the order of their batches."""
        return tuple(self._record.failures)

    def stats(self) -> LoaderStats | None:
        """What the last iteration has done so far; None before the first."""
        running = self._running()
        return self._record.stats if running is None or running.closed else running.stats()

    # Resuming.

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer is: after which batch of which epoch.

        A loader made with the same arguments that loads it goes on with the batch that would have
        come next here, in this and in later epochs. What was fetched ahead does not count. After
        the last batch, before the loop has ended, the epoch has a remainder without batches.

        It has the states of the generators at the epoch's start and the number of batches that were
        delivered: on loading, the indices before them are drawn again, and nothing is fetched. A
        sampler that has `state_dict()` and `load_state_dict` is asked at the epoch's start and
        after each of its batches instead, as an iterable dataset is that has them. Of other
        iterables, what was delivered is read again and skipped; also with worker processes, which
        have copies of the dataset, and where its `state_dict` takes arguments, which a loader of
        its own knows.

        Without `generator`, torch's default one is part of it, as it is at this call; loading sets
        it. Other sources of randomness (`random`, a sampler's own that it does not tell) are not.

        Returns:
            Plain values and tensors: for `torch.save` and `torch.load(weights_only=True)`, unless a
            stateful sampler has other things in its own.

        Raises:
            RuntimeError: With worker processes and `in_order=False`: torch does not tell which
                batches came.
            ValueError: The sampler or dataset, which has a state of its own, raised an error
                instead of giving it. The epoch goes on; behind a later batch there may be one.
        """
        if self._settings.workers.processes and not self._settings.fetching.in_order:
            raise RuntimeError(
                "the state of worker processes needs in_order=True: torch does not tell which of "
                "its batches came"
            )
        return self._sampling.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: the next iteration has what remains of that epoch.

        A `batch_sampler` of one's own has to make batches of the same size as the one before.

        Raises:
            RuntimeError: An iteration is under way.
            TypeError: `state` is no dict.
            ValueError: It is not from a loader with the same generators and samplers, or it is from
                within an epoch of one with another `batch_size`, or, where worker processes share
                out the dataset, another `num_workers`.
        """
        running = self._running()
        if running is not None and not running.closed:
            raise RuntimeError("this loader is being iterated: close the iteration first")
        self._sampling.load_state_dict(state)


def _warn_if_not_pinned(settings: Settings) -> None:
    if settings.arrival.pin_memory and not settings.workers.processes and not can_pin():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device "
            "pinned memory won't be used.",
            stacklevel=3,  # of who makes the loader
        )


def _nothing() -> None:
    return None
