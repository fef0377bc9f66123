"""Sentence embeddings over HTTP: FastAPI, a Batcher, a replica of MiniLM on every device.

    make serve
    uvicorn --factory examples.embedding_service.app:create_app

POST /embed, /embed/stream (NDJSON), /similarity and /search; /docs says what they take, / is a page
to try them. Requests of all clients go together in batches of texts of like length.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from fastapi import FastAPI
from fastapi.responses import FileResponse, StreamingResponse
from torch import Tensor

import aiopar
from aiopar.data import Stream
from aiopar.fastapi import install, lifespan, responses

from .corpus import Corpus
from .encoder import Embedder
from .limits import MaxBodySize
from .schemas import (
    Embeddings,
    EmbedRequest,
    Hit,
    Hits,
    SearchRequest,
    Similarities,
    SimilarityRequest,
    StreamRequest,
)

PAGE = Path(__file__).with_name("page.html")
MAX_BODY = 4_000_000
TOGETHER = 64
"""How many texts of one request wait at a time: one client must not fill the queue alone."""


def create_app(
    devices: Sequence[str | int] | None = None, *, corpus_size: int = 200, timeout: float = 30.0
) -> FastAPI:
    """The application; `devices` as in `ReplicaPool`."""
    embedder = Embedder().eval()
    pool = aiopar.ReplicaPool(embedder, devices, warmup=embedder.tokenize(["Warm up."] * 8))
    batcher = aiopar.Batcher(
        pool,
        max_batch_size=32,
        collate_fn=embedder.tokenize,  # on the worker, and padded to the longest of the batch
        cost=len,  # texts of like length go together: fewer pads
        timeout=timeout,
    )
    corpus = Corpus(batcher, corpus_size)

    @asynccontextmanager
    async def ready(_: FastAPI) -> AsyncIterator[None]:
        await corpus.embed()
        yield

    app = FastAPI(
        title="Sentence embeddings",
        description="all-MiniLM-L6-v2 on every device of this machine, by aiopar.",
        version=aiopar.__version__,
        lifespan=lifespan(pool, batcher, app_lifespan=ready),
        responses=responses,
    )
    install(app)
    app.add_middleware(MaxBodySize, max_bytes=MAX_BODY)
    add_routes(app, batcher, corpus)
    return app


def add_routes(app: FastAPI, batcher: aiopar.Batcher, corpus: Corpus) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE)

    @app.post("/embed")
    async def embed(request: EmbedRequest) -> Embeddings:
        """The vector of each text."""
        texts = [request.texts] if isinstance(request.texts, str) else request.texts
        vectors = [vector.tolist() async for vector in embedded(batcher, texts)]
        return Embeddings(embeddings=vectors)

    @app.post("/embed/stream", response_class=StreamingResponse)
    async def stream(request: StreamRequest) -> StreamingResponse:
        """The vectors in the order of the texts, a line of JSON each, as soon as they are there."""
        return StreamingResponse(lines(batcher, request.texts), media_type="application/x-ndjson")

    @app.post("/similarity")
    async def similarity(request: SimilarityRequest) -> Similarities:
        """How near each text is to the source."""
        texts = [request.source, *request.texts]
        source, *others = [vector async for vector in embedded(batcher, texts)]
        scores = await aiopar.run_sync(lambda: (torch.stack(others) @ source).tolist())
        return Similarities(scores=scores)

    @app.post("/search")
    async def search(request: SearchRequest) -> Hits:
        """The paragraphs of Python's manual that are nearest to a question."""
        found = await corpus.nearest(await batcher(request.query), request.limit)
        return Hits(hits=[Hit(score=score, topic=topic, text=text) for score, topic, text in found])


def embedded(batcher: aiopar.Batcher, texts: Sequence[str]) -> Stream[Tensor]:
    """The vector of each text, in order; some of them wait at a time."""
    return aiopar.map(batcher, texts, concurrency=TOGETHER)


async def lines(batcher: aiopar.Batcher, texts: Sequence[str]) -> AsyncIterator[str]:
    """NDJSON; a reader that is slow, or stops, slows or stops what is computed for it."""
    async with embedded(batcher, texts) as vectors:
        index = 0
        async for vector in vectors:
            yield json.dumps({"index": index, "embedding": vector.tolist()}) + "\n"
            index += 1
