"""An iteration of an `AsyncDataLoader`, put together: source, stages, and who runs them."""

import sys
from collections.abc import AsyncIterable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from torch.utils.data._utils.pin_memory import pin_memory

from .._base.arguments import length_of, short_repr
from .._base.thread_state import CallerState
from ..executor._executor import DeviceExecutor
from ..futures._waiting import close_fully
from ._cursor import Request
from ._fetch import (
    NO_BATCH,
    AsyncFetch,
    CollateOnly,
    Collation,
    FailedSample,
    Fetch,
    Loaded,
    WorkerInit,
)
from ._loader_settings import Settings
from ._outcome import StopFlag
from ._pinned import DeviceCopies, can_pin
from ._processes import ProcessBatches, WorkerProcesses
from ._sampling import AsyncRequests, Kind, Requests, Sampling
from ._stages import MapStep
from ._stream import Bar, Stream, progress_bar


class Ending:
    """Stops an iteration, and waits until nothing of it runs.

    Apart from the `LoaderStream`: that is collected when a loop is broken off, while threads still
    read their samples, and the loader is to wait for these.

    Args:
        stream: Of the iteration.
        leaving: Of the iteration.
        owned: The executor that ends with it.
    """

    def __init__(
        self, stream: Stream[Any], leaving: StopFlag, owned: DeviceExecutor | None
    ) -> None:
        self._stream: Stream[Any] | None = stream
        self._leaving = leaving
        self._owned = owned

    def close(self) -> None:
        """Stop everything, soon."""
        if self._stream is not None:
            self._stream.close()
        # After that: from now on no outcome is read, whatever a worker leaves.
        self._leaving.is_set = True
        if self._owned is not None:
            self._owned.shutdown(wait=False)

    async def aclose(self) -> None:
        """Stop everything, and wait; raises, once, what a generator raises when it is closed."""
        self.close()
        stream = self._stream
        if stream is None:
            return
        try:
            await stream.aclose()
        finally:
            if self._owned is not None:
                await self._owned.aclose()
            if self.over:  # else this was given up, and may be called again
                self._stream = None  # it holds the state of who iterated

    @property
    def over(self) -> bool:
        """Whether it can be forgotten: somebody has waited, or nothing is left."""
        flow = None if self._stream is None else self._stream._flow
        owned = self._owned
        return flow is None or (
            flow.gone and not (owned is not None and owned._dispatcher.pool.alive)
        )


LOAD = "load"
"""The stage that fetches and collates."""

TO_DEVICES = "device"
"""The stage that copies."""


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """What one iteration of a loader has done, and who waited for whom.

    Attributes:
        batches: How many were delivered.
        samples: How many were in them.
        failures: How many samples were left out.
        consumer_seconds: How long the consumer waited for batches.
        worker_seconds: How long workers waited because as many batches as may be were ready, summed
            over them.
        elapsed_seconds: Since the first read.
        buffered: How many batches are ready or being fetched, now.
        bound: The most that may be.
        bottleneck: In one line, which side waits for the other.
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


class Record:
    """What a loader says of its last iteration, also when that is gone."""

    def __init__(self) -> None:
        self.failures: list[FailedSample] = []
        self.batches = self.samples = 0
        self.stats: LoaderStats | None = None


class Delivery(Protocol):
    """What wants to know how far the consumer is."""

    def delivered(self, request: Request) -> None:
        """What was requested was handed to the consumer, or left out as failed."""

    def finished(self) -> None:
        """The consumer was told that there is no more."""


class LoaderStream:
    """The batches of one epoch, or of what remains of it; made by `AsyncDataLoader`.

    `async for` reads it; `aclose`, or leaving `async with`, stops it and waits until threads, tasks
    and worker processes are gone.
    """

    def __init__(
        self,
        stream: "Stream[Loaded]",
        ending: Ending,
        delivery: Delivery,
        record: Record,
        *,
        max_failures: int,
        bound: int,
    ) -> None:
        self._stream = stream
        self._ending = ending
        self._delivery = delivery
        self._record = record
        self._max_failures = max_failures
        self._bound = bound
        self.closed: bool = False
        """Whether no batch will come any more."""

    @short_repr
    def __repr__(self) -> str:
        return f"at batch {self._record.batches}{', closed' * self.closed}"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            while True:
                # Not by a name, which an error's traceback would keep.
                batch = self._delivered(await anext(self._stream))
                if batch is not NO_BATCH:
                    return batch
        except StopAsyncIteration:
            try:
                if not self.closed:  # meanwhile, by another task
                    self._delivery.finished()
            finally:
                await self.aclose()
            raise
        finally:
            if self._stream._over:
                self._close()

    def _delivered(self, loaded: Loaded) -> Any:
        record = self._record
        for failure in loaded.failures:
            if len(record.failures) >= self._max_failures:
                self._stream.close()
                try:
                    raise failure.error
                finally:
                    del failure, loaded  # the error's traceback holds this frame
            record.failures.append(failure)
        self._delivery.delivered(loaded.request)
        if loaded.batch is not NO_BATCH:
            record.batches += 1
            record.samples += loaded.samples
        return loaded.batch

    def _close(self) -> None:
        """Stop everything, soon."""
        if not self.closed:
            self.closed = True
            self._ending.close()
            self._record.stats = self.stats()

    async def aclose(self) -> None:
        """Stop fetching, and wait until everything is gone; may be called twice.

        Threads end after the sample that they run. Raises what a generator that is read raises when
        it is closed; what an async generator raises there is logged.
        """
        self._close()
        await self._ending.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await close_fully(self.aclose)

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_bound"):
            self._close()

    def stats(self) -> LoaderStats:
        """What it has done so far."""
        record, stats = self._record, self._stream.stats()
        return LoaderStats(
            batches=record.batches,
            samples=record.samples,
            failures=len(record.failures),
            consumer_seconds=stats.consumer_seconds,
            worker_seconds=stats.worker_seconds,
            elapsed_seconds=stats.elapsed_seconds,
            buffered=sum(
                stage.buffered for stage in stats.stages if stage.name in (LOAD, TO_DEVICES)
            ),
            bound=self._bound,
            bottleneck=stats.bottleneck,
        )


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
        settings, caller, leaving = self._settings, CallerState(), StopFlag()
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
            steps.append(
                MapStep(_Copied(copy), bound=1, in_order=fetching.in_order, name=TO_DEVICES)
            )
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
        leaving: StopFlag,
        executor: DeviceExecutor,
        init: WorkerInit | None,
        finish: Callable[[Any], Any] | None,
        bound: int,
    ) -> tuple[Iterable[Any] | AsyncIterable[Any], MapStep, Delivery]:
        """The source, the stage that makes batches of what it yields, and who counts them."""
        settings, sampling = self._settings, self._sampling
        in_order, count = settings.fetching.in_order, settings.fetching.num_workers
        if self._processes is not None:
            batches = ProcessBatches(sampling, leaving, self._processes, settings.max_failures)
            return batches, MapStep(None, bound=1, name=LOAD), batches
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
            return ahead, MapStep(CollateOnly(collate), collators, bound, in_order, LOAD), ahead
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
        return requests, MapStep(fetch, count, bound, in_order, LOAD), requests

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
