"""A tokenizer in pure Python: workers in threads share the GIL, workers in processes do not.

    python examples/gil.py
    python examples/gil.py --texts 128 --rounds 3 --plot gil.svg

Two replicas tokenize and classify paragraphs of Python's manual. The tokenizer is byte-pair
encoding, written in Python, so its threads take turns: two are no faster than one, and they delay
the event loop. With `ProcessExecutor` in place of `DeviceExecutor` both replicas run at the same
time. A loop over the same batches in two plain processes shows what is possible. A heartbeat
measures how late the event loop is meanwhile.
"""

import argparse
import asyncio
import itertools
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from tqdm import tqdm

import aiopar

BATCH = 32
CLIENTS = 4 * BATCH
PERIOD = 0.001
"""Seconds between two beats of the heartbeat."""
LAG_BOUND = 0.4
"""The loop's lag with processes, against threads, should be at most this."""
SPEED_BOUND = 0.8
"""The speed of worker processes, against plain processes, should be at least this."""


class Tokenizer:
    """Byte-pair encoding, learned from texts. A batch becomes padded token ids [text, token]."""

    def __init__(self, texts: Sequence[str], merges: int = 100) -> None:
        words = Counter(word for text in texts for word in text.split())
        symbols = {word: list(word) for word in words}
        self._ranks: dict[tuple[str, str], int] = {}
        for rank in range(merges):
            pairs: Counter[tuple[str, str]] = Counter()
            for word, number in words.items():
                for pair in itertools.pairwise(symbols[word]):
                    pairs[pair] += number
            pair = max(pairs, key=lambda pair: (pairs[pair], pair))
            self._ranks[pair] = rank
            symbols = {word: merged(parts, pair) for word, parts in symbols.items()}
        known = {symbol for parts in symbols.values() for symbol in parts}
        known |= {letter for word in words for letter in word}
        self._ids = {symbol: number for number, symbol in enumerate(sorted(known), start=2)}
        self.size = len(self._ids) + 2  # 0 is padding, 1 an unknown symbol

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            parts = list(word)
            while pairs := [pair for pair in itertools.pairwise(parts) if pair in self._ranks]:
                parts = merged(parts, min(pairs, key=self._ranks.__getitem__))
            ids += [self._ids.get(part, 1) for part in parts]
        return ids

    def __call__(self, texts: list[str]) -> Tensor:
        rows = [self.encode(text) for text in texts]
        longest = max(map(len, rows))
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """`parts` with each occurrence of `pair` as one part."""
    result: list[str] = []
    for part in parts:
        if result and (result[-1], part) == pair:
            result[-1] += part
        else:
            result.append(part)
    return result


def make_model(tokenizer: Tokenizer) -> nn.Module:
    """Scores [text, 16] of token ids [text, token]."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.EmbeddingBag(tokenizer.size, 64, padding_idx=0),
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)),
    ).eval()


@torch.inference_mode()
def classify(tokenizer: Tokenizer, model: nn.Module, batches: list[list[str]]) -> Tensor:
    """What a plain process does: no queue, no event loop."""
    return torch.cat([model(tokenizer(texts)) for texts in batches])


@dataclass(slots=True)
class Measured:
    """One way to classify texts: per round the speed, and how late the beats of the loop were."""

    texts_per_second: list[float] = field(default_factory=list)
    late: list[list[float]] = field(default_factory=list)  # ms

    def all_beats(self) -> list[float]:
        return sorted(itertools.chain.from_iterable(self.late))


Way = Callable[[list[str]], Awaitable[Tensor]]
"""Classifies texts."""


async def serve(batcher: aiopar.Batcher[str, Tensor], texts: list[str]) -> Tensor:
    """Classify texts for clients that each send the next text when they have an answer."""
    async with aiopar.map(batcher, texts, concurrency=CLIENTS) as scores:
        rows = [row async for row in scores]
    return await asyncio.to_thread(torch.stack, rows)


async def run_plain(
    plain: ProcessPoolExecutor, tokenizer: Tokenizer, model: nn.Module, texts: list[str]
) -> Tensor:
    """Classify texts in two plain processes, half of the batches each."""
    batches = in_batches(texts)
    middle = len(batches) // 2
    loop = asyncio.get_running_loop()
    halves = [
        loop.run_in_executor(plain, classify, tokenizer, model, part)
        for part in (batches[:middle], batches[middle:])
    ]
    return await asyncio.to_thread(torch.cat, await asyncio.gather(*halves))


async def open_ways(
    stack: AsyncExitStack, tokenizer: Tokenizer, model: nn.Module, plain: ProcessPoolExecutor
) -> dict[str, Way]:
    ways: dict[str, Way] = {}
    for name, executor in (
        ("one thread", aiopar.DeviceExecutor(["cpu"], num_threads=1)),
        ("two threads", aiopar.DeviceExecutor(["cpu", "cpu"], num_threads=1)),
        ("two processes", aiopar.ProcessExecutor(["cpu", "cpu"], num_threads=1)),
    ):
        await stack.enter_async_context(executor)
        pool = aiopar.ReplicaPool(model, executor=executor, warmup=torch.ones(1, 4).long())
        await stack.enter_async_context(pool)
        batcher = aiopar.Batcher(pool, collate_fn=tokenizer, max_batch_size=BATCH)
        ways[name] = partial(serve, await stack.enter_async_context(batcher))
    ways["two plain processes"] = partial(run_plain, plain, tokenizer, model)
    return ways


async def measure(texts: list[str], rounds: int, plain: ProcessPoolExecutor) -> dict[str, Measured]:
    """Measure all ways, one after the other, in each round."""
    tokenizer = await aiopar.run_sync(Tokenizer, texts)
    model = await aiopar.run_sync(make_model, tokenizer)
    expected = await aiopar.run_sync(classify, tokenizer, model, in_batches(texts))
    async with AsyncExitStack() as stack:
        ways = await open_ways(stack, tokenizer, model, plain)
        measured = {name: Measured() for name in ways}
        for index in tqdm(range(-1, rounds), "one round to warm up, then measured", leave=False):
            for name, way in ways.items():
                began = time.perf_counter()
                scores, late = await with_heartbeat(way(texts))
                seconds = time.perf_counter() - began
                await aiopar.run_sync(partial(torch.testing.assert_close, scores, expected))
                if index >= 0:
                    measured[name].texts_per_second.append(len(texts) / seconds)
                    measured[name].late.append(late)
    return measured


async def with_heartbeat(work: Awaitable[Tensor]) -> tuple[Tensor, list[float]]:
    """The result of `work`, and by how many milliseconds each beat meanwhile was late."""
    late: list[float] = []
    working = True

    async def beat() -> None:
        while working:
            due = time.perf_counter() + PERIOD
            await asyncio.sleep(PERIOD)
            late.append((time.perf_counter() - due) * 1000)

    heartbeat = asyncio.create_task(beat())
    try:
        return await work, late
    finally:
        working = False
        await heartbeat


def in_batches(texts: list[str]) -> list[list[str]]:
    return [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]


def read_manual(limit: int) -> list[str]:
    """Paragraphs of Python's manual."""
    paragraphs = [
        " ".join(paragraph.split())
        for text in topics.values()
        for paragraph in text.split("\n\n")
        if paragraph[:1].isalpha() and len(paragraph) > 200
    ]
    return list(itertools.islice(itertools.cycle(paragraphs), limit))


