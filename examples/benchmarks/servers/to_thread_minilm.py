"""FastAPI with MiniLM in `asyncio.to_thread` per request: the obvious first version."""

import asyncio

from fastapi import FastAPI
from pydantic import BaseModel

from examples.benchmarks.servers.on_uvicorn import run
from examples.quickstart import SentenceEncoder

encoder = SentenceEncoder()
app = FastAPI()


class Request(BaseModel):
    texts: list[str]


@app.post("/embed")
async def embed(request: Request) -> list[list[float]]:
    embeddings = await asyncio.to_thread(encoder.embed, request.texts)
    rows: list[list[float]] = embeddings.tolist()
    return rows


if __name__ == "__main__":
    run(app)
