"""The model of the service: sentences in, unit vectors out."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

import aiopar
from aiopar.data import Stream
from examples.quickstart import SentenceEncoder

TOGETHER = 64
"""How many texts of one request are queued at a time, so that no client fills the queue."""

_PIECES = re.compile(r"[^\W_]{1,6}|\S")


class Embedder(SentenceEncoder):
    """all-MiniLM-L6-v2. The worker copies its output to the CPU, not the loop."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Unit vectors [text, 384]."""
        return super().forward(input_ids, attention_mask).cpu()


def about_tokens(text: str, *, at_most: int) -> int:
    """A fast estimate of the number of tokens, to batch texts of similar length."""
    # This runs on the loop, so it reads only the start of a long text.
    return min(len(_PIECES.findall(text, 0, 8 * at_most)), at_most)


def embedded(batcher: aiopar.Batcher[str, Tensor], texts: Sequence[str]) -> Stream[Tensor]:
    """The vectors of the texts, in order. At most `TOGETHER` texts are queued at a time."""
    return aiopar.map(batcher, texts, concurrency=TOGETHER)


async def embed_all(
    batcher: aiopar.Batcher[str, Tensor],
    texts: Sequence[str],
    *,
    timeout: float | None = None,  # noqa: ASYNC109  # for the batcher
) -> list[Tensor]:
    """The vectors of all texts. A cancelled caller removes its texts from the queue."""
    if len(texts) == 1:  # most requests have one text
        return [await batcher(texts[0], timeout=timeout)]

    async def embed(numbered: tuple[int, str]) -> tuple[int, Tensor]:
        number, text = numbered
        return number, await batcher(text, timeout=timeout)

    # In the order of completion: if one text is refused, the other texts leave the queue at once.
    # Otherwise the texts before it would be computed first, for a request that fails.
    items = list(enumerate(texts))
    async with aiopar.map(embed, items, concurrency=TOGETHER, in_order=False) as found:
        vectors = dict([each async for each in found])
    return [vectors[number] for number in range(len(texts))]


def cosines(source: Tensor, others: Sequence[Tensor]) -> list[float]:
    """The cosine of `source` and each of the others; all are unit vectors."""
    return (torch.stack(list(others)) @ source).tolist()
