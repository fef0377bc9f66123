"""FastAPI with `Batcher`, as in the guide. Raw float32 in and out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI, Request, Response
from torch import Tensor

from aiopar.fastapi import install, lifespan
from examples.benchmarks.batchers import open_batcher
from examples.benchmarks.servers.on_uvicorn import run
from examples.benchmarks.small_model import FEATURES, SmallModel

BYTES = 4 * FEATURES


def decode(bodies: list[bytes]) -> Tensor:
    """Make a batch of request bodies on the worker; the loop stays free for requests."""
    return torch.frombuffer(bytearray(b"".join(bodies)), dtype=torch.float32).view(-1, FEATURES)


def encode(outputs: Tensor) -> list[bytes]:
    data = outputs.numpy().tobytes()
    return [data[start : start + BYTES] for start in range(0, len(data), BYTES)]


@asynccontextmanager
async def with_batcher(app: FastAPI) -> AsyncIterator[None]:
    async with open_batcher(SmallModel(), collate_fn=decode, unbatch_fn=encode) as batcher:
        app.state.batcher = batcher
        yield


app = FastAPI(lifespan=lifespan(app_lifespan=with_batcher, gc_threshold=10_000))
install(app)


@app.post("/predict")
async def predict(request: Request) -> Response:
    output = await app.state.batcher(await request.body())
    return Response(output, media_type="application/octet-stream")


if __name__ == "__main__":
    run(app)
