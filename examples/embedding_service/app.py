"""Sentence embeddings over HTTP: FastAPI, a Batcher, and a MiniLM replica on every device.

    make serve
    make serve WORKERS=processes
    WORKERS=ray uvicorn --factory examples.embedding_service.app:create_app

Endpoints: /v1/embeddings and /v1/models as in OpenAI's API; POST /embed/stream, /similarity
and /search. /docs describes them, and / is a page to try them and to watch batches grow under load.
Batches hold texts of similar length, from all clients; the header Server-Timing of a response says
which batches its texts were in. For operators: /healthz, /readyz and /metrics; DASHBOARD=/aiopar
adds a live page at that path. The service has no authentication, so it listens on loopback.

WORKERS says where texts are tokenised and embedded: in `threads` (the default), in `processes`, or
in the actors of `ray`, which may be on other machines.
"""

import base64
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import APIRouter, FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import normalize

import aiopar
from aiopar.fastapi import install, lifespan
from aiopar.serve import PrometheusMetrics
from examples.quickstart import MAX_TOKENS, tokenize

from . import answers
from .corpus import Corpus
from .encoder import Embedder, Embedding, about_tokens, cosines, embed_all, embedded
from .routes import BatchesOfRequests, JsonRoute, OpenAIRoute
from .schemas import (
    MODEL,
    EmbeddingObject,
    EmbeddingsRequest,
    EmbeddingsResponse,
    Hits,
    Model,
    Models,
    SearchRequest,
    Similarities,
    SimilarityRequest,
    StreamRequest,
    Usage,
)

PAGE = Path(__file__).with_name("page")
BATCH_TOKENS = 300
"""Tokens per batch, padding included. Larger batches were slower on two cores. To find the best
value for your machine, see docs/guides/tuning_batching.md."""
PAGE_HEADERS = {  # only scripts and styles of this server, and no frames
    "content-security-policy": "default-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def make_executor(
    workers: str, devices: Sequence[str | int] | None = None
) -> aiopar.DeviceExecutor:
    """The workers of the replicas. `workers`: "threads", "processes" or "ray"."""
    if workers == "threads":
        return aiopar.DeviceExecutor(devices)
    if workers == "processes":
        return aiopar.ProcessExecutor(devices, preload=[Embedder.__module__])
    if workers == "ray":
        from aiopar.ray import RayExecutor  # an extra

        devices = devices or ["cuda"] * torch.cuda.device_count() or ["cpu", "cpu"]
        kinds = {str(device).partition(":")[0] for device in devices}
        if kinds not in ({"cpu"}, {"cuda"}):
            raise ValueError(f"with ray, devices must be all cpu or all cuda, got {devices}")
        return RayExecutor(len(devices), num_gpus=int(kinds == {"cuda"}))
    raise ValueError(f"WORKERS must be threads, processes or ray, got {workers!r}")


def create_app(
    devices: Sequence[str | int] | None = None,
    *,
    workers: str | None = None,
    corpus_size: int = 1000,
    timeout: float = 30.0,
) -> FastAPI:
    """The application. It can be started once.

    Args:
        devices: One replica for each; with Ray, one actor. None: all of this machine.
        workers: As for `make_executor`. None: the environment variable WORKERS, or "threads".
        corpus_size: The largest number of paragraphs to search.
        timeout: Seconds per text.
    """
    executor = make_executor(workers or os.environ.get("WORKERS") or "threads", devices)
    embedder = Embedder().eval()
    pool = aiopar.ReplicaPool(
        embedder, executor=executor, warmup=embedder.encoder.tokenize(["Warm up."] * 8)
    )
    batcher = aiopar.Batcher(
        pool,
        max_batch_size=32,
        # Runs where the replica is; pads to the longest text of the batch. It goes to processes and
        # actors by pickle, so it refers to the tokenizer only: a method would refer to the weights.
        collate_fn=partial(tokenize, embedder.encoder.tokenizer),
        # Texts of similar length go together, which saves padding.
        cost=lambda text: about_tokens(text, at_most=min(MAX_TOKENS, BATCH_TOKENS)),
        max_batch_cost=BATCH_TOKENS,
        padded=True,
        timeout=timeout,
    )
    batcher.add_observer(BatchesOfRequests())
    corpus = Corpus(batcher, corpus_size)

    @asynccontextmanager
    async def ready(_: FastAPI) -> AsyncIterator[None]:
        with closing(PrometheusMetrics(pool, batcher)):
            await corpus.embed()
            yield

    app = FastAPIOffline(  # Swagger UI on /docs comes from this server, not from a CDN
        redoc_url=None,
        title="Sentence embeddings",
        description="all-MiniLM-L6-v2 on every device, by aiopar.",
        version=aiopar.__version__,
        lifespan=lifespan(executor, pool, batcher, app_lifespan=ready, gc_threshold=10_000),
        max_body_size=answers.MAX_BODY,
    )
    install(app, dashboard=os.environ.get("DASHBOARD"), stuck_after=60.0)
    app.add_exception_handler(RequestValidationError, answers.invalid)
    app.include_router(
        openai_routes(batcher, embedder.encoder.tokenizer), responses=answers.OPENAI_REFUSALS
    )
    app.include_router(routes(batcher, corpus), responses=answers.REFUSALS)
    app.mount("/page", StaticFiles(directory=PAGE))
    return app