def p99(beats: list[float]) -> float:
    return sorted(beats)[len(beats) * 99 // 100]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median ratio of the rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def plot(measured: dict[str, Measured], path: Path) -> None:
    # Here, because the worker processes import this module, and draw nothing.
    from matplotlib import pyplot

    figure, (lags, speeds) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for index, (name, one) in enumerate(measured.items()):
        beats = one.all_beats()
        shares = [100 * (1 - number / len(beats)) for number in range(len(beats))]
        lags.plot([max(beat, 0.01) for beat in beats], shares, color=f"C{index}", label=name)
    lags.axhline(1, color="gray", linestyle=":")
    lags.set(title="Beats of the event loop that are later, % (dotted: p99)", xlabel="ms")
    lags.set(xscale="log", yscale="log")
    lags.legend(loc="upper right")
    medians = [statistics.median(one.texts_per_second) for one in measured.values()]
    speeds.barh([*measured], medians, color=[f"C{index}" for index in range(len(measured))])
    speeds.invert_yaxis()
    speeds.set(title="Texts per second")
    figure.savefig(path)
    pyplot.close(figure)


def report(measured: dict[str, Measured]) -> None:
    print(f"{'':22}{'texts/s':>8}   beats of the loop, ms late: p50     p99   worst")
    for name, one in measured.items():
        beats = one.all_beats()
        late = f"{statistics.median(beats):34.2f}{p99(beats):8.2f}{beats[-1]:8.2f}"
        print(f"{name:22}{statistics.median(one.texts_per_second):8.0f}{late}")
    one, threads, processes, plain = measured.values()
    lag = ratio(*([p99(beats) for beats in way.late] for way in (processes, threads)))
    print("\nmedian ratios:")
    for what, value, bound in (
        ("p99 of the lag, processes / threads", lag, f"at most {LAG_BOUND}"),
        (
            "texts/s, processes / plain processes",
            ratio(processes.texts_per_second, plain.texts_per_second),
            f"at least {SPEED_BOUND}",
        ),
        (
            "texts/s, processes / threads",
            ratio(processes.texts_per_second, threads.texts_per_second),
            "",
        ),
        ("texts/s, two threads / one", ratio(threads.texts_per_second, one.texts_per_second), ""),
    ):
        print(f"{what:38}{value:6.2f}   {bound}".rstrip())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=1024, help="texts per round")
    parser.add_argument("--rounds", type=int, default=7, help="repeats that are measured")
    parser.add_argument("--plot", type=Path, default=Path("gil.png"))
    args = parser.parse_args(argv)
    for name, least in (("texts", 2 * BATCH), ("rounds", 1)):
        if getattr(args, name) < least:
            number = getattr(args, name)
            parser.error(f"argument --{name}: expected at least {least}, got {number}")

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, torch.set_num_threads, (1,)) as plain:
        measured = asyncio.run(measure(read_manual(args.texts), args.rounds, plain))
    report(measured)
    plot(measured, args.plot)
    print(f"\nThe plot is in {args.plot}.")


if __name__ == "__main__":
    main()
