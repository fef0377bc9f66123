"""Many clients at once, clients that go away, and clients that are slow to read."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable

import httpx2
import pytest
import torch

from examples.quickstart import read_manual

from .conftest import TEXTS, Reference, corpus
from .service import Service, asking, embeddings_of

# More than a second's work, however quiet the machine is.
MANY = [f"{index} {text}"[:200] for index, (text, _) in enumerate(read_manual(256))]


class Client:
    """Sends requests of every kind, and checks each answer."""

    def __init__(self, http: httpx2.AsyncClient, reference: Reference, seed: int) -> None:
        self._http = http
        self._reference = reference
        self._random = random.Random(seed)

    async def run(self) -> None:
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._embed,
            self._stream,
            self._similarity,
            self._search,
        ]
        self._random.shuffle(kinds)
        for kind in kinds:
            await kind()

    async def _post(self, path: str, body: object) -> httpx2.Response:
        response = await self._http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response

    def _some(self) -> list[str]:
        return self._random.sample(TEXTS, self._random.randint(1, 4))

    async def _embed(self) -> None:
        texts = self._some()
        answer = await self._post("/v1/embeddings", asking("/v1/embeddings", texts))
        self._reference.check(texts, embeddings_of(answer))

    async def _stream(self) -> None:
        texts = self._some()
        answer = await self._post("/embed/stream", {"texts": texts})
        self._reference.check(texts, embeddings_of(answer))

    async def _similarity(self) -> None:
        source, *texts = [*self._some(), "Something else."]
        answer = await self._post("/similarity", {"source": source, "texts": texts})
        expected = self._reference(texts) @ self._reference([source])[0]
        torch.testing.assert_close(
            torch.tensor(answer.json()["scores"]), expected, rtol=1e-4, atol=1e-5
        )

    async def _search(self) -> None:
        text, module = self._random.choice(corpus())
        answer = await self._post("/search", {"query": text[:80], "limit": 2})
        first, second = answer.json()["hits"]
        assert (first["text"], first["module"]) == (text, module)
        assert 1.001 > first["score"] > second["score"]


def test_64_clients_get_each_its_own_answers(service: Service, reference: Reference) -> None:
    reference([*TEXTS, "Something else."])

    async def main() -> None:
        async with service.async_client() as http:
            await asyncio.gather(*[Client(http, reference, seed).run() for seed in range(64)])

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed/stream"])
def test_more_than_the_queue_holds_is_refused_for_now(service: Service, path: str) -> None:
    async def main() -> httpx2.Response:
        async with service.async_client() as http:
            # 64 texts of each wait at a time, and the queue holds 1,024.
            posts = [http.post(path, json=asking(path, MANY)) for _ in range(32)]
            asked = [asyncio.create_task(post) for post in posts]
            for answer in asyncio.as_completed(asked):
                if (response := await answer).status_code != 200:
                    break
            for task in asked:
                task.cancel()
            return response

    refused = asyncio.run(main())
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    refusal = refused.json()
    if path == "/v1/embeddings":
        assert refusal["error"]["type"] == "server_error"
        assert "the queue is full" in refusal["error"]["message"]
    else:
        assert "the queue is full" in refusal["detail"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed/stream", "/similarity"])
def test_clients_that_go_away_leave_no_work_behind(service: Service, path: str) -> None:
    before = service.counts()
    body = json.dumps(asking(path, MANY)).encode()
    length = f"Content-Length: {len(body)}"
    with (
        service.connection(path, length) as first,
        service.connection(path, length) as second,
        service.connection(path, length) as third,
    ):
        first.sendall(body)
        second.sendall(body)
        third.sendall(body[:1000])  # and goes away before the rest
        service.wait_until(lambda counts: not counts.idle)
    after = service.wait_until(lambda counts: counts.idle)
    assert after.cancelled > before.cancelled
    assert after.answered - before.answered < 2 * len(MANY)


def test_a_stream_comes_line_by_line_and_waits_for_a_slow_reader(
    service: Service, reference: Reference
) -> None:
    texts = [f"number {index}" for index in range(256)]
    body = json.dumps({"texts": texts}).encode()
    before = service.counts()
    with (
        service.connection(
            "/embed/stream", f"Content-Length: {len(body)}", "Connection: close", small=True
        ) as connection,
        connection.makefile("rb", buffering=1000) as answer,
    ):
        connection.sendall(body)
        while answer.readline() != b"\r\n":
            pass
        answer.readline()  # the length of the first chunk, which is a line
        lines = [answer.readline()]
        # Nobody reads: what is computed ahead is bounded, and so are the buffers between.
        stalled = service.wait_until(lambda counts: counts.idle)
        assert 0 < stalled.answered - before.answered < len(texts)
        lines += [line for line in answer if line.startswith(b'{"index"')]
    found = [json.loads(line) for line in lines]
    assert [line["index"] for line in found] == list(range(len(texts)))
    reference.check(texts, [line["embedding"] for line in found])
