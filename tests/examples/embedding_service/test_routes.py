"""What happens to a request before and after its endpoint."""

import asyncio
import json
import re
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import Body, FastAPI
from hypothesis import given, strategies as st

import aiopar
from aiopar.testing import Gate, client
from examples.embedding_service.routes import (
    MAX_BATCHES,
    MAX_VALUES,
    BatchesOfRequests,
    JsonRoute,
    holds_too_much,
)
from tests.serve.batches import until

from .service import Service

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a\\",[]{}:\u2200\ud800'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='"\\,[{'), inner),
)


def _count(value: Any) -> int:
    """Its lists and objects, and what else is in them."""
    if not isinstance(value, list | dict):
        return 0
    inner = value if isinstance(value, list) else list(value.values())
    return max(1, len(inner)) + sum(map(_count, inner))


def _strings(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(_strings, value.values()))
    return sum(map(_strings, value)) if isinstance(value, list) else isinstance(value, str)


@given(VALUES, st.booleans(), st.integers(0, 40))
def test_strings_hide_nothing_and_add_nothing(value: Any, ascii_only: bool, most: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    body = text.encode(errors="surrogatepass")
    if _strings(value) <= 2 * most:  # else it is not looked at any further
        assert holds_too_much(body, most) == (_count(value) > most)


def test_what_the_service_takes_is_not_too_much() -> None:
    texts = ['He said: "[1, 2]", \\ {and} left.'] * 256
    assert not holds_too_much(json.dumps({"source": texts[0], "texts": texts}).encode(), MAX_VALUES)


def _batches(response: httpx2.Response) -> list[tuple[int, int]]:
    """Numbers and sizes of the batches that `Server-Timing` names."""
    assert response.status_code == 200
    total, *batches = response.headers["server-timing"].split(", batch;")
    assert re.fullmatch(r"total;dur=[0-9.]+", total)
    found = [re.fullmatch(r'dur=[0-9.]+;desc="no. (\d+), size (\d+)"', each) for each in batches]
    return [(int(each[1]), int(each[2])) for each in found if each is not None]


@pytest.mark.asyncio
async def test_requests_that_share_a_batch_name_the_same_one() -> None:
    with Gate() as gate:

        def lengths(texts: list[str]) -> list[int]:
            gate()
            return [len(text) for text in texts]

        async with aiopar.Batcher(lengths, collate_fn=list, concurrency=1) as batcher:
            batcher.add_observer(BatchesOfRequests())
            app = FastAPI()
            app.router.route_class = JsonRoute

            @app.post("/length")
            async def length(text: Annotated[str, Body()]) -> int:
                return await batcher(text)

            async with client(app) as http:
                first = asyncio.create_task(http.post("/length", json="a"))
                await gate.entered()
                others = [asyncio.create_task(http.post("/length", json="b")) for _ in range(2)]
                await until(lambda: batcher.stats().queued == 2)
                gate.open()
                assert _batches(await first) == [(1, 1)]
                assert [_batches(await other) for other in others] == [[(2, 2)]] * 2


def test_a_response_names_the_batches_of_all_of_its_texts(service: Service) -> None:
    texts = [f"number {number}" for number in range(20)]
    batches = _batches(service.post("/similarity", {"source": "one", "texts": texts}))
    assert len(dict(batches)) == len(batches)
    assert sum(size for _, size in batches) == 21  # nobody else is there


def test_a_response_names_so_many_batches_at_most(service: Service) -> None:
    body = {"source": "one", "texts": ["word " * 300] * (MAX_BATCHES + 4)}  # one is a batch
    assert len(_batches(service.post("/similarity", body))) == MAX_BATCHES


def test_what_asks_for_no_embedding_names_none(service: Service) -> None:
    with service.client() as client:
        assert _batches(client.get("/")) == []
