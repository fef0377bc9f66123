"""What is searched is there before anybody waits for it."""

import importlib.util

import pytest
import torch

import aiopar
from examples.embed_corpus import python_files
from examples.embedding_service import corpus as corpus_module
from examples.embedding_service.corpus import Corpus, read_docstrings
from examples.embedding_service.encoder import Embedding


async def _lengths(texts: list[str]) -> list[Embedding]:
    return [Embedding(torch.tensor([float(len(text))]), torch.tensor(len(text))) for text in texts]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 3])
async def test_it_is_embedded_however_short_the_time_for_a_client(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "python_files", lambda _: python_files(20))  # it is quicker
    async with aiopar.Batcher(_lengths, collate_fn=list, timeout=1e-9) as batcher:
        corpus = Corpus(batcher, size)
        await corpus.embed()
        found = await corpus.nearest(torch.ones(1), 5)
    assert [hit.score for hit in found] == [float(len(hit.text)) for hit in found]
    assert len(found) == len(corpus) == size


def test_it_is_prose_from_all_over_the_library() -> None:
    found, everything = read_docstrings(200), read_docstrings(10**6)
    assert found == everything[:: len(everything) // 200][:200]
    assert len(dict(found)) == 200
    assert {"argparse", "asyncio.tasks", "typing"} < {module for _, module in everything}
    assert len({module for _, module in found}) > 50
    for text, module in found:
        assert len(text) >= 60
        assert "._" not in f".{module}"
        assert importlib.util.find_spec(module.partition(".")[0]) is not None
