"""OpenAI's API for a language model."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from transformers import PreTrainedTokenizerBase

import aiopar
from aiopar.transformers import Prompt

from .answers import Answer, Batcher, ChatAnswer, TextAnswer
from .errors import REFUSALS, refusal
from .schemas import (
    CONTEXT,
    MAX_CHOICES,
    MODEL,
    ChatCompletion,
    ChatRequest,
    Message,
    Model,
    Models,
    OpenAIRequest,
    TextCompletion,
    TextRequest,
)


def openai_routes(batcher: Batcher, tokenizer: PreTrainedTokenizerBase) -> APIRouter:
    """Chats, completions and models."""
    router = APIRouter(prefix="/v1", responses=REFUSALS)

    @router.post("/chat/completions", response_model=ChatCompletion)
    async def chat(request: ChatRequest) -> Any:
        """Write `n` replies to a conversation."""
        check_model(request.model)
        prompt = await aiopar.run_sync(chat_tokens, tokenizer, request.messages)
        max_tokens = request.max_completion_tokens or request.max_tokens
        logprobs = request.top_logprobs if request.logprobs else None
        prompts = prompts_of(request, [prompt], max_tokens, logprobs)
        return await respond(ChatAnswer(tokenizer, len(prompt)), batcher, request, prompts)

    @router.post("/completions", response_model=TextCompletion)
    async def complete(request: TextRequest) -> Any:
        """Write `n` texts that follow each prompt."""
        check_model(request.model)
        tokens = await aiopar.run_sync(text_tokens, tokenizer, request.prompt)
        prompts = prompts_of(request, tokens, request.max_tokens, request.logprobs)
        answer = TextAnswer(tokenizer, sum(map(len, tokens)))
        return await respond(answer, batcher, request, prompts)

    @router.get("/models")
    async def models() -> Models:
        """The models of the service."""
        return Models()

    @router.get("/models/{model:path}")
    async def model(model: str) -> Model:
        """One model."""
        check_model(model)
        return Model()

    return router


def check_model(name: str) -> None:
    if name != MODEL:
        message = f"The model {name!r} does not exist: try {MODEL!r}"
        raise refusal(404, message, param="model", code="model_not_found")


def chat_tokens(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The tokens of the conversation in the model's chat template, up to the start of its reply."""
    conversation = [
        {"role": message.role.replace("developer", "system"), "content": message.content}
        for message in messages
    ]
    tokens: list[int] = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    return tokens


def text_tokens(tokenizer: Any, texts: Sequence[str | list[int]]) -> list[list[int]]:
    return [tokenizer(text).input_ids if isinstance(text, str) else text for text in texts]


def prompts_of(
    request: OpenAIRequest, texts: Sequence[list[int]], max_tokens: int | None, logprobs: int | None
) -> list[Prompt]:
    """`n` prompts for each text, in the order of OpenAI's choices."""
    if len(texts) * request.n > MAX_CHOICES:
        message = f"At most {MAX_CHOICES} choices, got {len(texts)} prompts and n={request.n}"
        raise refusal(400, message, param="n")
    longest = max(map(len, texts))
    if longest + (max_tokens or 1) > CONTEXT:
        message = (
            f"The context has {CONTEXT} tokens: {longest} of the prompt and {max_tokens or 1} of "
            "the answer are too many"
        )
        raise refusal(400, message, param=request.takes, code="context_length_exceeded")
    return [
        Prompt(
            tokens,
            max_tokens=max_tokens or CONTEXT - len(tokens),
            temperature=request.temperature,
            top_p=request.top_p,
            stop=request.stop,
            seed=None if request.seed is None else request.seed + choice,
            logprobs=logprobs,
        )
        for tokens in texts
        for choice in range(request.n)
    ]


async def respond(
    answer: Answer, batcher: Batcher, request: OpenAIRequest, prompts: Sequence[Prompt]
) -> Any:
    if not request.stream:
        return await answer.whole(batcher, prompts)
    usage = request.stream_options.include_usage
    return await answer.streamed(batcher, prompts, include_usage=usage)
