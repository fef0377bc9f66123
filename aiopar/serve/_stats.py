"""Statistics: the results of `Batcher.stats()` and `ReplicaPool.stats()`."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import quantiles
from typing import Literal, TypeAlias

from ._request import Request

ReplicaState: TypeAlias = Literal["ready", "rebuilding", "retired", "closed"]


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """A snapshot of one replica; it can be written as JSON.

    Attributes:
        index: The index of the replica in the pool's `devices`.
        device: The device, as `str(torch.device)`; with its host if there is one: "process:0/cpu".
        state: `"ready"`: in service. `"rebuilding"`: broken, and being rebuilt. `"retired"`: this
            process has lost the device. `"closed"`: the pool is closed.
        in_flight: Calls that wait for the replica or run on it.
        completed: Calls that have returned.
        failed: Calls that have raised.
        rebuilds: Completed rebuilds.
        busy_seconds: How long its worker has run calls; on an accelerator, how long the launches
            took.
    """

    index: int
    device: str
    state: ReplicaState
    in_flight: int
    completed: int
    failed: int
    rebuilds: int
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot of a `ReplicaPool`.

    Attributes:
        replicas: The replicas; empty until the pool is open.
    """

    replicas: tuple[ReplicaStats, ...]


ModelState: TypeAlias = Literal["waiting", "loading", "ready", "closing"]


@dataclass(frozen=True, slots=True)
class ModelStats:
    """A snapshot of one model of a `ModelStore`; it can be written as JSON.

    Attributes:
        name: The name that `load` is called with.
        state: `"waiting"`: the model waits for its turn to load, or for room. `"loading"`: `load`
            runs, or the model is being opened. `"ready"`: uses get the model. `"closing"`: it is
            being evicted.
        bytes: The bytes of the model that count for `max_bytes`; 0 until they are known.
        users: How many uses have the model or wait for it.
    """

    name: str
    state: ModelState
    bytes: int
    users: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of a `ModelStore`.

    Attributes:
        models: The models, the least recently used first.
        loads: How many loads have succeeded.
        failed_loads: How many loads have failed.
        evictions: How many models were evicted.
    """

    models: tuple[ModelStats, ...]
    loads: int
    failed_loads: int
    evictions: int


Rejection: TypeAlias = Literal["queue_full", "max_wait", "max_batch_cost", "unavailable", "closed"]

_LATEST = 1024  # how many durations are kept


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of the latest 1,024 durations, in seconds; 0.0 before the first."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """A snapshot of a `Batcher`; it can be written as JSON.

    Attributes:
        queued: Items in the queue.
        in_flight: Items in running batches.
        completed: Items whose caller has got the output.
        failed: Items whose caller has got an error: from the function, from `batch_key` or `cost`,
            because the pool did not open, or because the batch was ended. Refused, expired and
            cancelled items are neither failed nor completed.
        rejected: Refused items by cause: `queue_full`, `max_wait`, `max_batch_cost`, `unavailable`
            (no replica is in service), `closed`.
        batch_sizes: How many batches there were of each size.
        queue_wait: The time from the call of an item to the start of its batch.
        compute: The time of a batch, with collating, and with further runs after an error.
    """

    queued: int
    in_flight: int
    completed: int
    failed: int
    rejected: dict[str, int]
    batch_sizes: dict[int, int]
    queue_wait: Percentiles
    compute: Percentiles


@dataclass(frozen=True, slots=True)
class ContinuousStats:
    """A snapshot of a `ContinuousBatcher`; it can be written as JSON.

    Attributes:
        queued: Items in the queue.
        in_flight: Items in running batches. Items that wait for their readers or for memory count.
        completed: Items whose caller has got the result, or has read all parts.
        failed: Items whose caller has got an error, as in `BatcherStats`.
        rejected: Refused items by cause, as in `BatcherStats`.
        steps: How many steps there were.
        parts: How many parts the steps have made.
        batch_sizes: How many steps there were of each size.
        preempted: How many times an item was stopped, to go on later, because its batch held too
            much or ran out of memory.
        queue_wait: The time from the call of an item until it joins a batch.
        compute: The time of a step.
        first_part: The time from the call of an item to its first part.
        between_parts: The time between two parts of an item.
    """

    queued: int
    in_flight: int
    completed: int
    failed: int
    rejected: dict[str, int]
    steps: int
    parts: int
    batch_sizes: dict[int, int]
    preempted: int
    queue_wait: Percentiles
    compute: Percentiles
    first_part: Percentiles
    between_parts: Percentiles


class Tally:
    """The counts behind `BatcherStats`. Its owner calls it under a lock."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.batch_seconds = 0.0  # a moving average, in which the latest batch weighs an eighth
        self.completed = self.failed = 0  # what callers have got
        self.rejected: Counter[str] = Counter()
        self._batch_sizes: Counter[int] = Counter()
        self._waits: deque[float] = deque(maxlen=_LATEST)
        self._computes: deque[float] = deque(maxlen=_LATEST)

    def began(self, batch: Sequence[Request], now: float) -> None:
        """A batch was taken from the queue."""
        self.in_flight += len(batch)
        self._batch_sizes[len(batch)] += 1
        self._waits.extend([now - request.arrived for request in batch])

    def ended(self, count: int, seconds: float) -> None:
        """A batch has run `count` items in `seconds`."""
        if count:
            self.in_flight -= count
            self._computes.append(seconds)
            self._average(seconds)

    def _average(self, seconds: float) -> None:
        weight = 8 if self.batch_seconds else 1
        self.batch_seconds += (seconds - self.batch_seconds) / weight

    @property
    def quickest(self) -> float:
        """The shortest duration of the latest eight batches; 0.0 while there are fewer."""
        latest = [*islice(reversed(self._computes), 8)]
        return min(latest) if len(latest) == 8 else 0.0

    def stats(self, queued: int) -> BatcherStats:
        """A snapshot."""
        return BatcherStats(
            queued=queued,
            in_flight=self.in_flight,
            completed=self.completed,
            failed=self.failed,
            rejected=dict(self.rejected),
            batch_sizes=dict(sorted(self._batch_sizes.items())),
            queue_wait=percentiles(self._waits),
            compute=percentiles(self._computes),
        )


