"""Answers of the model in OpenAI's form: whole, or as server-sent events."""

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, ClassVar, TypeAlias

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

import aiopar
from aiopar.serve import OutputStream
from aiopar.transformers import Completion, Prompt, Token

from .schemas import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    OpenAIError,
    OpenAIResponse,
    Reply,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
    Trouble,
    Usage,
)

Batcher: TypeAlias = aiopar.ContinuousBatcher[Prompt, Token, Completion]
UNSERVED = (
    aiopar.Overloaded,
    aiopar.DeadlineExceeded,
    aiopar.ReaderTooSlow,
    aiopar.ReplicaUnavailable,
    aiopar.ServiceClosed,
    aiopar.WorkerLost,
)
# "x-accel-buffering" is for nginx.
UNBUFFERED = {"cache-control": "no-store", "x-accel-buffering": "no"}


class Answer(ABC):
    """The answer to one request. Each of the two APIs has a subclass, which writes `choices`."""

    response: ClassVar[Callable[..., OpenAIResponse]]
    chunk: ClassVar[Callable[..., OpenAIResponse]]

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._head = {"id": uuid.uuid4().hex, "created": int(time.time())}

    async def whole(self, batcher: Batcher, prompts: Sequence[Prompt]) -> OpenAIResponse:
        """Answer all prompts at the same time."""
        async with aiopar.map(batcher, prompts, concurrency=len(prompts)) as found:
            completions = [completion async for completion in found]
        usage = self._usage(sum(len(completion.tokens) for completion in completions))
        choices = [self._choice(*numbered) for numbered in enumerate(completions)]
        return self.response(choices=choices, usage=usage, **self._head)

    async def streamed(
        self, batcher: Batcher, prompts: Sequence[Prompt], *, include_usage: bool
    ) -> StreamingResponse:
        """Answer all prompts at the same time, token by token."""
        # The buffer holds the whole answer, so a slow client does not stop the generation.
        streams = [batcher.stream(prompt, buffer=prompt.max_tokens) for prompt in prompts]
        chunks = self._chunks(streams, include_usage)
        # Before the response begins, an error still gets its own status.
        first = await anext(chunks)
        return StreamingResponse(
            _events(first, chunks), media_type="text/event-stream", headers=UNBUFFERED
        )

    async def _chunks(
        self, streams: Sequence[OutputStream[Token]], include_usage: bool
    ) -> AsyncGenerator[OpenAIResponse, None]:
        written: Counter[int] = Counter()  # tokens by choice
        async with aclosing(in_turn(streams)) as tokens:
            async for index, token in tokens:
                delta = self._delta(index, token, first=not written[index])
                written[index] += 1
                yield self.chunk(choices=[delta], **self._head)
        if include_usage:
            yield self.chunk(choices=[], usage=self._usage(written.total()), **self._head)

    def _usage(self, written: int) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=written,
            total_tokens=self._prompt_tokens + written,
        )

    def _text_of(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))

    @abstractmethod
    def _choice(self, index: int, completion: Completion) -> Any:
        """One entry of `choices` in a whole response."""

    @abstractmethod
    def _delta(self, index: int, token: Token, *, first: bool) -> Any:
        """One entry of `choices` in a chunk."""


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions."""

    response, chunk = ChatCompletion, ChatChunk

    def _choice(self, index: int, completion: Completion) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=Reply(content=completion.text),
            logprobs=self._logprobs(completion.tokens),
            finish_reason=completion.finish_reason,
        )

    def _delta(self, index: int, token: Token, *, first: bool) -> ChatDelta:
        role = {"role": "assistant"} if first else {}
        return ChatDelta(
            index=index,
            delta={**role, "content": token.text},
            logprobs=self._logprobs([token]),
            finish_reason=token.finish_reason,
        )

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if tokens[0].logprob is None:  # not asked for
            return None
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    **self._with_bytes(token.id, token.logprob),
                    top_logprobs=[
                        TopLogprob(**self._with_bytes(*each)) for each in token.top_logprobs or ()
                    ],
                )
                for token in tokens
            ]
        )

    def _with_bytes(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self._text_of(token_id)
        in_part = "\N{REPLACEMENT CHARACTER}" in text  # a part of a character
        return {"token": text, "logprob": logprob, "bytes": None if in_part else [*text.encode()]}


class TextAnswer(Answer):
    """An answer of /v1/completions."""

    response = chunk = TextCompletion

    def _choice(self, index: int, completion: Completion) -> TextChoice:
        return TextChoice(
            index=index,
            text=completion.text,
            logprobs=self._logprobs(completion.tokens),
            finish_reason=completion.finish_reason,
        )

    def _delta(self, index: int, token: Token, *, first: bool) -> TextChoice:
        return TextChoice(
            index=index,
            text=token.text,
            logprobs=self._logprobs([token]),
            finish_reason=token.finish_reason,
        )

    def _logprobs(self, tokens: Sequence[Token]) -> TextLogprobs | None:
        if tokens[0].logprob is None:  # not asked for
            return None
        return TextLogprobs(
            tokens=[self._text_of(token.id) for token in tokens],
            token_logprobs=[token.logprob or 0.0 for token in tokens],
            top_logprobs=[
                {self._text_of(each): logprob for each, logprob in token.top_logprobs or ()}
                for token in tokens
            ],
        )


async def in_turn(
    streams: Sequence[OutputStream[Token]],
) -> AsyncGenerator[tuple[int, Token], None]:
    """Yield the next token of each stream in turn, with the number of the stream."""
    async with AsyncExitStack() as stack:
        # Entering a stream queues its prompt, so all are generated at the same time.
        running = {n: await stack.enter_async_context(each) for n, each in enumerate(streams)}
        while running:
            for number, stream in [*running.items()]:
                if (token := await anext(stream, None)) is None:
                    del running[number]
                else:
                    yield number, token


async def _events(
    first: OpenAIResponse, others: AsyncGenerator[OpenAIResponse, None]
) -> AsyncIterator[str]:
    """Yield server-sent events. If the client disconnects, the generation stops."""
    async with aclosing(others):
        yield _event(first)
        try:
            async for chunk in others:
                yield _event(chunk)
        except UNSERVED as error:  # the status was sent before
            yield _event(OpenAIError(error=Trouble(message=str(error), type="server_error")))
        else:
            yield "data: [DONE]\n\n"


def _event(data: BaseModel) -> str:
    return f"data: {data.model_dump_json()}\n\n"
