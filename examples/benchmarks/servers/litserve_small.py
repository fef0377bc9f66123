"""LitServe with raw float32 in and out. Arguments: batch timeout, API servers, port."""

import sys
from typing import Annotated

import litserve
import torch
from fastapi import Body, Response
from torch import Tensor

from examples.benchmarks.small_model import BATCH, SmallModel

Raw = Annotated[bytes, Body(media_type="application/octet-stream")]


class SmallAPI(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = SmallModel()

    def decode_request(self, request: Raw) -> Tensor:
        return torch.frombuffer(bytearray(request), dtype=torch.float32)

    def predict(self, x: Tensor) -> Tensor:
        return self.model.predict(x)

    def encode_response(self, output: Tensor) -> Response:
        return Response(output.numpy().tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    timeout, servers, port = sys.argv[1:]
    api = SmallAPI(max_batch_size=BATCH, batch_timeout=float(timeout))
    litserve.LitServer(api, accelerator="cpu").run(
        host="127.0.0.1",
        port=int(port),
        num_api_servers=int(servers),
        log_level="warning",
        generate_client_file=False,
    )
