"""Measure aiopar against its rivals: `make bench`, or python examples/benchmarks/run.py.

By default it measures the foundation, in under five minutes. With `--all` (`make bench-all`) it
also measures training, loading and serving, in about half an hour, and draws
tuning_batching.png. It prints a table, and writes benchmarks.json, benchmarks.svg and the table in
benchmarks.md into docs/. Rows that were not measured are kept if they come from this machine. With
`--only` it measures the named parts, and writes their rows only with `--write`.
"""

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.benchmarks import (
    continuous,
    data_parallel,
    embedding,
    feeding,
    four_modules,
    http_serving,
    loop_lag,
    lstm_fork,
    machines,
    overload,
    processes,
    report,
    serving,
    short_calls,
    training,
    tuning,
)
from examples.benchmarks.harness import QUICK, Plan, Result, Row

Measure = Callable[[Plan], Coroutine[Any, Any, Sequence[Row]]]

FOUNDATION: dict[str, Measure] = {
    "short calls": short_calls.measure,
    "four modules": four_modules.measure,
    "data parallel": data_parallel.measure,
    "LSTM ensemble": lstm_fork.measure,
    "loop lag": loop_lag.measure,
}
ROWS: dict[str, Measure] = {
    **FOUNDATION,
    "training": training.measure,
    "feeding": feeding.measure,
    "serving": serving.measure,
    "overload": overload.measure,
    "continuous batching": continuous.measure,
    "language model": continuous.measure_language_model,
    "processes": processes.measure,
    "machines": machines.measure,
    "serving over HTTP": http_serving.measure,
    "embedding service": embedding.measure,
}
DOCS = Path(__file__).parents[2] / "docs"


async def measure_rows(names: Iterable[str], plan: Plan) -> list[Row]:
    results: list[Row] = []
    with tqdm(names, leave=False) as progress:
        try:
            for name in progress:
                progress.set_description(name)
                results += await ROWS[name](plan)
        except BaseException:  # a failing rival or Ctrl-C must not lose earlier results
            progress.write(report.as_text(results))
            raise
    return results


def measure_on_uvloop(plan: Plan) -> list[Result]:
    """Measure the short calls on uvloop too, if it is installed; for information."""
    try:
        import uvloop
    except ImportError:
        return []
    return uvloop.run(short_calls.measure_on(2, plan, loop_name="uvloop"))


def write_all(rows: Sequence[Row], folder: Path) -> None:
    report.write_json(rows, folder / "benchmarks.json")
    report.write_plot(rows, folder / "benchmarks.svg")
    page = folder / "benchmarks.md"
    if page.exists():
        report.write_into(page, report.as_markdown(rows))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=Plan().pairs, help="samples of each rival")
    parser.add_argument("--folder", type=Path, default=DOCS, help="where the files go")
    parser.add_argument("--quick", action="store_true", help="show that it runs; write nothing")
    parser.add_argument("--write", action="store_true", help="write the rows of --only too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--all", action="store_true", help="measure everything")
    what.add_argument(
        "--only", nargs="+", choices=ROWS, metavar="WHAT", help=f"some of: {', '.join(ROWS)}"
    )
    args = parser.parse_args(argv)
    plan = QUICK if args.quick else Plan(pairs=args.pairs)
    writes = not args.quick and (args.write or not args.only)
    if writes:
        args.folder.mkdir(parents=True, exist_ok=True)  # fail now, not after all measurements
    names = args.only or (ROWS if args.all else FOUNDATION)
    results = asyncio.run(measure_rows(names, plan))
    if args.all:
        results += measure_on_uvloop(plan)
    print(report.as_text(results))
    if not writes:
        return
    if not args.all:
        results = report.updated(report.read_json(args.folder / "benchmarks.json"), results)
    write_all(results, args.folder)
    if args.all:
        tuning.write_plot(asyncio.run(tuning.measure(plan)), args.folder / "tuning_batching.png")


if __name__ == "__main__":
    main()
