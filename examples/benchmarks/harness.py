"""Measure rivals in pairs, one after the other, and compute the ratio of each pair.

Other load on the machine, or a change of its clock rate, affects both samples of a pair. So the
median ratio of the pairs is more reliable than the ratio of two medians. Quartiles show its spread.
"""

import asyncio
import contextlib
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

Sample = Callable[[], Awaitable[float]]
"""Runs a piece of work and returns the seconds per call, or the calls per second."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. Tests use smaller numbers."""

    pairs: int = 15
    """Samples of each of two rivals, which take turns."""
    calls: int = 2048
    """Calls per sample of a rival, if calls are short."""
    layers: int = 100
    """Linear layers of the module in the data parallel benchmark."""
    steps: int = 50
    """Steps and batch size of the LSTM ensemble, as in PyTorch's tutorial."""
    channels: int = 512
    """Channels of the LSTMs. The tutorial has 1024: four times the time, the same ratio."""
    processes: int = 8
    """Worker processes of torch's `DataLoader` in the benchmark with waits."""
    items: int = 10_000
    """Items of the short stream; the memory benchmark compares it with one 100 times as long."""
    beats: int = 500
    """Beats per sample of the loop's lag; one beat is due every millisecond."""
    clients: int = 64
    """Clients of a service. Each sends its next request when it has its answer."""
    texts: int = 192
    """Texts per sample of the embedding service."""
    seconds: float = 1.0
    """Duration of one sample of an idle batcher."""
    requests: int = 32
    """Requests per sample of a language model."""
    tokens: int = 200
    """The most tokens that a request asks a language model for."""
    all_rivals: bool = True
    """Whether to measure rivals that take long to install or to start."""


QUICK = Plan(
    pairs=2,
    calls=32,
    layers=3,
    steps=3,
    channels=4,
    processes=1,
    items=10,
    beats=4,
    clients=4,
    texts=2,
    seconds=0.01,
    requests=20,
    tokens=10,
    all_rivals=False,
)
"""So little that every benchmark only shows that it runs."""


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table."""

    what: str
    against: str
    ours: float
    """The median, in `unit` like `theirs`."""
    theirs: float
    unit: str
    value: float
    """The value that is compared with the bound: the median ratio, or milliseconds."""
    low: float
    """The lower quartile of the value."""
    high: float
    """The upper quartile of the value."""
    value_unit: str
    """The unit of `value`; empty for a ratio."""
    bound: float | None
    """The largest allowed value (with `at_least` the smallest); None: for information."""
    samples: int
    at_least: bool = False
    """Whether the bound is a minimum, as for calls per second."""

    @property
    def holds(self) -> bool:
        if self.bound is None:
            return True
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A row of the table whose rival cannot run here."""

    what: str
    against: str
    reason: str


Row = Result | NotMeasured


@dataclass(frozen=True, slots=True)
class Rivals:
    """Two implementations of the same work."""

    what: str
    ours: Sample
    against: str
    theirs: Sample
    bound: float | None
    unit: str = "us"
    at_least: bool = False


UNITS = {
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "kB": 1e3,
    "requests/s": 1.0,
    "texts/s": 1.0,
    "tokens/s": 1.0,
    "%": 1e-2,
}


async def compare(rivals: Rivals, pairs: int) -> Result:
    """Measure two rivals in pairs, after one sample of each to warm up."""
    await rivals.ours()
    await rivals.theirs()
    ours, theirs = [], []
    for index in range(pairs):
        with no_garbage_collection():
            # ABBA order: a drift of the machine favours neither rival.
            if index % 2:
                ours.append(await rivals.ours())
                theirs.append(await rivals.theirs())
            else:
                theirs.append(await rivals.theirs())
                ours.append(await rivals.ours())
    return result_of(
        ours,
        theirs,
        what=rivals.what,
        against=rivals.against,
        unit=rivals.unit,
        bound=rivals.bound,
        at_least=rivals.at_least,
    )


def result_of(
    ours: list[float],
    theirs: list[float],
    *,
    what: str,
    against: str,
    unit: str,
    bound: float | None,
    at_least: bool = False,
) -> Result:
    """The table row for samples that were taken in pairs."""
    low, ratio, high = quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
    return Result(
        what=what,
        against=against,
        ours=statistics.median(ours) / UNITS[unit],
        theirs=statistics.median(theirs) / UNITS[unit],
        unit=unit,
        value=ratio,
        low=low,
        high=high,
        value_unit="",
        bound=bound,
        samples=len(ours),
        at_least=at_least,
    )


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and not during a sample, where it would hit one rival by chance."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def seconds_per_call(call: Callable[[], Awaitable[object]], tasks: int, calls: int) -> float:
    """Make about `calls` calls from `tasks` concurrent tasks, and return the seconds per call."""
    each = max(1, calls // tasks)

    async def make_calls() -> None:
        for _ in range(each):
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(make_calls() for _ in range(tasks)))
    return (time.perf_counter() - began) / (each * tasks)
