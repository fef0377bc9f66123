"""Statistics: the results of `Batcher.stats()` and `ReplicaPool.stats()`."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import quantiles
from time import time
from typing import Any, Literal, TypeAlias

from ._observer import ItemInfo, Outcome
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


_LATEST = 1024  # how many durations are kept
_ERRORS = 5  # how many different errors are kept


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of the latest 1,024 durations, in seconds; 0.0 before the first."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """An error of failed items, in words: the error itself is not kept.

    aiopar puts no items into the text. But the text has the error's own message, and a function may
    put a part of an item into its message: a `KeyError` shows the key.

    Attributes:
        text: The type and the first line of the message that is not empty, up to 200 characters.
        count: How many items have failed with this text, since it is among the latest.
        time: When a caller last got the error, by `time.time`.
    """

    text: str
    count: int
    time: float


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """A snapshot of a `Batcher`; it can be written as JSON.

    `submitted` is at each moment the sum of `answered`, `failed`, all of `refused`, `expired`,
    `cancelled`, `queued` and `in_flight`. The counts begin when the batcher is opened.

    Attributes:
        submitted: Items that have come; a call with wrong arguments is not counted.
        answered: Items whose caller has got the output, or has read all outputs.
        failed: Items whose caller has got an error: from the function, from `batch_key` or `cost`,
            because the pool did not open, or because the batch was ended.
        refused: Items that were not accepted, by cause: `queue_full`, `max_wait`, `max_batch_cost`,
            `invalid_input` (the function, `batch_key` or `cost` raised `InvalidInput`),
            `unavailable` (no replica is in service), `closed`.
        expired: Items whose deadline has passed.
        cancelled: Items whose caller was cancelled, or has left a stream before its end.
        queued: Items in the queue.
        in_flight: Items that have left the queue, and whose caller still waits or reads. Items
            that wait until the batcher is open count too.
        errors: The latest errors of failed items, the latest first: up to five with different
            texts.
        batch_sizes: How many batches there were of each size.
        queue_wait: The time from the call of an item to the start of its batch.
        compute: The time of a batch, with collating, and with further runs after an error.
    """

    submitted: int
    answered: int
    failed: int
    refused: dict[str, int]
    expired: int
    cancelled: int
    queued: int
    in_flight: int
    errors: tuple[ErrorStats, ...]
    batch_sizes: dict[int, int]
    queue_wait: Percentiles
    compute: Percentiles


@dataclass(frozen=True, slots=True)
class ContinuousStats(BatcherStats):
    """A snapshot of a `ContinuousBatcher`; it can be written as JSON.

    It has the attributes of `BatcherStats` too. There a batch is one step, and `queue_wait` is the
    time until an item joins. An item is answered when its caller has got the result, or has read
    all parts. Items that wait for their readers or for memory are in flight.

    Attributes:
        steps: How many steps there were, without those that raised an error.
        parts: How many parts the steps have made.
        preempted: How many times an item was stopped, to go on later, because its batch held too
            much or ran out of memory.
        first_part: The time from the call of an item to its first part.
        between_parts: The time between two parts of an item.
    """

    steps: int
    parts: int
    preempted: int
    first_part: Percentiles
    between_parts: Percentiles


class Tally:
    """The counts behind `BatcherStats`. Its owner calls it under a lock."""

    def __init__(self) -> None:
        self.batch_seconds = 0.0  # a moving average, in which the latest batch weighs an eighth
        self.submitted = 0
        self._outcomes: Counter[Outcome] = Counter()
        self._refused: Counter[str] = Counter()
        self._errors: dict[str, ErrorStats] = {}  # by text, the latest last
        self._batch_sizes: Counter[int] = Counter()
        self._waits: deque[float] = deque(maxlen=_LATEST)
        self._computes: deque[float] = deque(maxlen=_LATEST)

    def left(self, request: ItemInfo, error: str | None) -> None:
        """The caller of `request` has its outcome; the text of its `error` if this is a failure."""
        self._outcomes[request.outcome] += 1
        if request.refused is not None:
            self._refused[request.refused] += 1
        if error is not None:
            before = self._errors.pop(error, None)
            count = 1 if before is None else before.count + 1
            self._errors[error] = ErrorStats(error, count, time())
            if len(self._errors) > _ERRORS:
                del self._errors[next(iter(self._errors))]

    def began(self, batch: Sequence[Request], now: float) -> None:
        """A batch was taken from the queue."""
        self._batch_sizes[len(batch)] += 1
        self._waits.extend([now - request.arrived for request in batch])

    def ended(self, count: int, seconds: float) -> None:
        """A batch has run `count` items in `seconds`."""
        if count:
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
        return BatcherStats(**self._counts(queued))

    def _counts(self, queued: int) -> dict[str, Any]:
        """The counts that both kinds of batcher have."""
        return {
            "submitted": self.submitted,
            "answered": self._outcomes["answered"],
            "failed": self._outcomes["failed"],
            "refused": dict(self._refused),
            "expired": self._outcomes["expired"],
            "cancelled": self._outcomes["cancelled"],
            "queued": queued,
            "in_flight": self.submitted - self._outcomes.total() - queued,
            "errors": tuple(reversed(self._errors.values())),
            "batch_sizes": dict(sorted(self._batch_sizes.items())),
            "queue_wait": percentiles(self._waits),
            "compute": percentiles(self._computes),
        }


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
        self._waits.extend(waits)

    def ended(self, count: int, seconds: float) -> None:
        """Do nothing: `parted` has counted the seconds."""

    def parted(self, durations: Sequence[float]) -> None:
        """Items have left a batch after these durations."""
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

    def stats(self, queued: int) -> ContinuousStats:
        """A snapshot."""
        return ContinuousStats(
            **self._counts(queued),
            steps=self._batch_sizes.total(),
            parts=self._parts,
            preempted=self.preempted,
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
