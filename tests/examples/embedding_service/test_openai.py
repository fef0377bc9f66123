"""OpenAI's own client, with the service as its base URL."""

import base64
from collections.abc import Iterator
from functools import partial

import openai
import pytest
import torch
from openai import OpenAI

from tests.examples.served_example import PATIENCE

from .conftest import Reference
from .service import MODEL, Service

TEXTS = ["A file is closed.", "文, ein Satz in einer anderen Sprache.", "word " * 1_500]


@pytest.fixture
def client(service: Service) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{service.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0
    ) as client:
        yield client


def test_one_text_and_many_have_their_embeddings(client: OpenAI, reference: Reference) -> None:
    one = client.embeddings.create(model=MODEL, input=TEXTS[0])
    many = client.embeddings.create(model=MODEL, input=TEXTS, user="somebody")
    assert [found.index for found in many.data] == [0, 1, 2]
    assert {found.object for found in many.data} == {"embedding"}
    assert (one.object, one.model, many.model) == ("list", MODEL, MODEL)
    reference.check(TEXTS[:1], [found.embedding for found in one.data])
    reference.check(TEXTS, [found.embedding for found in many.data])
    for texts, usage in (TEXTS[:1], one.usage), (TEXTS, many.usage):
        assert usage.prompt_tokens == usage.total_tokens == reference.tokens(texts)


def test_floats_and_base64_are_the_same_numbers(
    client: OpenAI, service: Service, reference: Reference
) -> None:
    # Its client asks for base64 unless it is told otherwise, and decodes it.
    floats = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    reference.check(TEXTS[:1], [floats.data[0].embedding])
    body = {"model": MODEL, "input": TEXTS[0], "encoding_format": "base64"}
    encoded = service.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    vector = torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.float32)
    reference.check(TEXTS[:1], [vector.tolist()])


def test_tokens_are_those_of_the_model(client: OpenAI, reference: Reference) -> None:
    arrays = [reference.encode(text) for text in TEXTS]
    many = client.embeddings.create(model=MODEL, input=arrays)
    reference.check(TEXTS, [found.embedding for found in many.data])
    assert many.usage.total_tokens == reference.tokens(TEXTS)
    one = client.embeddings.create(model=MODEL, input=arrays[0])
    reference.check(TEXTS[:1], [found.embedding for found in one.data])


def test_as_many_texts_as_openai_takes_come_back_in_their_order(
    client: OpenAI, reference: Reference
) -> None:
    texts = [f"{number % 64}" for number in range(2_048)]
    many = client.embeddings.create(model=MODEL, input=texts)
    reference.check(texts, [found.embedding for found in many.data])


def test_fewer_dimensions_are_the_first_at_length_1(client: OpenAI, reference: Reference) -> None:
    create = partial(client.embeddings.create, model=MODEL, input=TEXTS[0], dimensions=10)
    expected = torch.nn.functional.normalize(reference(TEXTS[:1])[0, :10], dim=0)
    for answer in (create(), create(encoding_format="float")):  # the first one is in base64
        found = torch.tensor(answer.data[0].embedding)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_space_and_unknown_fields_are_taken(client: OpenAI, reference: Reference) -> None:
    found = client.embeddings.create(
        model=MODEL, input=" ", user="somebody", extra_body={"input_type": "query", "more": [None]}
    )
    reference.check([" "], [found.data[0].embedding])


def test_its_model_is_listed(client: OpenAI) -> None:
    [listed] = client.models.list()
    assert listed == client.models.retrieve(MODEL)
    assert (listed.id, listed.object) == (MODEL, "model")
    for ask in client.models.retrieve, partial(client.embeddings.create, input="x"):
        with pytest.raises(openai.NotFoundError, match="'org/gpt' does not exist") as refused:
            ask(model="org/gpt")
        assert refused.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": ""}, "input", "input: String should have at least 1 character"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": ["fine", ""]}, "input[1]", "input[1]: String should have at least 1"),
        ({"input": ["x"] * 2_049}, "input", "at most 2048 items"),
        ({"input": [5, "x"]}, "input[1]", "valid integer"),
        ({"input": [[5, 30_522]]}, "input[0][1]", "less than 30522"),
        ({"input": [[5], []]}, "input[1]", "at least 1 item"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "x", "dimensions": 385}, "dimensions", "less than or equal to 384"),
        ({"input": "x", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({}, "input", "Field required"),
        ({"input": [5] * 32_769}, None, "The body has more than 32768 values"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_does_not_fit_is_a_bad_request(
    client: OpenAI, body: dict[str, object], param: str | None, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/embeddings", body={"model": MODEL} | body, cast_to=object)
    error = refused.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", param, None)
    assert message in error.message


@pytest.mark.parametrize(
    "body", [b"{", b'{"input": "\xff"}', b"[]", b""], ids=["cut", "no UTF-8", "list", "empty"]
)
def test_what_cannot_be_read_is_a_bad_request(service: Service, body: bytes) -> None:
    with service.client() as client:
        headers = {"content-type": "application/json"}
        response = client.post("/v1/embeddings", content=body, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
