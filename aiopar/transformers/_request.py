"""`Prompt`, the request for a language model; `Token`, its part; `Completion`, its result."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .._base.arguments import as_int, check_instance, check_int, check_number
from .._base.inputs import outline

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request for `CausalLM`.

    Args:
        prompt: Text, or token ids. Text becomes `tokenizer(text).input_ids`, with special tokens.
            For a chat, give the ids of `tokenizer.apply_chat_template`.
        max_tokens: The most tokens to generate.
        temperature: 0: take the most likely token. Above 0: draw tokens.
        top_k: Draw from the `top_k` most likely tokens only. 0: from all.
        top_p: Draw from the fewest tokens whose probabilities add up to at least `top_p`.
        stop: Strings that end the text. The text does not contain them.
        seed: Makes draws repeatable, whatever else runs in the batch. In bfloat16 the batch may
            change a token, as it may for greedy tokens: see `CausalLM`. None: a random seed.
        logprobs: Give the log probability of each token, and of this many most likely tokens. None:
            give none.
        ignore_eos: Do not end at an end-of-sequence token.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument has a wrong value.
    """

    prompt: str | Sequence[int]
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: str | Sequence[str] = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", _ids(self.prompt))  # the dataclass is frozen
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for text in stop:
            check_instance("stop", text, str)
            if not text:
                raise ValueError(f"stop must be strings that are not empty, got {self.stop!r}")
        check_int("max_tokens", self.max_tokens, at_least=1)
        check_int("top_k", self.top_k, at_least=0)
        if check_number("temperature", self.temperature, zero=True) == math.inf:
            raise ValueError("temperature must be finite")
        if check_number("top_p", self.top_p, zero=False) > 1:
            raise ValueError(f"top_p must be at most 1, got {self.top_p}")
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, at_least=0)
        if self.seed is not None:
            as_int("seed", self.seed)


def _ids(prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        if not isinstance(prompt, bytes):  # these would be numbers from 0 to 255
            return tuple(map(operator.index, prompt))
    except TypeError:
        pass
    expected = "text or a sequence of token ids"
    raise TypeError(f"prompt must be {expected}, got {outline(prompt)}") from None


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token: one part of `batcher.stream(Prompt(...))`.

    Attributes:
        id: The token's id.
        text: The text that this token completes. Empty while a character is incomplete, or while
            the text may be the beginning of a stop string.
        logprob: The log probability, before temperature, `top_k` and `top_p`. None: the prompt has
            no `logprobs`.
        top_logprobs: Ids and log probabilities of the most likely tokens. None: as for `logprob`.
        finish_reason: The last token has the `finish_reason` of the `Completion`; others have None.
    """

    id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of `await batcher(Prompt(...))`.

    Attributes:
        text: The texts of `tokens`, joined.
        tokens: The generated tokens, also the end-of-sequence token.
        finish_reason: What ended the text. "stop": an end-of-sequence token or a stop string.
            "length": `max_tokens`.
        prompt_tokens: How many tokens the prompt has.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    prompt_tokens: int
