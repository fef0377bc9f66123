"""Texts of mixed length through MiniLM over HTTP: the example's service against its peers.

Each request has one text. Each rival has two replicas with one thread each (`asyncio.to_thread` has
its thread pool), and the batch size at which it was fastest here.
"""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

import torch

from examples.benchmarks.environments import environment
from examples.benchmarks.harness import NotMeasured, Plan, Rivals, Row, compare
from examples.benchmarks.load import post
from examples.benchmarks.server import Command, Server, program, start
from examples.embed_corpus import paragraphs, python_files
from examples.embedding_service.schemas import MODEL
from examples.quickstart import SentenceEncoder

BOUND = 1.4  # at least 1.4 times the texts per second of the rival
SERVICE = ("-m", "examples.embedding_service", "--devices", "cpu", "cpu", "--corpus-size", "8")
BENTO = ("-m", "bentoml", "serve", "examples.benchmarks.servers.bentoml_minilm:Embeddings")


async def measure(plan: Plan) -> list[Row]:
    texts = await asyncio.to_thread(mixed_texts, plan.texts)
    requests = [post_json("/embed", {"texts": [text]}) for text in texts]
    openai_requests = [
        post_json("/v1/embeddings", {"model": MODEL, "input": text}) for text in texts
    ]
    encoder = await asyncio.to_thread(SentenceEncoder)
    expected = await asyncio.to_thread(encoder.embed, texts[:1])
    what = "embedding service, mixed lengths, 2 replicas"
    rows: list[Row] = []
    async with start((sys.executable, *SERVICE, "--port"), openai_requests[0]) as ours:
        for against, command in (await peers() if plan.all_rivals else IN_THREADS).items():
            if isinstance(command, str):
                rows.append(NotMeasured(what, against, command))
                continue
            async with start(command, requests[0]) as theirs:
                for server, request in ((ours, openai_requests[0]), (theirs, requests[0])):
                    torch.testing.assert_close(await embedding(server, request), expected)
                rivals = Rivals(
                    what=what,
                    ours=partial(ours.requests_per_second, openai_requests, plan.clients),
                    against=against,
                    theirs=partial(theirs.requests_per_second, requests, plan.clients),
                    bound=BOUND,
                    unit="texts/s",
                    at_least=True,
                )
                # A sample takes seconds.
                rows.append(await compare(rivals, max(2, plan.pairs // 3)))
    return rows


IN_THREADS: Mapping[str, Command | str] = {"asyncio.to_thread": program("to_thread_minilm")}


async def peers() -> Mapping[str, Command | str]:
    """The command of each peer, or the reason why the peer cannot run."""
    return {
        **IN_THREADS,
        "LitServe": program("litserve_minilm", "4"),
        "BentoML": await bentoml(),
    }


async def bentoml() -> Command | str:
    try:
        python = await asyncio.to_thread(environment, "bentoml")
    except (OSError, subprocess.SubprocessError) as error:
        return f"its environment cannot be made ({type(error).__name__})"
    return (str(python), *BENTO, "--host", "127.0.0.1", "--port")


def mixed_texts(count: int) -> list[str]:
    """Paragraphs of docstrings in random order, most of 20 to 100 tokens, some cut off at 256."""
    files = python_files(None)[::8]
    found = dict.fromkeys(text for file in files for text in paragraphs(file.read_bytes()))
    texts = list(found)[:: max(1, len(found) // count)][:count]
    random.Random(0).shuffle(texts)
    return texts


def post_json(path: str, body: object) -> bytes:
    return post(path, json.dumps(body).encode(), "application/json")


async def embedding(server: Server, request: bytes) -> torch.Tensor:
    [answer] = await server.send([request])
    parsed = json.loads(answer)
    if isinstance(parsed, dict):  # OpenAI's form
        parsed = [found["embedding"] for found in parsed["data"]]
    return torch.tensor(parsed)
