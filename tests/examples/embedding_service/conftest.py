"""One service for all tests here, and what its answers have to be."""

import asyncio
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from examples.embedding_service.corpus import read_docstrings
from examples.quickstart import SentenceEncoder, read_manual

from .service import CORPUS_SIZE, Service, asking, embeddings_of

TEXTS = [text[: 10 + 2 * index] for index, (text, _) in enumerate(read_manual(40))]


@functools.cache
def corpus() -> list[tuple[str, str]]:
    """The paragraphs that the service searches, and their modules."""
    return read_docstrings(CORPUS_SIZE)


class Reference:
    """`SentenceEncoder.embed`, each text computed once."""

    def __init__(self) -> None:
        self._encoder = SentenceEncoder().eval()
        self._vectors: dict[str, Tensor] = {}

    def __call__(self, texts: list[str]) -> Tensor:
        missing = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if missing:
            self._vectors.update(zip(missing, self._encoder.embed(missing), strict=True))
        return torch.stack([self._vectors[text] for text in texts])

    def encode(self, text: str) -> list[int]:
        return self._encoder.tokenizer.encode(text).ids

    def tokens(self, texts: list[str]) -> int:
        return int(self._encoder.tokenize(texts)["attention_mask"].sum())

    def check(self, texts: list[str], embeddings: list[list[float]]) -> None:
        """Other texts in the batch, and so its padding, are worth a few units in the last place."""
        torch.testing.assert_close(
            torch.tensor(embeddings), self(texts), rtol=1e-4, atol=1e-5, check_dtype=True
        )


@pytest.fixture(scope="package")
def reference() -> Reference:
    return Reference()


def end_under_load(service: Service, reference: Reference, clients: int = 16) -> None:
    """SIGTERM while there is much to do: all that was accepted is answered."""

    async def terminate() -> None:
        before = service.counts()
        async with service.async_client() as http:

            async def ask(path: str) -> list[list[float]]:
                return embeddings_of(await http.post(path, json=asking(path, TEXTS)))

            paths = ["/v1/embeddings", "/embed/stream"] * (clients // 2)
            asked = [asyncio.create_task(ask(path)) for path in paths]
            # All texts are with the batcher: all requests are accepted.
            await asyncio.to_thread(
                service.wait_until,
                lambda now: (
                    now.queued + now.in_flight + now.answered - before.answered
                    == clients * len(TEXTS)
                ),
            )
            service.terminate()
            for embeddings in await asyncio.gather(*asked):
                reference.check(TEXTS, embeddings)

    reference(TEXTS)
    asyncio.run(terminate())
    service.end()


@pytest.fixture(scope="package")
def _running(reference: Reference) -> Iterator[Service]:
    with Service() as service:
        yield service
        end_under_load(service, reference)


@pytest.fixture
def service(_running: Service) -> Iterator[Service]:
    """It runs, and has nothing to do: also when the test is over."""
    yield _running
    _running.wait_until(lambda counts: counts.idle)
