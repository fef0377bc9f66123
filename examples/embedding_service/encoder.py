"""The model of the service: sentences in, unit vectors out."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

import aiopar
from aiopar.data import Stream
from examples.quickstart import SentenceEncoder

TOGETHER = 64
"""How many texts of one request wait at a time: one client must not fill the queue alone."""

_PIECES = re.compile(r"[^\W_]{1,6}|\S")


class Embedder(SentenceEncoder):
    """all-MiniLM-L6-v2, for one batch of tokens as `Batcher` makes it."""

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        """Unit vectors [text, 384], on the CPU: brought there by the worker, not by the loop."""
        return super().forward(tokens["input_ids"], tokens["attention_mask"]).cpu()


def about_tokens(text: str, *, at_most: int) -> int:
    """How many tokens a text has, about, told in microseconds: to batch like by like."""
    # On the loop, for 64 texts in a row: of a long one no more is looked at than makes so many.
    return min(len(_PIECES.findall(text, 0, 8 * at_most)), at_most)


def embedded(batcher: aiopar.Batcher, texts: Sequence[str]) -> Stream[Tensor]:
    """The vector of each text, in order; some of them wait at a time."""
    return aiopar.map(batcher, texts, concurrency=TOGETHER)


async def embed_all(
    batcher: aiopar.Batcher,
    texts: Sequence[str],
    *,
    timeout: float | None = None,  # noqa: ASYNC109  # of each text, in the queue
) -> list[Tensor]:
    """The vectors of all texts; whoever gives up waiting takes its texts out of the queue."""
    if len(texts) == 1:  # most requests: nothing to keep in order
        return [await batcher(texts[0], timeout=timeout)]

    async def embed(numbered: tuple[int, str]) -> tuple[int, Tensor]:
        number, text = numbered
        return number, await batcher(text, timeout=timeout)

    # Each when it is ready: where one is refused, those before it leave the queue at once. In order
    # they would be computed first, for a request that fails.
    items = list(enumerate(texts))
    async with aiopar.map(embed, items, concurrency=TOGETHER, in_order=False) as found:
        vectors = dict([each async for each in found])
    return [vectors[number] for number in range(len(texts))]


def cosines(source: Tensor, others: Sequence[Tensor]) -> list[float]:
    """Of one unit vector and each of the others."""
    return (torch.stack(list(others)) @ source).tolist()
