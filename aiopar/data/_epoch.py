"""One epoch of an `AsyncDataLoader`: building, reading and closing it."""

import sys
from collections.abc import AsyncIterable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

from torch.utils.data._utils.pin_memory import pin_memory

from .._base.arguments import AsyncOnly, length_of, short_repr
from .._base.thread_state import CallerState
from ..executor._executor import DeviceExecutor
from ..futures._waiting import close_fully
from ._fetch import NO_BATCH, AsyncFetch, Collate, FailedSample, Fetch, Loaded, WorkerInit
from ._loader_settings import LoaderSettings
from ._pinned import DeviceCopies, can_pin
from ._processes import ProcessBatches, ProcessLoader
from ._sampling import AsyncRequests, DatasetKind, Sampling, draw_requests
from ._steps import MapStep, StopFlag
from ._stream import Stream, progress_bar

_LOAD = "load"
"""The stage that fetches and collates."""

_COPY = "device"
"""The stage that copies to devices."""

_COLLATORS = 2
"""The number of threads that collate what tasks have fetched."""


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """The work of one iteration of a loader, and how long each side waited for the other.

    Attributes:
        batches: How many batches were delivered.
        samples: How many samples the batches had.
        failures: How many failed samples were skipped.
        consumer_seconds: How long the consumer waited for batches.
        worker_seconds: How long workers waited because the buffer was full, summed over them.
        elapsed_seconds: The time since the first read.
        buffered: How many batches are ready or being fetched now.
        bound: The most batches that may be ready or being fetched.
        bottleneck: One line that says whether the loader or the consumer is the bottleneck.
    """

    batches: int
    samples: int
    failures: int
    consumer_seconds: float
    worker_seconds: float
    elapsed_seconds: float
    buffered: int
    bound: int
    bottleneck: str


class Epoch:
    """One iteration of a loader: its counts and failures, and how it is closed.

    The consumer has a `LoaderStream`, which is collected if a loop is left early. Threads may still
    read samples then, and the loader keeps this object to wait for them. The workers of `executor`
    end with the epoch. `delivered` is called for each batch that was delivered or skipped.
    """

    def __init__(
        self,
        stream: "Stream[Loaded]",
        sampling: Sampling,
        settings: LoaderSettings,
        stop: StopFlag,
        executor: DeviceExecutor | None,
        delivered: Callable[[], object] | None,
    ) -> None:
        self._stream: Stream[Loaded] | None = stream
        self._sampling = sampling
        self._settings = settings
        self._stop = stop
        self._executor = executor
        self._on_delivered = delivered
        self._stats: LoaderStats | None = None
        self._samples = 0
        self.batches: int = 0
        """How many batches were delivered."""
        self.failures: list[FailedSample] = []
        self.closed: bool = False
        """Whether no batch will come."""

    async def next(self) -> Any:
        """The next batch.

        Raises:
            StopAsyncIteration: The epoch has ended, or was closed.
        """
        stream = self._stream
        if stream is None:
            raise StopAsyncIteration
        try:
            while True:
                # The loaded batch gets no name: an error's traceback would keep it alive.
                batch = self._deliver(stream, await anext(stream))
                if batch is not NO_BATCH:
                    return batch
        except StopAsyncIteration:
            try:
                if not self.closed:  # another task may have closed it
                    self._sampling.finished()
            finally:
                await self.aclose()
            raise
        finally:
            if stream.closed:
                self.close()

    def _deliver(self, stream: "Stream[Loaded]", loaded: Loaded) -> Any:
        for failure in loaded.failures:
            if len(self.failures) >= self._settings.max_failures:
                stream.close()
                try:
                    raise failure.error
                finally:
                    del failure, loaded  # the error's traceback holds this frame
            self.failures.append(failure)
        self._sampling.delivered(loaded.request)
        if self._on_delivered is not None:
            self._on_delivered()
        if loaded.batch is not NO_BATCH:
            self.batches += 1
            self._samples += loaded.samples
        return loaded.batch

    def stats(self) -> LoaderStats:
        """The statistics of the epoch up to now."""
        if self._stats is not None:
            return self._stats
        assert self._stream is not None  # noqa: S101  # `close` saves the statistics
        stats = self._stream.stats()
        return LoaderStats(
            batches=self.batches,
            samples=self._samples,
            failures=len(self.failures),
            consumer_seconds=stats.consumer_seconds,
            worker_seconds=stats.worker_seconds,
            elapsed_seconds=stats.elapsed_seconds,
            buffered=sum(stage.buffered for stage in stats.stages if stage.name in (_LOAD, _COPY)),
            bound=self._settings.bound,
            bottleneck=stats.bottleneck,
        )

    def close(self) -> None:
        """Stop everything; return at once."""
        if self.closed:
            return
        self.closed = True
        assert self._stream is not None  # noqa: S101
        self._stream.close()
        self._stats = self.stats()
        # Now, because an open stream would read the error of a worker that stops.
        self._stop.is_set = True
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    async def aclose(self) -> None:
        """Stop everything and wait; raises the error of a generator that fails to close, once."""
        self.close()
        stream = self._stream
        if stream is None:
            return
        executor = self._executor
        try:
            await stream.aclose()
        except GeneratorExit:
            executor = None  # a closed coroutine must not wait
            raise
        finally:
            if executor is not None:
                await executor.aclose()
            if self.gone:  # otherwise the wait was cancelled, and can be repeated
                self._stream = None  # a stream refers to the state of the consumer's task

    @property
    def timed_out(self) -> bool:
        """Whether the last read timed out: a thread may be in a function that never returns."""
        return self._stream is not None and self._stream._timed_out

    @property
    def gone(self) -> bool:
        """Whether no thread, task or process of the epoch runs any more."""
        flow = None if self._stream is None else self._stream._flow
        executor = self._executor
        return flow is None or (
            flow.gone and not (executor is not None and executor._dispatcher.pool.alive)
        )


