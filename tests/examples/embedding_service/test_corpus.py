"""What is searched is there before anybody waits for it."""

import pytest
import torch

import aiopar
from examples.embedding_service.corpus import Corpus
from examples.embedding_service.encoder import Embedding


async def _lengths(texts: list[str]) -> list[Embedding]:
    return [Embedding(torch.tensor([float(len(text))]), torch.tensor(len(text))) for text in texts]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 3])
async def test_it_is_embedded_however_short_the_time_for_a_client(size: int) -> None:
    async with aiopar.Batcher(_lengths, collate_fn=list, timeout=1e-9) as batcher:
        corpus = Corpus(batcher, size)
        await corpus.embed()
        found = await corpus.nearest(torch.ones(1), 5)
    assert [score for score, _, _ in found] == [float(len(text)) for _, _, text in found]
    assert len(found) == size
