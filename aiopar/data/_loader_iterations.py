"""An iteration of an `AsyncDataLoader`, put together: source, stages, and who runs them."""

from collections.abc import AsyncIterable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory

from .._caller import CallerState
from .._executor import DeviceExecutor
from ._async_fetch import AsyncFetch
from ._dataset import Kind
from ._fetch import NO_BATCH, CollateOnly, Collation, Fetch, Loaded, WorkerInit
from ._leaving import Leaving
from ._loader_ending import Ending
from ._loader_settings import Settings
from ._loader_stream import LOAD, TO_DEVICES, Delivery, LoaderStream, Record
from ._pinned import DeviceCopies, can_pin
from ._plan import Map
from ._process import ProcessBatches, WorkerProcesses
from ._progress import Bar, length_of, progress_bar
from ._sampling import Sampling
from ._sampling_requests import AsyncRequests, Requests
from ._stream import Stream

COLLATORS = 2
"""Threads that collate what tasks have fetched."""


class Iterations:
    """Makes the iterations of one loader, and keeps what outlives each of them.

    Args:
        settings: Of the loader.
        sampling: Of the loader.
    """

    def __init__(self, settings: Settings, sampling: Sampling) -> None:
        self._settings = settings
        self._sampling = sampling
        devices = settings.arrival.devices
        self._copies = DeviceCopies(devices, whole=settings.arrival.whole) if devices else None
        self._processes = (
            WorkerProcesses(sampling, settings.for_torch()) if settings.workers.processes else None
        )
        self._executor: DeviceExecutor | None = None
        # Also of those whose reader is gone: while anything of theirs may run.
        self._endings: list[Ending] = []
        self._init: WorkerInit | None = None

    def begin(self, record: Record) -> LoaderStream:
        """An iteration; nothing of it starts before it is read."""
        settings, caller, leaving = self._settings, CallerState(), Leaving()
        fetching, processes = settings.fetching, settings.workers.processes
        executor, owned = self._workers()
        init = self._worker_init()
        copy = None if self._copies is None else partial(self._copies, readers=caller.streams)
        finish: Callable[[Any], Any] | None = None
        bound = fetching.bound
        if copy is None:
            finish = pin_memory if settings.arrival.pin_memory and can_pin() else None
        elif not processes and fetching.prefetch_factor == 1:
            # There is no room for a batch that waits between fetching and copying.
            copy, finish = None, copy
        elif not processes:
            bound -= 1
        source, load, delivery = self._load(leaving, executor, init, finish, bound)
        steps = [load]
        if copy is not None:
            # One is copied while the consumer computes: no more of the device's memory is taken.
            steps.append(Map(_Copied(copy), bound=1, in_order=fetching.in_order, name=TO_DEVICES))
        stream: Stream[Loaded] = Stream(
            source,
            steps,
            caller=caller,
            executor=executor,
            timeout=fetching.timeout or None,
            bar=self._bar(),
            name="AsyncDataLoader",
        )
        ending = Ending(stream, leaving, owned)
        self._endings = [*(other for other in self._endings if not other.over), ending]
        return LoaderStream(
            stream,
            ending,
            delivery,
            record,
            max_failures=settings.max_failures,
            bound=fetching.bound,
        )

    def _bar(self) -> Callable[[], Bar] | None:
        if not self._settings.progress:
            return None
        total = length_of(self._sampling.loader)
        return partial(progress_bar, total, initial=self._sampling.skipped, unit="batch")

    def _load(
        self,
        leaving: Leaving,
        executor: DeviceExecutor,
        init: WorkerInit | None,
        finish: Callable[[Any], Any] | None,
        bound: int,
    ) -> tuple[Iterable[Any] | AsyncIterable[Any], Map, Delivery]:
        """The source, the stage that makes batches of what it yields, and who counts them."""
        settings, sampling = self._settings, self._sampling
        in_order, count = settings.fetching.in_order, settings.fetching.num_workers
        if self._processes is not None:
            batches = ProcessBatches(sampling, leaving, self._processes, settings.max_failures)
            return batches, Map(None, bound=1, name=LOAD), batches
        collate = Collation(
            sampling.loader.collate_fn,
            batched=sampling.loader.batch_sampler is not None,
            by_index=sampling.by_index,
            max_failures=settings.max_failures,
            leaving=leaving,
            by_tasks=settings.kind is Kind.ASYNC_MAP,
            finish=finish,
        )
        if settings.kind is Kind.ASYNC_ITERABLE:
            ahead = AsyncRequests(sampling, leaving, executor, settings.fetching.bound)
            collators = min(count, COLLATORS)
            return ahead, Map(CollateOnly(collate), collators, bound, in_order, LOAD), ahead
        # The samples of an iterable are read as requests are made; by index, what fetches is first
        # to touch the dataset, and calls it in each worker beside the others.
        requests = Requests(sampling, leaving, init if settings.kind is Kind.ITERABLE else None)
        fetch: Callable[[Any], Any]
        if settings.kind is Kind.ASYNC_MAP:
            fetch = AsyncFetch(sampling.dataset, collate, executor, count)
        elif settings.kind is Kind.MAP:
            fetch = Fetch(sampling.dataset, collate, init)
        else:
            fetch = CollateOnly(collate)
        return requests, Map(fetch, count, bound, in_order, LOAD), requests

    def _workers(self) -> tuple[DeviceExecutor, DeviceExecutor | None]:
        """The executor, and the same again if it is to be closed with the iteration."""
        settings = self._settings
        if settings.executor is not None:
            with suppress(ValueError):  # it has none
                return settings.executor.on("cpu"), None
        if self._executor is not None and self._executor._dispatcher.pool.closed:
            self._executor = self._init = None  # in a forked process: they stayed in its parent
        if self._executor is not None:
            return self._executor, None
        threads = settings.fetching.num_workers
        if settings.workers.processes or settings.kind in (Kind.ASYNC_MAP, Kind.ASYNC_ITERABLE):
            threads = COLLATORS
        executor = DeviceExecutor(["cpu"] * threads, thread_name_prefix="aiopar-loader")
        if not settings.workers.persistent:
            return executor, executor
        self._executor = executor
        return executor, None

    def _worker_init(self) -> WorkerInit | None:
        """Calls `worker_init_fn`, once in each thread."""
        fn = self._settings.workers.worker_init_fn
        if fn is None or self._settings.workers.processes:
            return None
        if self._init is None or self._executor is None:
            self._init = WorkerInit(fn)
        return self._init

    async def aclose(self) -> None:
        """End all iterations and what outlives them, and wait until nothing runs."""
        async with AsyncExitStack() as last_first:  # all of it, whatever a generator raises
            last_first.push_async_callback(self._close_workers)
            for ending in self._endings:
                last_first.push_async_callback(ending.aclose)

    async def _close_workers(self) -> None:
        if self._processes is not None:
            async with DeviceExecutor(["cpu"]) as executor:
                await executor.run_sync(self._processes.close)
        threads, self._executor = self._executor, None
        if threads is not None:
            await threads.aclose()


class _Copied:
    """A stage's function: puts the batch on its devices."""

    def __init__(self, copy: Callable[[Any], Any]) -> None:
        self._copy = copy

    def __call__(self, loaded: Loaded) -> Loaded:
        if loaded.batch is NO_BATCH:
            return loaded
        return loaded._replace(batch=self._copy(loaded.batch))