class StepTally(Tally):
    """The counts behind `ContinuousStats`. `batch_seconds` is how long an item is in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self._parts = 0
        self.preempted = 0
        self._first_parts: deque[float] = deque(maxlen=_LATEST)
        self._gaps: deque[float] = deque(maxlen=_LATEST)

    def joined(self, waits: Sequence[float]) -> None:
        """Items have joined a batch after these waits."""
        self.in_flight += len(waits)
        self._waits.extend(waits)

    def ended(self, count: int, seconds: float) -> None:  # `left` has counted `seconds`
        """The worker of a batch has failed; `count` items were in the batch."""
        self.in_flight -= count

    def left(self, durations: Sequence[float]) -> None:
        """Items have left a batch after these durations."""
        self.in_flight -= len(durations)
        for seconds in durations:
            self._average(seconds)

    def stepped(
        self, size: int, seconds: float, first_parts: Sequence[float], gaps: Sequence[float]
    ) -> None:
        """`size` items have taken a step of `seconds`.

        Args:
            size: How many items there were.
            seconds: How long the step took.
            first_parts: Seconds from calls to first parts.
            gaps: Seconds between two parts of an item.
        """
        self._batch_sizes[size] += 1
        self._computes.append(seconds)
        self._parts += len(first_parts) + len(gaps)
        self._first_parts.extend(first_parts)
        self._gaps.extend(gaps)

    def continuous_stats(self, queued: int) -> ContinuousStats:
        """A snapshot."""
        return ContinuousStats(
            queued=queued,
            in_flight=self.in_flight,
            completed=self.completed,
            failed=self.failed,
            rejected=dict(self.rejected),
            steps=self._batch_sizes.total(),
            parts=self._parts,
            batch_sizes=dict(sorted(self._batch_sizes.items())),
            preempted=self.preempted,
            queue_wait=percentiles(self._waits),
            compute=percentiles(self._computes),
            first_part=percentiles(self._first_parts),
            between_parts=percentiles(self._gaps),
        )


def percentiles(durations: Iterable[float]) -> Percentiles:
    """The percentiles of some durations."""
    found = sorted(durations)
    if len(found) < 2:
        return Percentiles(*found * 3)
    cuts = quantiles(found, n=100, method="inclusive")
    return Percentiles(cuts[49], cuts[89], cuts[98])
