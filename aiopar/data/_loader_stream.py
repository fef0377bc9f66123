"""One iteration of an `AsyncDataLoader`: what `async for` reads."""

import sys
from dataclasses import dataclass
from typing import Any, Protocol, Self

from .._repr import short_repr
from .._waiting import close_fully
from ._fetch import NO_BATCH, FailedSample, Loaded
from ._loader_ending import Ending
from ._loader_position import Request
from ._stream import Stream

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
