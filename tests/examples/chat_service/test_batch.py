"""How requests join and leave the batch: the routes over a model that the test holds."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import aiopar
from aiopar.fastapi import install
from aiopar.testing import Gate
from aiopar.transformers import CausalLM, Completion, Prompt, Token
from examples.chat_service.errors import answer_in_openai_form
from examples.chat_service.routes import openai_routes
from examples.chat_service.schemas import MODEL, VOCABULARY
from examples.chat_service.weights import smollm2
from tests.asgi.wire import Wire
from tests.serve.batches import until

pytestmark = pytest.mark.may_block("a tokenizer is loaded")

REQUEST = {"model": MODEL, "prompt": [1, 2, 3]}


class HeldLM(CausalLM):
    """A small model with random weights. Each step waits for the test."""

    def __init__(self, tokenizer: Any) -> None:
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            eos_token_id=None,
        )
        super().__init__(LlamaForCausalLM(config).train(False), tokenizer)
        self.gate = Gate()
        self.error: Exception | None = None
        """What requests fail with in the next step."""
        self.log: list[int | str] = []
        """The sizes of the steps, and "left" for each state that has left."""

    def step(self, states: list[Any]) -> list[Any]:
        self.log.append(len(states))
        self.gate()
        return [self.error] * len(states) if self.error else super().step(states)

    def stop(self, state: Any) -> None:
        self.log.append("left")
        super().stop(state)


class Served:
    """The routes, over a batcher of a `HeldLM`."""

    def __init__(self, model: HeldLM, batcher: Any, tokenizer: Any) -> None:
        self.model = model
        self.batcher: aiopar.ContinuousBatcher[Prompt, Token, Completion] = batcher
        self.app = FastAPI()
        install(self.app, metrics=None)
        answer_in_openai_form(self.app)
        self.app.include_router(openai_routes(batcher, tokenizer))

    def ask(self, **options: Any) -> tuple[Wire, asyncio.Task[None]]:
        wire = Wire("/v1/completions", **{"content-type": "application/json"})
        wire.deliver(json.dumps(REQUEST | options).encode())
        return wire, asyncio.create_task(wire.serve(self.app))


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Served]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    model = HeldLM(tokenizer)
    with model.gate:
        async with aiopar.ContinuousBatcher(model, **options) as batcher:
            try:
                yield Served(model, batcher, tokenizer)
            finally:
                model.gate.open()


def body_of(wire: Wire) -> str:
    return b"".join(message.get("body", b"") for message in wire.sent).decode()


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_not_in_the_next_step(stream: bool) -> None:
    async with served() as service:
        model, batcher = service.model, service.batcher
        wire, asked = service.ask(max_tokens=1_000, stream=stream, n=2)
        model.gate.let_on(3)
        await model.gate.entered(4)
        await until(lambda: not stream or bool(wire.statuses))
        await wire.received_from()
        wire.hang_up()
        await asked
        assert model.log[-1] == 2
        assert "left" not in model.log
        other = asyncio.create_task(batcher(Prompt([5], max_tokens=1)))
        await until(lambda: batcher.stats().queued == 1)
        del model.log[:]
        model.gate.open()
        await other
        await until(lambda: batcher.stats().in_flight == 0)
        assert model.log == ["left", "left", 1, "left"]
        assert wire.statuses == [200 if stream else 499]
        assert "[DONE]" not in body_of(wire)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_queue_cannot_hold_is_refused(stream: bool) -> None:
    async with served(max_batch_size=1, max_pending=1) as service:
        first, running = service.ask(max_tokens=2)
        await service.model.gate.entered()
        second, waiting = service.ask(max_tokens=2)
        await until(lambda: service.batcher.stats().queued == 1)
        third, refused = service.ask(max_tokens=2, stream=stream)
        await refused
        assert third.statuses == [503]
        error = json.loads(body_of(third))["error"]
        assert error.pop("message")
        assert error == {"type": "server_error", "param": None, "code": None}
        service.model.gate.open()
        await asyncio.gather(running, waiting)
        assert first.statuses == second.statuses == [200]


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_late_is_an_error(stream: bool) -> None:
    async with served(timeout=0.01) as service:
        wire, asked = service.ask(stream=stream)
        await asked
        assert wire.statuses == [504]
        assert json.loads(body_of(wire))["error"]["type"] == "server_error"


@pytest.mark.asyncio
async def test_a_stream_that_fails_later_says_so_in_an_event() -> None:
    async with served() as service:
        wire, asked = service.ask(stream=True)
        service.model.gate.let_on()
        await service.model.gate.entered(2)
        service.model.error = aiopar.WorkerLost("the worker was lost")
        service.model.gate.open()
        await asked
        assert wire.statuses == [200]
        _, error = body_of(wire).split("\n\n", 1)
        assert json.loads(error.removeprefix("data: "))["error"] == {
            "message": "the worker was lost",
            "type": "server_error",
            "param": None,
            "code": None,
        }
