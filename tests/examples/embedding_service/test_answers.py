"""A stream that has begun, and cannot go on."""

import json

import pytest
import torch

import aiopar
from examples.embedding_service.answers import lines
from examples.embedding_service.encoder import Embedding

ERRORS = [
    aiopar.Overloaded("the queue is full", estimated_wait=1.0),
    aiopar.DeadlineExceeded("no result after 30 s"),
    aiopar.ReplicaUnavailable("no replica is in service"),
    aiopar.ServiceClosed("the batcher is closed"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_its_last_line_says_why(error: Exception) -> None:
    async def embed(text: str) -> Embedding:
        if text == "late":
            raise error
        return Embedding(torch.tensor([0.5, float(len(text))]), torch.tensor(1))

    vectors = aiopar.map(embed, ["a", "bb", "late", "never"], concurrency=1)
    first = await anext(vectors)
    assert [json.loads(line) async for line in lines(first, vectors)] == [
        {"index": 0, "embedding": [0.5, 1.0]},
        {"index": 1, "embedding": [0.5, 2.0]},
        {"detail": str(error)},
    ]


@pytest.mark.asyncio
async def test_a_bug_is_no_line() -> None:
    async def embed(text: str) -> Embedding:
        return Embedding(torch.tensor([float(text)]), torch.tensor(1))

    vectors = aiopar.map(embed, ["1", "one"], concurrency=1)
    stream = lines(await anext(vectors), vectors)
    assert json.loads(await anext(stream)) == {"index": 0, "embedding": [1.0]}
    with pytest.raises(ValueError, match="could not convert string"):
        await anext(stream)
