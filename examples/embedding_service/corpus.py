"""The searched texts: docstrings of the standard library, embedded when the service starts."""

import logging
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

import aiopar
from examples.embed_corpus import paragraphs, python_files

from .encoder import Embedding, embed_all
from .schemas import Hit

LEFT_OUT = {"distutils", "encodings", "idlelib", "tkinter", "turtle"}  # a third of all paragraphs

_log = logging.getLogger("uvicorn.error")  # uvicorn's log of startup and shutdown


class Corpus:
    """Paragraphs and their vectors. Reading and ranking run on workers."""

    def __init__(self, batcher: aiopar.Batcher[str, Embedding], size: int) -> None:
        if size < 1:
            raise ValueError(f"corpus_size must be at least 1, got {size}")
        self._batcher = batcher
        self._size = size
        self._paragraphs: list[tuple[str, str]] = []
        self._vectors: Tensor | None = None

    def __len__(self) -> int:
        return len(self._paragraphs)

    async def embed(self) -> None:
        """Embed all paragraphs, without a deadline, because no client waits."""
        self._paragraphs = await aiopar.run_sync(read_docstrings, self._size)
        _log.info("Embedding %d paragraphs to search", len(self))
        texts = [text for text, _ in self._paragraphs]
        embeddings = await embed_all(self._batcher, texts, timeout=math.inf)
        vectors = [embedding.vector for embedding in embeddings]
        self._vectors = await aiopar.run_sync(torch.stack, vectors)

    async def nearest(self, vector: Tensor, limit: int) -> list[Hit]:
        """The paragraphs nearest to `vector`, best first."""
        vectors = self._vectors
        if vectors is None:
            raise RuntimeError("embed() the corpus first")
        scores, indices = await aiopar.run_sync(_rank, vectors, vector, limit)
        return [
            Hit(score=score, module=self._paragraphs[index][1], text=self._paragraphs[index][0])
            for score, index in zip(scores, indices, strict=True)
        ]


def read_docstrings(size: int) -> list[tuple[str, str]]:
    """At most `size` paragraphs of prose from public modules, each with the name of its module."""
    root = Path(sysconfig.get_path("stdlib"))
    module_of: dict[str, str] = {}
    files = python_files(None)
    for file in files[:: max(1, len(files) // (4 * size + 100))]:  # enough for a small corpus
        *packages, name = file.relative_to(root).with_suffix("").parts
        path = packages if name == "__init__" else [*packages, name]
        if LEFT_OUT.isdisjoint(path) and not any(part.startswith("_") for part in path):
            prose = [text for text in paragraphs(file.read_bytes()) if text[0].isalpha()]
            module_of |= dict.fromkeys(prose, ".".join(path))
    return list(module_of.items())[:: max(1, len(module_of) // size)][:size]


def _rank(vectors: Tensor, vector: Tensor, limit: int) -> tuple[list[float], list[int]]:
    best = (vectors @ vector).topk(min(limit, len(vectors)))
    return best.values.tolist(), best.indices.tolist()
