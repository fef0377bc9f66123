"""How everything is measured: rivals in pairs, one after the other, and the ratio of each pair.

What else the machine does, and how fast its clock runs just now, hits both of a pair alike. So the
ratio within a pair tells more than two medians would, and the quartiles of the ratios tell how far
to trust it.
"""

import asyncio
import contextlib
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

Sample = Callable[[], Awaitable[float]]
"""Does a piece of work once; the seconds that each call took, or how many calls a second."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured; smaller than this only to see that it runs."""

    pairs: int = 15
    """How often each of two rivals is measured, in turns."""
    calls: int = 2048
    """Calls in one sample of a rival, where calls are short."""
    layers: int = 100
    """Linear layers of the module that is run data parallel."""
    steps: int = 50
    """Steps and sequences of a batch of the LSTM ensemble, as in PyTorch's tutorial."""
    channels: int = 512
    """Its size; the tutorial has 1024, which takes four times as long, at the same ratio."""
    processes: int = 8
    """Worker processes of torch's `DataLoader`, where items are waited for."""
    items: int = 10_000
    """Items of a stream whose memory is compared with that of one 100 times as long."""
    beats: int = 500
    """Beats of the heartbeat in one sample of the loop's lag; one is due every millisecond."""
    clients: int = 64
    """Clients of a service: each sends its next request when it has its answer."""
    texts: int = 192
    """Texts that are embedded in one sample."""
    seconds: float = 1.0
    """How long an idle batcher is watched in one sample."""
    all_rivals: bool = True
    """Whether also those are measured that take long to install or to start."""


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table."""

    what: str
    against: str
    ours: float
    """Median; with `theirs` in `unit`."""
    theirs: float
    unit: str
    value: float
    """What has the bound: the median ratio, or milliseconds."""
    low: float
    """Lower quartile of the value."""
    high: float
    """Upper quartile."""
    value_unit: str
    """Empty for a ratio."""
    bound: float | None
    """The most that the value may be; None: for information."""
    samples: int
    at_least: bool = False
    """Whether the bound is the least that the value may be, as for calls a second."""

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
    """Two ways to do one thing."""

    what: str
    ours: Sample
    against: str
    theirs: Sample
    bound: float | None
    unit: str = "us"
    at_least: bool = False


UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "kB": 1e3, "requests/s": 1.0, "texts/s": 1.0, "%": 1e-2}


async def compare(rivals: Rivals, pairs: int) -> Result:
    """Measure two rivals in turns, after a sample of each to warm up."""
    await rivals.ours()
    await rivals.theirs()
    ours, theirs = [], []
    for index in range(pairs):
        with no_garbage_collection():
            # ABBA: whatever drifts favours neither.
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
    """The row of samples that were taken in pairs."""
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
    """A collection would hit one rival or the other by chance: collect now, and not meanwhile."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def seconds_per_call(call: Callable[[], Awaitable[object]], tasks: int, calls: int) -> float:
    """`tasks` tasks at once, each making call after call, `calls` of them together."""
    each = max(1, calls // tasks)

    async def make_calls() -> None:
        for _ in range(each):
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(make_calls() for _ in range(tasks)))
    return (time.perf_counter() - began) / (each * tasks)