def openai_routes(batcher: aiopar.Batcher[str, Embedding], tokenizer: Tokenizer) -> APIRouter:
    """The part of OpenAI's API that their clients need for embeddings."""
    router = APIRouter(prefix="/v1", route_class=OpenAIRoute)

    @router.post("/embeddings")
    async def embeddings(request: EmbeddingsRequest) -> EmbeddingsResponse:
        """The vector of each text, as OpenAI's API has it."""
        check_model(request.model)
        found = await embed_all(batcher, await texts_of(request.input, tokenizer))
        vectors = [embedding.vector for embedding in found]
        if request.dimensions is not None:
            vectors = [normalize(vector[: request.dimensions], dim=0) for vector in vectors]
        encode = as_base64 if request.encoding_format == "base64" else Tensor.tolist
        tokens = sum(int(embedding.tokens) for embedding in found)
        return EmbeddingsResponse(
            data=[
                EmbeddingObject(index=index, embedding=encode(vector))
                for index, vector in enumerate(vectors)
            ],
            usage=Usage(prompt_tokens=tokens, total_tokens=tokens),
        )

    @router.get("/models")
    async def models() -> Models:
        """The models of the service."""
        return Models()

    @router.get("/models/{model:path}")
    async def model(model: str) -> Model:
        """One model."""
        check_model(model)
        return Model()

    return router


def check_model(name: str) -> None:
    if name != MODEL:
        raise HTTPException(404, f"The model {name!r} does not exist: try {MODEL!r}")


async def texts_of(given: Any, tokenizer: Tokenizer) -> list[str]:
    """The texts of an `Input`."""
    many = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if isinstance(many[0], str):
        return many
    arrays = [tokens[:MAX_TOKENS] for tokens in many]
    return await aiopar.run_sync(tokenizer.decode_batch, arrays)


def as_base64(vector: Tensor) -> str:
    return base64.b64encode(vector.numpy().tobytes()).decode()


def routes(batcher: aiopar.Batcher[str, Embedding], corpus: Corpus) -> APIRouter:
    """The page, and what it needs."""
    router = APIRouter(route_class=JsonRoute)

    @router.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    @router.post("/embed/stream", response_class=StreamingResponse, responses=answers.STREAM)
    async def stream(request: StreamRequest) -> StreamingResponse:
        """The vector of each text as a line of JSON, in order, as soon as it is ready."""
        others = embedded(batcher, request.texts)
        # Before the response begins, an error still gets its own status.
        first = await anext(others)
        return StreamingResponse(answers.lines(first, others), media_type=answers.NDJSON)

    @router.post("/similarity")
    async def similarity(request: SimilarityRequest) -> Similarities:
        """The similarity of each text to the source."""
        source, *others = await embed_all(batcher, [request.source, *request.texts])
        return Similarities(scores=await aiopar.run_sync(cosines, source, others))

    @router.post("/search")
    async def search(request: SearchRequest) -> Hits:
        """The paragraphs of the standard library's docstrings that are nearest to the question."""
        [query] = await embed_all(batcher, [request.query])
        return Hits(hits=await corpus.nearest(query.vector, request.limit), searched=len(corpus))

    return router
