"""LitServe with MiniLM on two workers, one text per request. Arguments: batch size, port."""

import sys
from typing import Any

import litserve

from examples.quickstart import SentenceEncoder


class EmbeddingAPI(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.encoder = SentenceEncoder()

    def decode_request(self, request: dict[str, Any]) -> str:
        [text] = request["texts"]
        return str(text)

    def predict(self, x: list[str]) -> list[list[float]]:
        rows: list[list[float]] = self.encoder.embed(x).tolist()
        return rows

    def encode_response(self, output: list[float]) -> list[list[float]]:
        return [output]


if __name__ == "__main__":
    size, port = sys.argv[1:]
    api = EmbeddingAPI(max_batch_size=int(size), api_path="/embed")
    litserve.LitServer(api, accelerator="cpu", workers_per_device=2).run(
        host="127.0.0.1", port=int(port), log_level="warning", generate_client_file=False
    )
