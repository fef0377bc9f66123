"""What the service tells of a text before its model sees it, and how it waits for many."""

import statistics
from collections.abc import Callable
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor

import aiopar
from examples.benchmarks.embedding import mixed_texts
from examples.embedding_service.encoder import (
    TOGETHER,
    Embedder,
    Embedding,
    about_tokens,
    embed_all,
)


def test_about_tokens_is_near_what_the_tokenizer_makes() -> None:
    texts = [text for text in mixed_texts(64) if len(text) < 800]  # not cut off
    embedder = Embedder()
    tokens = [int(embedder.encoder.tokenize([text])["attention_mask"].sum()) for text in texts]
    guesses = [about_tokens(text, at_most=1_000) for text in texts]
    lengths = [len(text) for text in texts]
    assert statistics.correlation(guesses, tokens) > statistics.correlation(lengths, tokens)
    assert 0.8 < sum(guesses) / sum(tokens) < 1.25


@pytest.mark.parametrize(
    "text", ["word " * 2_000, "," * 10_000, "a" * 10_000, "words, and words. " * 500]
)
def test_of_a_long_text_only_the_beginning_is_looked_at(text: str) -> None:
    assert about_tokens(text, at_most=200) == 200
    assert about_tokens(text[:1600], at_most=200) == 200
    assert about_tokens(" " * 1600 + text, at_most=200) == 0


def _batcher(fn: Callable[..., Any]) -> aiopar.Batcher[Any, Any]:
    return cast(aiopar.Batcher[Any, Any], fn)


@pytest.mark.asyncio
async def test_a_refused_text_ends_its_request_at_once() -> None:
    left = list[str]()

    async def embed(text: str, **_: object) -> Tensor:
        if text == "refused":
            raise aiopar.Overloaded("the queue is full", estimated_wait=1.0)
        try:
            await anyio.Event().wait()  # it waits in the queue
        finally:
            left.append(text)
        return torch.tensor(0)

    with anyio.fail_after(60), pytest.raises(aiopar.Overloaded):
        await embed_all(_batcher(embed), ["first", "second", *["refused"] * TOGETHER])
    assert sorted(left) == ["first", "second"]


@pytest.mark.asyncio
async def test_vectors_are_in_the_order_of_their_texts() -> None:
    texts = [str(number) for number in range(2 * TOGETHER)]
    started = list[str]()
    together = anyio.Event()

    async def embed(text: str, **_: object) -> Embedding:
        started.append(text)
        if len(started) == TOGETHER:
            together.set()
        await together.wait()
        for _turn in range(int(text) % 7):
            await anyio.lowlevel.checkpoint()
        return Embedding(torch.tensor(int(text)), torch.tensor(1))

    embeddings = await embed_all(_batcher(embed), texts)
    assert [int(embedding.vector) for embedding in embeddings] == list(range(2 * TOGETHER))
