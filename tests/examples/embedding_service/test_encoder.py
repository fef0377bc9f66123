"""What the service tells of a text before its model sees it."""

import statistics

from examples.benchmarks.embedding import mixed_texts
from examples.embedding_service.encoder import Embedder, about_tokens


def test_about_tokens_is_near_what_the_tokenizer_makes() -> None:
    texts = [text for text in mixed_texts(64) if len(text) < 800]  # not cut off
    embedder = Embedder()
    tokens = [int(embedder.tokenize([text])["attention_mask"].sum()) for text in texts]
    guesses = [about_tokens(text) for text in texts]
    lengths = [len(text) for text in texts]
    assert statistics.correlation(guesses, tokens) > statistics.correlation(lengths, tokens)
    assert 0.8 < sum(guesses) / sum(tokens) < 1.25
