"""`tune`: find a batcher's settings with the highest rate within a latency goal.

A closed-loop client sends its next item when it has the output of its last one. Settings are
measured with more and more clients, until the latency misses the goal.
"""

import argparse
import asyncio
import importlib
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from ._doctor import advice_on_load, examine_cores
from .data._stream import progress_bar
from .serve._base_batcher import BaseBatcher
from .serve._batcher import Batcher
from .serve._settings import BatcherSettings
from .serve._stats import percentiles

RUNS = 3  # of each point, after one to warm up; their medians count
PAIRS = 5  # of runs, to compare the settings that were found with the batcher's own
REQUESTS = 100  # of a run at least, because p99 needs them; it may take four times as long
ITEMS = 256  # how many items a function is asked for
GAIN = 1.03  # the factor of the rate that a step of the search must gain
LARGEST_BATCH = 1024
SHORTEST_DELAY = 0.0005  # the search for a delay doubles it, up to a quarter of the goal


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `Batcher` that are searched."""

    max_batch_size: int
    concurrency: int
    max_queue_delay: float

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in asdict(self).items())


@dataclass(frozen=True, slots=True)
class Point:
    """What some number of clients gets: medians of several runs, latencies in seconds."""

    clients: int
    rate: float  # requests per second of all clients together
    p50: float
    p99: float
    largest_batch: int  # in items
    batch_seconds: float  # of the slowest batches


@dataclass(frozen=True, slots=True)
class Curve:
    """Some settings, under more and more clients."""

    settings: Settings
    points: Sequence[Point]
    goal: float

    @property
    def best(self) -> Point | None:
        """The point with the highest rate that keeps to the goal."""
        kept = [point for point in self.points if point.p99 <= self.goal]
        return max(kept, key=lambda point: point.rate, default=None)

    @property
    def reached(self) -> Settings:
        """The settings, but with the largest size that a batch had at the best point."""
        if self.best is None:
            return self.settings
        return replace(self.settings, max_batch_size=self.best.largest_batch)

    def same_with(self, max_batch_size: float) -> bool:
        """Whether this size would have made the same batches."""
        largest = max(point.largest_batch for point in self.points)
        return largest < self.settings.max_batch_size and largest <= max_batch_size

    @property
    def quickest(self) -> Point:
        """The point with the lowest latency."""
        return min(self.points, key=lambda point: point.p99)

    def gains_on(self, other: "Curve") -> bool:
        """Whether this curve has a higher rate within the goal, or else a lower latency."""
        if self.best is None or other.best is None:
            nearer = self.quickest.p99 * GAIN < other.quickest.p99
            return other.best is None and (self.best is not None or nearer)
        return self.best.rate > GAIN * other.best.rate


@dataclass(frozen=True, slots=True)
class Comparison:
    """The settings found against the batcher's own, each at its best point, in pairs of runs."""

    gain: float  # the median ratio of the rates
    p99: float  # the latency of the settings found
    own_p99: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has found."""

    curves: Sequence[Curve]
    own: Curve  # of the batcher's own settings
    best: Curve
    advised: Settings  # those of `best`, with a size that batches have reached
    comparison: Comparison | None  # None if `own` is advised, or misses the goal

    @property
    def keeps_own(self) -> bool:
        """Whether no others are worth a change."""
        compared = self.comparison
        gained = compared is None or compared.gain >= GAIN
        return self.advised == self.own.settings or not gained


class Search:
    """A search for the settings of a batcher.

    It opens copies of the batcher. `told` is called with each curve, `advanced` after each point.
    """

    def __init__(
        self,
        batcher: Batcher[Any, Any],
        items: Sequence[Any],
        *,
        goal: float,
        seconds: float,
        told: Callable[[Curve], object],
        advanced: Callable[[], object],
    ) -> None:
        self._batcher = batcher
        self._items = cycle(items)
        self._goal = goal
        self._seconds = seconds
        self._told = told
        self._advanced = advanced
        own, pool = batcher._settings, batcher.pool
        concurrency = own.concurrency or (1 if pool is None else len(pool.devices))
        self.own = Settings(own.max_batch_size, concurrency, own.max_queue_delay)

    async def run(self) -> Found:
        """Improve one option after the other, and compare the result with the batcher's own."""
        curves: list[Curve] = []
        async with self._batcher.pool or nullcontext():
            best = own = await self._curve(curves, self.own)
            for name, values in (
                ("max_batch_size", _doubled(self.own.max_batch_size, LARGEST_BATCH)),
                ("max_batch_size", _halved(self.own.max_batch_size)),
                ("concurrency", _doubled(self.own.concurrency, 4 * self.own.concurrency)),
                ("concurrency", _halved(self.own.concurrency)),
                ("max_queue_delay", [0.0] if self.own.max_queue_delay else []),
                ("max_queue_delay", _doubled(SHORTEST_DELAY, self._goal / 4)),
            ):
                if getattr(best.settings, name) != getattr(self.own, name):
                    continue  # the other direction has gained
                misses = 0
                for value in values:
                    if name == "max_batch_size" and best.same_with(value):
                        continue
                    change: dict[str, Any] = {name: value}
                    curve = await self._curve(curves, replace(best.settings, **change))
                    if curve.gains_on(best):
                        best, misses = curve, 0
                    elif (misses := misses + 1) == 2:
                        break
            advised, comparison = self.own if best is own else best.reached, None
            if advised != self.own and best.best is not None and own.best is not None:
                comparison = await self._compare(advised, best.best, self.own, own.best)
        return Found(curves, own, best, advised, comparison)

    @asynccontextmanager
    async def _copy(self, settings: Settings, clients: int) -> AsyncIterator[Batcher[Any, Any]]:
        """Open a copy of the batcher that refuses nothing."""
        batcher = self._batcher
        names = [field.name for field in fields(BatcherSettings)]
        options = {name: getattr(batcher._settings, name) for name in names}
        bounds = {"max_pending": clients, "max_wait": None, "timeout": None}
        if (sizes := batcher._settings.batch_sizes) is not None:
            most = settings.max_batch_size
            options["batch_sizes"] = [*(size for size in sizes if size < most), most]
        copy = Batcher(batcher._fn, **{**options, **bounds, **asdict(settings)}, name=batcher.name)
        copy._caller = batcher._caller
        async with copy:
            yield copy

    async def _curve(self, curves: list[Curve], settings: Settings) -> Curve:
        # With so many clients each running batch has a full one behind it. More only wait longer.
        most = 2 * settings.max_batch_size * settings.concurrency
        points: list[Point] = []
        async with self._copy(settings, 2 * most) as batcher:
            for clients in (1, *_doubled(1, 2 * most - 1)):
                point = await self._point(batcher, clients)
                if point.p99 > self._goal:  # again: another program may have run meanwhile
                    point = await self._point(batcher, clients)
                points.append(point)
                if point.p99 > self._goal:
                    if clients > 2:
                        points.append(await self._point(batcher, clients * 3 // 4))
                    break
        points.sort(key=lambda point: point.clients)
        curves.append(curve := Curve(settings, points, self._goal))
        self._told(curve)
        return curve

    async def _point(self, batcher: Batcher[Any, Any], clients: int) -> Point:
        earlier = Counter(batcher.stats().batch_sizes)
        await self._load(batcher, clients)  # warms up
        runs = [await self._load(batcher, clients) for _ in range(RUNS)]
        self._advanced()
        rate, p50, p99 = map(median, zip(*runs, strict=True))
        stats = batcher.stats()
        largest_batch = max(Counter(stats.batch_sizes) - earlier)
        return Point(clients, rate, p50, p99, largest_batch, stats.compute.p99)

    async def _load(self, batcher: Batcher[Any, Any], clients: int) -> tuple[float, float, float]:
        """One run: its rate, and the median and the 99th percentile of its latencies."""
        latencies: list[float] = []
        began = perf_counter()
        until, at_most = began + self._seconds, began + 4 * self._seconds

        async def client() -> None:
            now = began
            while now < until or (len(latencies) < REQUESTS and now < at_most):
                sent = perf_counter()
                await batcher(next(self._items))
                now = perf_counter()
                latencies.append(now - sent)

        await asyncio.gather(*(client() for _ in range(clients)))
        rate = len(latencies) / (perf_counter() - began)
        found = percentiles(latencies)
        return rate, found.p50, found.p99

    async def _compare(
        self, advised: Settings, at: Point, own: Settings, own_at: Point
    ) -> Comparison:
        async with (
            self._copy(advised, at.clients) as found,
            self._copy(own, own_at.clients) as present,
        ):
            order = [(present, own_at.clients), (found, at.clients)]
            for one, clients in order:
                await self._load(one, clients)
            ratios, tails, own_tails = [], [], []
            for _ in range(PAIRS):
                order.reverse()  # in turns, so that a drift of the machine favours neither
                runs = {one: await self._load(one, clients) for one, clients in order}
                ratios.append(runs[found][0] / runs[present][0])
                tails.append(runs[found][2])
                own_tails.append(runs[present][2])
                self._advanced()
        return Comparison(median(ratios), median(tails), median(own_tails))


def _doubled(first: float, most: float) -> Iterator[Any]:
    """Twice `first`, and so on, up to `most`."""
    while (first := 2 * first) <= most:
        yield first


def _halved(first: int) -> Iterator[int]:
    while (first := first // 2) >= 1:
        yield first


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "batcher",
        metavar="module:batcher",
        type=_reference,
        help="a Batcher, or a function without arguments that makes one",
    )
    parser.add_argument(
        "--p99",
        required=True,
        type=_duration,
        metavar="50ms",
        help="the goal: 99 %% of the requests get their output within this time",
    )
    parser.add_argument(
        "--item",
        type=_reference,
        metavar="module:item",
        help="an item, or a function without arguments that makes one; default: `item` of the "
        "batcher's module",
    )
    parser.add_argument(
        "--seconds", type=_duration, default=0.2, metavar="200ms", help="how long each run takes"
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("tune.svg"), help="where to draw the curves (.svg, .png)"
    )


def _reference(text: str) -> tuple[str, str]:
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise argparse.ArgumentTypeError(f"expected module:name, got {text!r}")
    return module, name


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a duration such as 50ms or 0.2s, got {text!r}")
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


def _load(reference: tuple[str, str]) -> Any:
    module, name = reference
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise SystemExit(f"module {module!r} has no {name!r}")
        found = getattr(found, part)
    return found


def _load_batcher(reference: tuple[str, str]) -> Batcher[Any, Any]:
    batcher = _load(reference)
    if not isinstance(batcher, BaseBatcher) and callable(batcher):
        batcher = batcher()
    if not isinstance(batcher, Batcher):
        name = ":".join(reference)
        raise SystemExit(f"{name} must be a Batcher or make one, not {type(batcher).__name__}")
    if batcher._kind.streams:
        raise SystemExit(f"{batcher.name!r} is a generator function: tune measures no streams")
    return batcher


def run(arguments: argparse.Namespace) -> int:
    """Print a table, draw the curves; return 1 if no settings reach the goal."""
    _check_plot(arguments.plot)
    batcher = _load_batcher(arguments.batcher)
    module = arguments.batcher[0]
    if arguments.item is None and not hasattr(sys.modules[module], "item"):
        raise SystemExit(f"module {module!r} has no 'item': name one with --item module:item")
    item = _load(arguments.item or (module, "item"))
    items = [item() for _ in range(ITEMS)] if callable(item) else [item]
    busy = [*advice_on_load(examine_cores())]
    for line in busy:
        print(f"Warning: {line} Measure on an idle machine.\n", file=sys.stderr)
    with progress_bar(None, unit=" points", disable=None) as bar:

        def write(line: str) -> None:
            bar.write(line)
            sys.stdout.flush()  # it may be a pipe, and the next line comes seconds later

        write(_HEAD)
        search = Search(
            batcher,
            items,
            goal=arguments.p99,
            seconds=arguments.seconds,
            told=lambda curve: write(_row(curve)),
            advanced=bar.update,
        )
        found = asyncio.run(search.run())
    print(f"\n{_verdict(found)}{_bounds(found)}")
    _draw(found, arguments.plot)
    print(f"The curves are in {arguments.plot}.")
    if busy:
        print("Not reliable: the machine was busy. Measure again on an idle machine.")
    return int(found.best.best is None)


_HEAD = (
    "max_batch_size  concurrency  max_queue_delay    clients  largest  requests/s  p50 ms  p99 ms\n"
    "                    (at the highest rate within the goal; largest: items of the largest batch)"
)


def _row(curve: Curve) -> str:
    tried, best = curve.settings, curve.best
    head = f"{tried.max_batch_size:14}{tried.concurrency:13}{tried.max_queue_delay:17.4g}    "
    if best is None:
        return f"{head}none: the lowest p99 is {_ms(curve.quickest.p99)} ms"
    load = f"{best.clients:7}{best.largest_batch:9}{best.rate:12.0f}"
    return f"{head}{load}{_ms(best.p50):>8}{_ms(best.p99):>8}"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _verdict(found: Found) -> str:
    best, own, compared = found.best.best, found.own, found.comparison
    if best is None:
        return (
            f"No settings keep p99 within {found.own.goal * 1e3:g} ms. The lowest was "
            f"{_ms(found.best.quickest.p99)} ms: {found.best.settings}"
        )
    keep = f"Keep the present settings: {own.settings}."
    if found.advised == own.settings:
        return f"{keep} No others gained {GAIN - 1:.0%}.\np99: {_ms(best.p99)} ms."
    take = f"Take {found.advised}."
    if found.advised != found.best.settings:
        take += " No batch was larger."
    if compared is None:
        return (
            f"{take}\np99: {_ms(best.p99)} ms. The present settings miss the goal: "
            f"their lowest p99 is {_ms(own.quickest.p99)} ms."
        )
    p99 = f"p99: {_ms(compared.p99)} ms, with the present settings {_ms(compared.own_p99)} ms."
    if found.keeps_own:
        return f"{keep}\n{found.advised} gained nothing in a second comparison.\n{p99}"
    late = "" if compared.p99 <= own.goal else " It is above the goal: leave room."
    gain = f"{compared.gain:.2f} times those of the present settings"
    return f"{take}\nRequests per second: {gain}.\n{p99}{late}"


def _bounds(found: Found) -> str:
    """A line with the `max_wait` and `max_pending` for the goal, at the rate that was measured."""
    at, goal = (found.own if found.keeps_own else found.best).best, found.own.goal
    if at is None or (wait := goal - at.batch_seconds) <= 0:
        return ""
    pending = max(float(f"{at.rate * wait:.2g}"), at.largest_batch)
    return f"\nFor overload: max_wait={wait:.2g}, max_pending={pending:.0f}."


def _check_plot(path: Path) -> None:
    """Check before the search, which takes minutes, that its curves can be drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("tune needs matplotlib and tqdm: pip install 'aiopar[tune]'") from error
    if not path.parent.is_dir():
        raise SystemExit(f"there is no folder {str(path.parent)!r} for --plot")
    if path.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise SystemExit(
            f"--plot cannot draw {path.suffix!r}: name a file that ends in .svg or .png"
        )


def _frontier(curves: Sequence[Curve]) -> list[tuple[Settings, Point]]:
    """The points for which no other has a higher rate and a lower latency, by falling rate."""
    points = [(curve.settings, point) for curve in curves for point in curve.points]
    points.sort(key=lambda found: found[1].rate, reverse=True)
    frontier: list[tuple[Settings, Point]] = []
    for settings, point in points:
        if not frontier or point.p99 < frontier[-1][1].p99:
            frontier.append((settings, point))
    return frontier


def _draw(found: Found, path: Path) -> None:
    """Draw p99 against the rate: the frontier, and all other points pale."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for curve in found.curves:  # from point to point the number of clients doubles
        axes.plot(*_line(curve.points), "-o", color="lightgrey", markersize=3, linewidth=0.7)
    frontier = _frontier(found.curves)
    axes.plot(*_line([point for _, point in frontier]), color="black", label="the frontier")
    for settings in dict.fromkeys(settings for settings, _ in frontier):
        points = [point for one, point in frontier if one == settings]
        axes.plot(*_line(points), "o", label=str(settings))
    if found.own.best is not None:
        axes.plot(*_line([found.own.best]), "x", color="black", label="the present settings")
    axes.axhline(found.own.goal * 1e3, color="grey", linestyle="--", label="the goal")
    axes.set(xlabel="requests per second", ylabel="99th percentile of the latency, ms")
    axes.set_yscale("log")
    for format_with in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        format_with(LogFormatter(labelOnlyBase=False))  # 200, not 2 x 10^2
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path)


def _line(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """The rates, and the latencies in milliseconds."""
    return [point.rate for point in points], [point.p99 * 1e3 for point in points]
