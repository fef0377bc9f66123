"""One service on SmolLM2 for all tests here, as `make chat` starts it."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from examples.chat_service.weights import smollm2
from tests.examples.served_example import PATIENCE, ServedExample


@pytest.fixture(scope="package")
def service() -> Iterator[ServedExample]:
    smollm2()  # the first call converts the weights, which takes longer than a start
    options = f"--devices cpu --timeout {PATIENCE}"
    with ServedExample("chat_service", options) as service:
        yield service
        service.terminate()
        service.end()


@pytest.fixture
def client(service: ServedExample) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{service.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0
    ) as client:
        yield client