Batch_co = TypeVar("Batch_co", covariant=True)


class LoaderStream(AsyncOnly, Generic[Batch_co]):
    """The batches of one epoch, or of the rest of a resumed epoch; made by `AsyncDataLoader`.

    `async for` reads it. `aclose`, or leaving `async with`, stops it, and waits until threads,
    tasks and worker processes have ended.
    """

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch

    @property
    def closed(self) -> bool:
        """Whether no batch will come any more."""
        return self._epoch.closed

    @short_repr
    def __repr__(self) -> str:
        return f"at batch {self._epoch.batches}{', closed' * self.closed}"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch_co:
        return await self._epoch.next()  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """Stop fetching, and wait until everything has ended; as `Stream.aclose`."""
        await self._epoch.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._epoch.timed_out:
            self._epoch.close()
        else:
            await close_fully(self.aclose)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._epoch.close()

    def stats(self) -> LoaderStats:
        """The statistics of the iteration up to now."""
        return self._epoch.stats()


class EpochFactory:
    """Makes the epochs of a loader; owns the workers and buffers that outlive an epoch."""

    def __init__(self, settings: LoaderSettings, sampling: Sampling) -> None:
        self._settings = settings
        self._sampling = sampling
        devices = settings.devices
        self._copies = DeviceCopies(devices, whole=settings.whole) if devices else None
        self._executor: DeviceExecutor | None = None  # the persistent threads
        self._init: WorkerInit | None = None
        self._epochs: list[Epoch] = []  # those that may still run

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
            # There is no room for a batch between fetching and copying.
            copy, finish = None, copy
        elif not settings.processes:
            bound -= 1
        source, load, delivered = self._load(caller, stop, executor, finish, bound)
        steps = [load]
        if copy is not None:
            # One batch is copied while the consumer computes. More would take more device memory.
            copying = partial(_copied, copy=copy)
            steps.append(MapStep(copying, bound=1, in_order=settings.in_order, name=_COPY))
        stream: Stream[Loaded] = Stream(
            source,
            steps,
            caller=caller,
            executor=executor,
            timeout=settings.timeout or None,
            bar=self._bar(),
            name="AsyncDataLoader",
            in_threads=not settings.processes,
        )
        epoch = Epoch(stream, self._sampling, settings, stop, owned, delivered)
        self._epochs = [*(other for other in self._epochs if not other.gone), epoch]
        return epoch

    def _bar(self) -> Callable[[], Any] | None:
        if not self._settings.progress:
            return None
        total = length_of(self._sampling.loader)
        return partial(progress_bar, total, initial=self._sampling.skipped, unit="batch")

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
            return batches, MapStep(None, bound=1, name=_LOAD), None
        collate = Collate(sampling, caller, settings.max_failures, stop, finish)
        if kind is DatasetKind.ASYNC_ITERABLE:
            requests = AsyncRequests(sampling, executor, settings.bound)
            collators = min(workers, _COLLATORS)
            step = MapStep(collate.content, collators, bound, in_order, _LOAD)
            return requests, step, requests.release
        fetch: Callable[[Any], Any]
        begin_worker: Callable[[], object] | None = None
        if kind is DatasetKind.ASYNC_MAP:
            fetch = AsyncFetch(sampling.dataset, collate, executor, workers)
        elif kind is DatasetKind.MAP:
            fetch = Fetch(sampling.dataset, collate, self._worker_init())
        else:
            # The requests already have the samples.
            fetch, init = collate.content, self._worker_init()
            begin_worker = None if init is None else partial(init, caller)
        drawn = draw_requests(sampling, stop, begin_worker)
        return drawn, MapStep(fetch, workers, bound, in_order, _LOAD), None

    def _workers(self) -> tuple[DeviceExecutor, DeviceExecutor | None]:
        """The executor, and the executor again if it must end with the epoch."""
        settings = self._settings
        if settings.executor is not None:
            with suppress(ValueError):  # it has no CPU workers
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
    """The batch on its devices."""
    if loaded.batch is NO_BATCH:
        return loaded
    return loaded._replace(batch=copy(loaded.batch))
