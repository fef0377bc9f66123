"""The model of the service: sentences in, unit vectors out."""

from torch import Tensor

from examples.quickstart import SentenceEncoder


class Embedder(SentenceEncoder):
    """all-MiniLM-L6-v2, for one batch of tokens as `Batcher` makes it."""

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        """Unit vectors [text, 384]."""
        return super().forward(tokens["input_ids"], tokens["attention_mask"])
