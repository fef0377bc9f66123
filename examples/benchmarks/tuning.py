"""Latency and throughput for several batch sizes and delays, under more and more clients."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.benchmarks.batchers import open_batcher
from examples.benchmarks.harness import Plan, no_garbage_collection
from examples.benchmarks.heartbeat import p99
from examples.benchmarks.own_process import in_own_process
from examples.benchmarks.serving import latencies
from examples.benchmarks.small_model import BATCH, SmallModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = (1, 8, 32, 128)
DELAYS = (0.0, 0.002, 0.005, 0.010)


@dataclass(frozen=True, slots=True)
class Point:
    """The latency and throughput of a number of closed-loop clients."""

    clients: int
    rate: float
    """Requests per second of all clients together."""
    p50: float
    """Median latency in seconds."""
    p99: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One setting, under an increasing number of clients."""

    label: str
    points: list[Point]


@dataclass(frozen=True, slots=True)
class Curves:
    sizes: list[Curve]
    """Batch sizes, without a delay."""
    delays: list[Curve]
    """Delays, with batches of at most `BATCH`."""


async def measure(plan: Plan) -> Curves:
    return await in_own_process(measure_here, plan)


async def measure_here(plan: Plan) -> Curves:
    sizes = [await curve(plan, f"at most {size}", max_batch_size=size) for size in SIZES]
    delays = [
        await curve(plan, f"{delay * 1e3:g} ms", max_queue_delay=delay, max_batch_size=BATCH)
        for delay in DELAYS
    ]
    return Curves(sizes, delays)


async def curve(
    plan: Plan, label: str, *, max_batch_size: int, max_queue_delay: float = 0.0
) -> Curve:
    model = SmallModel()
    points = []
    async with open_batcher(
        model, max_batch_size=max_batch_size, max_queue_delay=max_queue_delay
    ) as batcher:
        await batcher(model.items[0])
        for clients in numbers_of_clients(plan):
            with no_garbage_collection():
                began = time.perf_counter()
                # Fewer calls for few clients, because each batch waits for the whole delay.
                calls = min(plan.calls, 128 * clients)
                seconds = await latencies(model, batcher, clients=clients, calls=calls)
                rate = len(seconds) / (time.perf_counter() - began)
            points.append(Point(clients, rate, statistics.median(seconds), p99(seconds)))
    return Curve(label, points)


def numbers_of_clients(plan: Plan) -> list[int]:
    """Powers of two, up to four times the plan's clients."""
    return [2**power for power in range((4 * plan.clients).bit_length())]


def write_plot(curves: Curves, path: Path) -> None:
    """Plot batch sizes and delays. From point to point the number of clients doubles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    _draw(left, curves.sizes, "max_batch_size, without a delay")
    _draw(right, curves.delays, f"max_queue_delay, max_batch_size={BATCH}")
    left.set_ylabel("milliseconds (line: median, dotted: 99th percentile)")
    figure.savefig(path, dpi=120)


def _draw(axes: "Axes", curves: Sequence[Curve], title: str) -> None:
    for number, one in enumerate(curves):
        colour, rates = f"C{number}", [point.rate for point in one.points]
        medians = [point.p50 * 1e3 for point in one.points]
        axes.plot(rates, medians, "-o", color=colour, markersize=4, label=one.label)
        tails = [point.p99 * 1e3 for point in one.points]
        axes.plot(rates, tails, ":", color=colour, alpha=0.6)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("requests per second")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
