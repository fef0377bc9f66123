"""The results as text, Markdown, JSON and a plot."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from examples.benchmarks.harness import NotMeasured, Result, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ("what", "against", "ours", "theirs", "measured", "quartiles", "bound", "")


def table(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """The rows of the table, heading first."""
    return [COLUMNS, *map(_cells, rows)]


def _cells(result: Row) -> tuple[str, ...]:
    if isinstance(result, NotMeasured):
        return (result.what, result.against, "", "", f"not measured: {result.reason}", "", "", "")
    verdict = "" if result.bound is None else "holds" if result.holds else "MISSED"
    side = "at least" if result.at_least else "at most"
    return (
        result.what,
        result.against,
        f"{result.ours:.4g} {result.unit}",
        f"{result.theirs:.4g} {result.unit}",
        f"{result.value:.3f} {result.value_unit}".rstrip(),
        f"{result.low:.3f} to {result.high:.3f}",
        "" if result.bound is None else f"{side} {result.bound:.2f} {result.value_unit}".rstrip(),
        verdict,
    )


def as_text(results: Iterable[Row]) -> str:
    rows = table(results)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def as_markdown(results: Iterable[Row]) -> str:
    heading, *rows = (f"| {' | '.join(row)} |" for row in table(results))
    return "\n".join([heading, "|" + "---|" * len(COLUMNS), *rows])


def machine() -> dict[str, str | int | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cores": os.cpu_count(),
    }


def write_json(results: Iterable[Row], path: Path) -> None:
    rows = [_as_dict(result) for result in results]
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def read_json(path: Path) -> list[Row]:
    """The rows that `write_json` wrote on this machine; none if the file does not exist."""
    if not path.exists():
        return []
    written = json.loads(path.read_text())
    return [_as_row(found) for found in written["rows"]] if written["machine"] == machine() else []


def _as_row(found: dict[str, Any]) -> Row:
    if "reason" in found:
        return NotMeasured(**found)
    return Result(**{name: value for name, value in found.items() if name != "holds"})


def updated(rows: Iterable[Row], measured: Iterable[Row]) -> list[Row]:
    """`rows` with new measurements in their old places, then the new rows."""
    by_name = {(row.what, row.against): row for row in (*rows, *measured)}
    return list(by_name.values())


def _as_dict(result: Row) -> dict[str, object]:
    if isinstance(result, NotMeasured):
        return asdict(result)
    return {**asdict(result), "holds": result.holds}


def write_into(document: Path, text: str) -> None:
    """Put `text` between the two marks in a Markdown file."""
    begin, end = "<!-- begin table -->\n", "<!-- end table -->"
    before, _, rest = document.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{document} has no line {begin.strip()!r} before {end!r}")
    document.write_text(f"{before}{begin}{text}\n{end}{after}")


# For each panel of the plot: unit, whether bounds are minimums, label of the axis.
PANELS = (
    ("", False, "time taken / time of the rival (less is better)"),
    ("", True, "calls per second / those of the rival (more is better)"),
    ("ms", False, "milliseconds (less is better)"),
    ("us", False, "microseconds (less is better)"),
    ("%", False, "% of a core (less is better)"),
)


# The colours of the plot on a light page, and on a dark one.
INK, PAPER, MISSED, HOLDS, NO_BOUND = "#1f2937", "#ffffff", "#dc2626", "#2563eb", "#6b7280"
DARK = {
    INK: "#e6edf3",
    PAPER: "#0d1117",
    MISSED: "#f87171",
    HOLDS: "#60a5fa",
    NO_BOUND: "#9ba6b2",
}
STYLE: dict[Any, Any] = {  # matplotlib's type of the keys has 300 lines
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "aiopar",  # the same file for the same numbers
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "grid.color": NO_BOUND,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER),
}


def write_plot(results: Sequence[Row], path: Path) -> None:
    """Plot one panel per kind of value: dots with quartiles, bars at the bounds."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    measured = [result for result in results if isinstance(result, Result)]
    panels = []
    for unit, at_least, label in PANELS:
        of_kind = [one for one in measured if (one.value_unit, one.at_least) == (unit, at_least)]
        if of_kind:
            panels.append((label, of_kind))
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 1.6 + 0.36 * len(measured)), layout="constrained")
        FigureCanvasSVG(figure)
        heights = [len(of_kind) + 1.5 for _, of_kind in panels]
        all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (label, of_kind) in zip(all_axes, panels, strict=True):
            _draw_panel(axes, of_kind)
            axes.set_xlabel(label)
        all_axes[0].set_title("dot: median, with quartiles; upright bar: the bound", fontsize=10)
        drawn = StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    path.write_text(_with_dark_colours(drawn.getvalue()))


def _with_dark_colours(svg: str) -> str:
    """Let the reader's system choose between the colours of light and of dark pages."""
    for light in DARK:
        svg = svg.replace(light, f"var(--{light[1:]})")
    light_ones = "".join(f"--{light[1:]}:{light};" for light in DARK)
    dark_ones = "".join(f"--{light[1:]}:{dark};" for light, dark in DARK.items())
    style = f"svg{{{light_ones}}}@media(prefers-color-scheme:dark){{svg{{{dark_ones}}}}}"
    return svg.replace("</style>", f"{style}</style>", 1)


def _draw_panel(axes: "Axes", results: Sequence[Result]) -> None:
    for row, result in enumerate(results):
        colour = MISSED if not result.holds else HOLDS if result.bound else NO_BOUND
        axes.plot([result.low, result.high], [row, row], color=colour, linewidth=4, alpha=0.35)
        axes.plot(result.value, row, "o", color=colour)
        if result.bound is not None:
            axes.plot(result.bound, row, "|", color=INK, markersize=16, markeredgewidth=2)
    names = [f"{result.what}\nagainst {result.against}" for result in results]
    axes.set_yticks(range(len(results)), names)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
