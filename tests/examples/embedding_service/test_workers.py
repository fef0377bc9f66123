"""The service with its replicas in processes, and in Ray actors."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.examples.served_example import PATIENCE

from .conftest import TEXTS, Reference, end_under_load
from .service import Service, asking, embeddings_of
from .test_load import Client


@pytest.fixture(
    scope="module",
    params=["processes", pytest.param("ray", marks=pytest.mark.ray)],
)
def remote(request: pytest.FixtureRequest, reference: Reference) -> Iterator[Service]:
    with Service(request.param) as service:
        yield service
        end_under_load(service, reference, clients=4)  # all within the time for draining


def test_it_answers_as_with_threads(remote: Service, reference: Reference) -> None:
    reference([*TEXTS, "Something else."])

    async def main() -> None:
        async with remote.async_client() as http:
            await asyncio.gather(*[Client(http, reference, seed).run() for seed in range(8)])

    asyncio.run(main())
    assert len(remote.worker_pids()) == 2
    response = remote.post("/v1/embeddings", asking("/v1/embeddings", TEXTS[:1]))
    assert "size 1" in response.headers["server-timing"]


def test_no_request_is_lost_when_a_worker_is_killed(remote: Service, reference: Reference) -> None:
    asyncio.run(_kill_under_load(remote, reference))


async def _kill_under_load(service: Service, reference: Reference) -> None:
    async with service.async_client() as http:
        answered, killed = [0] * 8, False

        async def client(number: int) -> None:
            while not killed:
                path = "/v1/embeddings"
                answer = await http.post(path, json=asking(path, TEXTS))
                reference.check(TEXTS, embeddings_of(answer))
                answered[number] += 1

        async with asyncio.TaskGroup() as clients:
            for number in range(8):
                clients.create_task(client(number))
            await asyncio.to_thread(service.wait_until, lambda counts: counts.in_flight > 0)
            before = service.worker_pids()
            victim = min(before)
            os.kill(victim, signal.SIGKILL)
            await asyncio.to_thread(_wait_for_another, service, before)
            killed = True
    assert all(answered)


def _wait_for_another(service: Service, before: set[int]) -> None:
    """Wait until one of the processes is replaced."""
    deadline = time.monotonic() + PATIENCE
    while len(now := service.worker_pids()) != 2 or now == before:
        assert time.monotonic() < deadline, service.log
        time.sleep(0.02)
