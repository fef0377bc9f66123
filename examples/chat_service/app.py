"""A chat service: FastAPI, and a language model that batches per step.

    make chat
    uvicorn --factory examples.chat_service.app:create_app

/v1/chat/completions, /v1/completions and /v1/models are endpoints of OpenAI's API. / is a page with
several conversations at the same time. The page shows the batch that the conversations share. /docs
describes the API. For operators there are /healthz, /readyz and /metrics; DASHBOARD=/aiopar adds a
live page at that path. The service has no authentication, so it listens on loopback.

A request joins the batch between two steps. It leaves the batch when its text ends, or when its
client disconnects.
"""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import APIRouter, FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from fastapi_offline import FastAPIOffline
from transformers import AutoModelForCausalLM, AutoTokenizer

import aiopar
from aiopar.fastapi import install, lifespan
from aiopar.serve import PrometheusMetrics
from aiopar.transformers import CausalLM, Prompt

from .answers import Batcher
from .errors import answer_in_openai_form
from .routes import openai_routes
from .weights import smollm2

PAGE = Path(__file__).with_name("page")
PAGE_HEADERS = {  # only scripts and styles of this server, and no frames
    "content-security-policy": "default-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
MAX_BODY = 500_000


def create_app(
    devices: Sequence[str | int] | None = None, *, max_batch_size: int = 16, timeout: float = 120.0
) -> FastAPI:
    """Make the application. It can be started once.

    Args:
        devices: The devices; each has a replica. None: all accelerators, or else the CPU.
        max_batch_size: How many answers each replica generates at the same time.
        timeout: Seconds per answer.
    """
    folder = smollm2()
    devices = devices or accelerators() or ["cpu"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_for(devices))
    pool = aiopar.ReplicaPool(model, devices)
    batcher: Batcher = aiopar.ContinuousBatcher(
        pool,
        stepper=partial(CausalLM, tokenizer=tokenizer),  # on the worker of each replica
        max_batch_size=max_batch_size,
        timeout=timeout,
    )

    @asynccontextmanager
    async def ready(_: FastAPI) -> AsyncIterator[None]:
        with closing(PrometheusMetrics(pool, batcher)):
            await batcher(Prompt([1], max_tokens=2))  # the first steps are slow
            yield

    app = FastAPIOffline(  # Swagger UI on /docs comes from this server, not from a CDN
        redoc_url=None,
        title="Chat",
        description="SmolLM2-135M-Instruct, by aiopar.",
        version=aiopar.__version__,
        lifespan=lifespan(pool, batcher, app_lifespan=ready),
        max_body_size=MAX_BODY,
    )
    install(app, dashboard=os.environ.get("DASHBOARD"), stuck_after=60.0)
    answer_in_openai_form(app)
    app.include_router(openai_routes(batcher, tokenizer))
    app.include_router(page_routes(batcher, max_batch_size))
    app.mount("/page", StaticFiles(directory=PAGE))
    return app


def accelerators() -> list[int]:
    return [*range(torch.accelerator.device_count())]


def dtype_for(devices: Sequence[str | int]) -> torch.dtype:
    """bfloat16 if the devices compute in it: half the memory, and about half the time."""
    if "cpu" not in map(str, devices):
        return torch.bfloat16
    has = torch.cpu.get_capabilities()
    return torch.bfloat16 if has.get("avx512_bf16") or has.get("amx_bf16") else torch.float32


def page_routes(batcher: Batcher, max_batch_size: int) -> APIRouter:
    """The page, and the state of the batch, which the page asks for every half second."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    @router.get("/batch")
    async def batch() -> dict[str, Any]:
        return {"max_batch_size": max_batch_size, **asdict(batcher.stats())}

    return router
