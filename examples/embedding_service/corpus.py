"""The searched texts: paragraphs of Python's manual, embedded when the service starts."""

import math

import torch
from torch import Tensor

import aiopar
from examples.quickstart import read_manual

from .encoder import Embedding, embed_all


class Corpus:
    """Paragraphs and their vectors. Ranking runs on a worker."""

    def __init__(self, batcher: aiopar.Batcher[str, Embedding], size: int) -> None:
        if size < 1:
            raise ValueError(f"corpus_size must be at least 1, got {size}")
        self._batcher = batcher
        self._paragraphs = read_manual(size)
        self._vectors: Tensor | None = None

    async def embed(self) -> None:
        """Embed all paragraphs, without a deadline, because no client waits."""
        texts = [text for text, _ in self._paragraphs]
        embeddings = await embed_all(self._batcher, texts, timeout=math.inf)
        vectors = [embedding.vector for embedding in embeddings]
        self._vectors = await aiopar.run_sync(torch.stack, vectors)

    async def nearest(self, vector: Tensor, limit: int) -> list[tuple[float, str, str]]:
        """Score, topic and text of the paragraphs nearest to `vector`, best first."""
        vectors = self._vectors
        if vectors is None:
            raise RuntimeError("embed() the corpus first")
        scores, indices = await aiopar.run_sync(_rank, vectors, vector, limit)
        return [
            (score, self._paragraphs[index][1], self._paragraphs[index][0])
            for score, index in zip(scores, indices, strict=True)
        ]


def _rank(vectors: Tensor, vector: Tensor, limit: int) -> tuple[list[float], list[int]]:
    best = (vectors @ vector).topk(min(limit, len(vectors)))
    return best.values.tolist(), best.indices.tolist()
