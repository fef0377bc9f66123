"""One epoch of an `AsyncDataLoader`, as it is read and closed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from .._base.arguments import AsyncOnly, short_repr
from .._base.destructors import destructor
from ..executor._executor import DeviceExecutor
from ..futures._waiting import close_fully
from ._fetch import NO_BATCH, FailedSample, Loaded
from ._sampling import Sampling
from ._steps import StopFlag
from ._stream import Stream

LOAD = "load"  # the stage that fetches and collates
COPY = "device"  # the stage that copies to devices


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


@dataclass(eq=False, repr=False)
class Epoch:
    """One iteration of a loader: the counts, the failures, and the close.

    The consumer has a `LoaderStream`, which is collected if a loop is left early. Threads may still
    read samples then, and the loader keeps this object to wait for them.
    """

    _stream: Stream[Loaded] | None
    _sampling: Sampling
    _stop: StopFlag
    _executor: DeviceExecutor | None  # its workers end with the epoch
    _on_delivered: Callable[[], object] | None  # called for each batch, also if it was skipped
    _max_failures: int
    _bound: int
    _stats: LoaderStats | None = None
    _samples: int = 0
    batches: int = 0  # how many were delivered
    failures: list[FailedSample] = field(default_factory=list)
    closed: bool = False  # whether no batch will come

    async def next(self) -> Any:
        """The next batch; raises StopAsyncIteration at the end."""
        stream = self._stream
        if stream is None:
            raise StopAsyncIteration
        try:
            while True:
                # No name for the loaded batch: an error's traceback would keep that batch alive.
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
            if len(self.failures) >= self._max_failures:
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
            buffered=sum(stage.buffered for stage in stats.stages if stage.name in (LOAD, COPY)),
            bound=self._bound,
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

    def __init__(self, epoch: Epoch, owner: object) -> None:
        self._epoch = epoch
        self._owner = owner  # keeps the persistent workers, even if the loader is dropped

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
        stream = self._epoch._stream
        if stream is not None and stream._timed_out:  # a thread may be stuck in a function
            self._epoch.close()
        else:
            await close_fully(self.aclose)

    @destructor
    def __del__(self) -> None:
        self._epoch.close()

    def stats(self) -> LoaderStats:
        """The statistics of the iteration up to now."""
        return self._epoch.stats()
