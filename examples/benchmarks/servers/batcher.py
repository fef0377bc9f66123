"""FastAPI and `Batcher` as the guide has them: raw float32 in, raw float32 out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI, Request, Response

from aiopar.fastapi import install, lifespan
from examples.benchmarks.batchers import open_batcher
from examples.benchmarks.servers.on_uvicorn import run
from examples.benchmarks.small_model import SmallModel


@asynccontextmanager
async def with_batcher(app: FastAPI) -> AsyncIterator[None]:
    async with open_batcher(SmallModel()) as batcher:
        app.state.batcher = batcher
        yield


app = FastAPI(lifespan=lifespan(app_lifespan=with_batcher))
install(app)


@app.post("/predict")
async def predict(request: Request) -> Response:
    item = torch.frombuffer(bytearray(await request.body()), dtype=torch.float32)
    output = await app.state.batcher(item)
    return Response(output.numpy().tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    run(app)
