"""What the service does not take: a 4xx that says why, and it goes on."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from examples.embedding_service.answers import MAX_BODY

from .service import Service

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body", "where", "message"),
    [
        ("/embed/stream", {"texts": [""]}, 0, "The text is blank"),
        ("/embed/stream", {"texts": ["fine", " \n"]}, 1, "The text is blank"),
        ("/embed/stream", {"texts": []}, "texts", "at least 1 item"),
        ("/embed/stream", {"texts": ["x" * 10_001]}, 0, "at most 10000 characters"),
        ("/embed/stream", {"texts": ["x"] * 257}, "texts", "at most 256 items"),
        ("/embed/stream", {"texts": "x"}, "texts", "valid list"),
        ("/embed/stream", {"texts": [None]}, 0, "valid string"),
        ("/embed/stream", {"text": ["x"]}, "texts", "Field required"),
        ("/embed/stream", {"texts": ["x"], "modle": "y"}, "modle", "not permitted"),
        ("/embed/stream", ["x"], "body", "valid dictionary"),
        ("/embed/stream", None, "body", "Field required"),
        ("/similarity", {"source": " ", "texts": ["x"]}, "source", "The text is blank"),
        ("/similarity", {"source": "x"}, "texts", "Field required"),
        ("/search", {"query": "x" * 10_001}, "query", "at most 10000 characters"),
        ("/search", {"query": "x", "limit": 0}, "limit", "greater than or equal to 1"),
        ("/search", {"query": "x", "limit": 51}, "limit", "less than or equal to 50"),
        ("/search", {"query": "x", "limit": True}, "limit", "valid integer"),
        ("/search", {"query": "x", "limit": "3"}, "limit", "valid integer"),
        ("/search", {"query": "x", "limit": 2.5}, "limit", "valid integer"),
    ],
)
def test_what_does_not_fit_is_named(
    service: Service, path: str, body: Any, where: object, message: str
) -> None:
    response = service.post(path, body)
    assert response.status_code == 422
    first = response.json()["detail"][0]
    assert set(first) == {"type", "loc", "msg"}  # and not the input, which may be long
    assert where in first["loc"]
    assert message in first["msg"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b'{"texts": "x"', 422),
        (b'{"texts": NaN}', 422),
        (b'{"texts": ["\\ud800"]}', 422),  # half of a surrogate pair
        (b'{"\\ud800": "x"}', 422),
        (b'{"texts": "\xff"}', 400),
        ('{"texts": "x"}'.encode("utf-16"), 400),
        (b'{"texts": ' + b"9" * 5_000 + b"}", 422),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_no_json_is_refused(service: Service, body: bytes, status: int) -> None:
    with service.client() as client:
        response = client.post("/embed/stream", content=body, headers=JSON)
    assert response.status_code == status
    assert response.json()["detail"]


def test_of_many_errors_the_first_are_listed(service: Service) -> None:
    detail = service.post("/embed/stream", {"texts": [None] * 256}).json()["detail"]
    assert [found["loc"][-1] for found in detail[:-1]] == list(range(20))
    assert detail[-1] == {"type": "more", "loc": ["body"], "msg": "and 236 more errors"}
    few = service.post("/embed/stream", {"texts": [None] * 20}).json()["detail"]
    assert [found["loc"][-1] for found in few] == list(range(20))


def _filled(before: str, value: str, after: str) -> str:
    """As many of the values as the largest body has room for."""
    return before + ",".join([value] * ((MAX_BODY - 100) // (len(value) + 1))) + after


@pytest.mark.parametrize(
    "body",
    [
        "{" + ",".join(f'"{number:x}":1' for number in range(380_000)) + ',"texts":"x"}',
        "[" * MAX_BODY,
        _filled('{"texts":[', "[" * 900 + "]" * 900, "]}"),
        _filled('{"texts":[', "null", "]}"),
        _filled('{"texts":[', "NaN", "]}"),
        _filled('{"texts":[', "1e9", "]}"),
        _filled("{", '"texts":"x"', "}"),
        _filled("[", "{}", "]"),
        _filled('{"texts":[', '"', "]}"),
    ],
    ids=lambda body: body[:24],
)
def test_a_body_of_too_many_values_is_refused_unread(service: Service, body: str) -> None:
    with service.client() as client:
        response = client.post("/embed/stream", content=body.encode(), headers=JSON)
    assert response.status_code == 422
    assert response.json() == {"detail": "The body has more than 1024 values"}


@pytest.mark.parametrize("number", [{}, {"texts": ["x"]}], ids=["alone", "surplus"])
def test_what_was_sent_is_not_sent_back(service: Service, number: dict[str, list[str]]) -> None:
    response = service.post("/embed/stream", {"a" * (MAX_BODY - 100): 1} | number)
    assert response.status_code == 422
    assert response.json()["detail"][-1]["loc"] == ["body", "a" * 100 + "..."]
    assert len(response.content) < 1_000


def test_json_has_to_be_called_so(service: Service) -> None:
    # A page of another origin can send text, but JSON only if it is allowed to.
    with service.client() as client:
        response = client.post(
            "/embed/stream", content=b'{"texts": ["x"]}', headers={"content-type": "text/plain"}
        )
    assert response.status_code == 422


def test_a_long_body_is_refused_before_it_comes(service: Service) -> None:
    with (
        service.connection("/embed/stream", f"Content-Length: {MAX_BODY + 1}") as connection,
        connection.makefile("rb") as answer,
    ):
        assert answer.readline().startswith(b"HTTP/1.1 413 ")


def test_a_long_body_in_chunks_is_refused(service: Service) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(0, MAX_BODY + 1, 100_000):
            yield b" " * 100_000

    with service.client() as client:
        response = client.post("/embed/stream", content=chunks(), headers=JSON)
    assert response.status_code == 413
    assert response.json() == {"detail": "Content Too Large"}


def test_a_body_as_long_as_allowed_is_read(service: Service) -> None:
    body = json.dumps({"texts": ["x"]}).encode().ljust(MAX_BODY)
    with service.client() as client:
        assert client.post("/embed/stream", content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/embed/stream", 405),
        ("POST", "/", 405),
        ("POST", "/embed/stream/", 307),
        ("GET", "/unknown", 404),
        ("POST", "/unknown", 404),
        ("GET", "/page/unknown.js", 404),
        ("GET", "/page/%2e%2e/app.py", 404),
    ],
)
def test_other_paths_and_methods(service: Service, method: str, path: str, status: int) -> None:
    with service.client() as client:
        response = client.request(method, path)
    assert response.status_code == status
    if status == 405:
        assert response.headers["allow"]
