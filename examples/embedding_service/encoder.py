"""The model of the service: sentences in, unit vectors out."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import aiopar
from aiopar.data import Stream
from examples.quickstart import SentenceEncoder

TOGETHER = 64
"""How many texts of one request are queued at a time, so that no client fills the queue."""

_PIECES = re.compile(r"[^\W_]{1,6}|\S")


class Embedding(NamedTuple):
    """The output for one text, or for a batch of texts."""

    vector: Tensor
    """Length 1: [384], or [text, 384]."""
    tokens: Tensor
    """The number of tokens that the model has read: [], or [text]."""


class Embedder(nn.Module):
    """all-MiniLM-L6-v2. The worker copies its output to the CPU, not the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = SentenceEncoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Embedding:
        vectors = self.encoder(input_ids, attention_mask)
        return Embedding(vectors.cpu(), attention_mask.sum(1).cpu())


def about_tokens(text: str, *, at_most: int) -> int:
    """A fast estimate of the number of tokens, to batch texts of similar length."""
    # This runs on the loop, so it reads only the start of a long text.
    return min(len(_PIECES.findall(text, 0, 8 * at_most)), at_most)


def embedded(batcher: aiopar.Batcher[str, Embedding], texts: Sequence[str]) -> Stream[Embedding]:
    """The embeddings of the texts, in order. At most `TOGETHER` texts are queued at a time."""
    return aiopar.map(batcher, texts, concurrency=TOGETHER)


async def embed_all(
    batcher: aiopar.Batcher[str, Embedding],
    texts: Sequence[str],
    *,
    timeout: float | None = None,  # noqa: ASYNC109  # for the batcher
) -> list[Embedding]:
    """The embeddings of all texts. A cancelled caller removes its texts from the queue."""
    if len(texts) == 1:  # most requests have one text
        return [await batcher(texts[0], timeout=timeout)]

    async def embed(numbered: tuple[int, str]) -> tuple[int, Embedding]:
        number, text = numbered
        return number, await batcher(text, timeout=timeout)

    # In the order of completion: if one text is refused, the other texts leave the queue at once.
    # Otherwise the texts before it would be computed first, for a request that fails.
    items = list(enumerate(texts))
    async with aiopar.map(embed, items, concurrency=TOGETHER, in_order=False) as found:
        embeddings = dict([each async for each in found])
    return [embeddings[number] for number in range(len(texts))]


def cosines(source: Embedding, others: Sequence[Embedding]) -> list[float]:
    """The cosine of `source` and each of the others."""
    return (torch.stack([other.vector for other in others]) @ source.vector).tolist()
