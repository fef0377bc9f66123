"""Sentence embeddings over HTTP: FastAPI, a Batcher, a replica of MiniLM on every device.

    make serve
    uvicorn --factory examples.embedding_service.app:create_app

POST /embed, /embed/stream (NDJSON), /similarity and /search; /docs says what they take, / is a page
to try them. Requests of all clients go together in batches of texts of like length. For who runs
it: /healthz, /readyz and /metrics. It asks nobody who they are: hence on loopback.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

import aiopar
from aiopar.fastapi import install, lifespan
from aiopar.serve import PrometheusMetrics
from examples.quickstart import MAX_TOKENS

from . import answers
from .bodies import JsonRoute
from .corpus import Corpus
from .encoder import Embedder, about_tokens, cosines, embed_all, embedded
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

PAGE = Path(__file__).with_name("page")
BATCH_TOKENS = 300
"""Pads included. More in one batch made it slower on two cores: measure yours, as
docs/guides/tuning_batching.md says."""
PAGE_HEADERS = {  # scripts and styles from here alone, and in nobody's frame
    "content-security-policy": "default-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def create_app(
    devices: Sequence[str | int] | None = None, *, corpus_size: int = 200, timeout: float = 30.0
) -> FastAPI:
    """The application; `devices` as in `ReplicaPool`, `timeout` (seconds) for each text."""
    embedder = Embedder().eval()
    pool = aiopar.ReplicaPool(embedder, devices, warmup=embedder.tokenize(["Warm up."] * 8))
    batcher = aiopar.Batcher(
        pool,
        max_batch_size=32,
        collate_fn=embedder.tokenize,  # on the worker, and padded to the longest of the batch
        # Texts of like length go together, which spares pads; and as many as the caches like.
        cost=lambda text: about_tokens(text, at_most=min(MAX_TOKENS, BATCH_TOKENS)),
        max_batch_cost=BATCH_TOKENS,
        padded=True,
        timeout=timeout,
    )
    corpus = Corpus(batcher, corpus_size)

    @asynccontextmanager
    async def ready(_: FastAPI) -> AsyncIterator[None]:
        with closing(PrometheusMetrics(pool, batcher)):
            await corpus.embed()
            yield

    app = FastAPI(
        title="Sentence embeddings",
        description="all-MiniLM-L6-v2 on every device of this machine, by aiopar.",
        version=aiopar.__version__,
        lifespan=lifespan(pool, batcher, app_lifespan=ready, gc_threshold=10_000),
        responses=answers.REFUSALS,
        max_body_size=answers.MAX_BODY,
    )
    install(app)
    app.add_exception_handler(RequestValidationError, answers.invalid)
    add_routes(app, batcher, corpus)
    return app


def add_routes(app: FastAPI, batcher: aiopar.Batcher, corpus: Corpus) -> None:
    app.router.route_class = JsonRoute

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=PAGE))

    @app.post("/embed")
    async def embed(request: EmbedRequest) -> Embeddings:
        """The vector of each text."""
        texts = [request.texts] if isinstance(request.texts, str) else request.texts
        vectors = await embed_all(batcher, texts)
        return Embeddings(embeddings=[vector.tolist() for vector in vectors])

    @app.post("/embed/stream", response_class=StreamingResponse, responses=answers.STREAM)
    async def stream(request: StreamRequest) -> StreamingResponse:
        """The vectors in the order of the texts, a line of JSON each, as soon as they are there."""
        vectors = embedded(batcher, request.texts)
        # Before the response begins: what goes wrong until here is answered with its own status.
        first = await anext(vectors)
        return StreamingResponse(answers.lines(first, vectors), media_type=answers.NDJSON)

    @app.post("/similarity")
    async def similarity(request: SimilarityRequest) -> Similarities:
        """How near each text is to the source."""
        source, *others = await embed_all(batcher, [request.source, *request.texts])
        return Similarities(scores=await aiopar.run_sync(cosines, source, others))

    @app.post("/search")
    async def search(request: SearchRequest) -> Hits:
        """The paragraphs of Python's manual that are nearest to a question."""
        found = await corpus.nearest(await batcher(request.query), request.limit)
        return Hits(hits=[Hit(score=score, topic=topic, text=text) for score, topic, text in found])
