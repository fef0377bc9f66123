"""The results as a table, as JSON, and as a picture."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from examples.benchmarks.harness import Result

COLUMNS = ("what", "against", "ours", "theirs", "measured", "quartiles", "at most", "")


def table(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """Its rows, the heading first."""
    return [COLUMNS, *map(_cells, results)]


def _cells(result: Result) -> tuple[str, ...]:
    verdict = "" if result.bound is None else "holds" if result.holds else "OVER"
    return (
        result.what,
        result.against,
        f"{result.ours:.4g} {result.unit}",
        f"{result.theirs:.4g} {result.unit}",
        f"{result.value:.3f} {result.value_unit}".rstrip(),
        f"{result.low:.3f} to {result.high:.3f}",
        "" if result.bound is None else f"{result.bound:.2f} {result.value_unit}".rstrip(),
        verdict,
    )


def as_text(results: Iterable[Result]) -> str:
    rows = table(results)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def as_markdown(results: Iterable[Result]) -> str:
    heading, *rows = (f"| {' | '.join(row)} |" for row in table(results))
    return "\n".join([heading, "|" + "---|" * len(COLUMNS), *rows])


def machine() -> dict[str, str | int | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cores": os.cpu_count(),
    }


def write_json(results: Iterable[Result], path: Path) -> None:
    rows = [{**asdict(result), "holds": result.holds} for result in results]
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def write_into(document: Path, text: str) -> None:
    """Put `text` between the two marks in a Markdown file."""
    begin, end = "<!-- begin table -->\n", "<!-- end table -->"
    before, _, rest = document.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{document} has no line {begin.strip()!r} before {end!r}")
    document.write_text(f"{before}{begin}{text}\n{end}{after}")


def write_plot(results: Sequence[Result], path: Path) -> None:
    """Two panels: ratios, and milliseconds. A dot with its quartiles, a bar where the bound is."""
    # No window is opened, whatever display there is.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    units = [unit for unit in ("", "ms") if any(result.value_unit == unit for result in results)]
    panels = [[result for result in results if result.value_unit == unit] for unit in units]
    figure = Figure(figsize=(9, 1.6 + 0.36 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [len(panel) + 1.5 for panel in panels]
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel, unit in zip(all_axes, panels, units, strict=True):
        for row, result in enumerate(panel):
            colour = "tab:red" if not result.holds else "tab:blue" if result.bound else "tab:gray"
            axes.plot([result.low, result.high], [row, row], color=colour, linewidth=4, alpha=0.35)
            axes.plot(result.value, row, "o", color=colour)
            if result.bound is not None:
                axes.plot(result.bound, row, "|", color="black", markersize=16, markeredgewidth=2)
        axes.set_yticks(
            range(len(panel)), [f"{result.what}\nagainst {result.against}" for result in panel]
        )
        axes.tick_params(axis="y", labelsize=8)
        axes.set_ylim(len(panel) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel(
            "milliseconds" if unit else "time taken / time of the rival (less is better)"
        )
    all_axes[0].set_title("dot: median, with quartiles; black bar: at most", fontsize=10)
    figure.savefig(path, dpi=120)
