"""SIGTERM while there is much to do."""

import asyncio

import pytest

from examples.quickstart import read_manual

from .conftest import Reference
from .service import Service, asking, embeddings_of

pytestmark = pytest.mark.timeout(140)

TEXTS = [text[:40] for text, _ in read_manual(40)]
CLIENTS = 16


def test_sigterm_under_load_answers_all_that_was_accepted(reference: Reference) -> None:
    reference(TEXTS)
    with Service() as service:
        asyncio.run(terminate_under_load(service, reference))
        service.end()


async def terminate_under_load(service: Service, reference: Reference) -> None:
    before = service.counts()
    async with service.async_client() as http:

        async def ask(path: str) -> list[list[float]]:
            return embeddings_of(await http.post(path, json=asking(path, TEXTS)))

        paths = ["/v1/embeddings", "/embed/stream"] * (CLIENTS // 2)
        asked = [asyncio.create_task(ask(path)) for path in paths]
        # All texts are with the batcher: all requests are accepted.
        await asyncio.to_thread(
            service.wait_until,
            lambda now: (
                now.queued + now.in_flight + now.completed - before.completed
                == CLIENTS * len(TEXTS)
            ),
        )
        service.terminate()
        for embeddings in await asyncio.gather(*asked):
            reference.check(TEXTS, embeddings)
