"""BentoML with MiniLM on two workers; started by `bentoml serve`."""

import bentoml

from examples.quickstart import SentenceEncoder


@bentoml.service(workers=2)
class Embeddings:
    def __init__(self) -> None:
        self.encoder = SentenceEncoder()

    # BentoML refuses requests above this latency: it is high enough to answer them all.
    @bentoml.api(batchable=True, max_batch_size=8, max_latency_ms=60_000)
    def embed(self, texts: list[str]) -> list[list[float]]:
        embeddings: list[list[float]] = self.encoder.embed(texts).tolist()
        return embeddings
