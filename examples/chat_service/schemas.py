"""Schemas of OpenAI's API, as far as a language model without tools needs them.

A request may have other fields, which are ignored. A field that would change the answer, and that
this service does not have, is refused.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

MODEL = "SmolLM2-135M-Instruct"
CONTEXT = 2048
"""Tokens of a prompt and its answer. The model takes four times as many, which need more memory."""
VOCABULARY = 49_152
MAX_CHOICES = 16
"""How many answers a request may ask for, over all of its prompts."""


def _joined(content: Any) -> Any:
    """The text of a message, which may come in parts."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        raise PydanticCustomError("unsupported", "This service reads only text")
    return "".join(part["text"] for part in content)


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _several(given: Any) -> Any:
    """A list of prompts, if there is only one."""
    tokens = isinstance(given, list) and given and isinstance(given[0], int)
    return [given] if tokens or isinstance(given, str) else given


def _kind(prompt: Any) -> str:
    return "some tokens" if isinstance(prompt, list) else "a text"


def _unset(value: Any) -> Any:
    if value not in (0, "", [], {}, {"type": "text"}):
        raise PydanticCustomError("unsupported", "This service does not have it")
    return value


Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[
    list[Annotated[int, Field(ge=0, lt=VOCABULARY)]], Field(min_length=1, max_length=CONTEXT)
]
# Discriminated before validation, so that an error refers to the intended alternative.
Given = Annotated[
    Annotated[Text, Tag("a text")] | Annotated[Tokens, Tag("some tokens")], Discriminator(_kind)
]
Count = Annotated[int, Field(ge=1, le=CONTEXT)]
Unset = Annotated[Any, AfterValidator(_unset)]


class StreamOptions(BaseModel):
    """`include_usage`: the last chunk of the stream says how many tokens there were."""

    include_usage: bool = False


class OpenAIRequest(BaseModel):
    """What requests of both kinds have. null is the default."""

    takes: ClassVar[str]
    """The field that has the prompt."""
    model: str = Field(max_length=200, json_schema_extra={"enum": [MODEL]})
    max_tokens: Count | None = None
    temperature: float = Field(1.0, ge=0, le=2, description="0: the likeliest token.")
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[Text], BeforeValidator(_listed), Field(max_length=4)] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    frequency_penalty: Unset = 0
    presence_penalty: Unset = 0
    logit_bias: Unset = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class Message(BaseModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    # Only a text with a bound is checked: half of a surrogate pair is none.
    content: Annotated[str, Field(max_length=500_000), BeforeValidator(_joined)]


class ChatRequest(OpenAIRequest):
    """Asks for the next message of a conversation."""

    takes = "messages"
    messages: Annotated[list[Message], Field(min_length=1, max_length=256)]
    max_completion_tokens: Count | None = Field(None, description="null: what the context holds.")
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: Unset = []
    functions: Unset = []
    response_format: Unset = {}


class TextRequest(OpenAIRequest):
    """Asks for the text that follows the prompt, or each of several prompts."""

    takes = "prompt"
    prompt: Annotated[
        list[Given],
        BeforeValidator(_several),
        Field(min_length=1, max_length=MAX_CHOICES),
    ]
    max_tokens: Count = 16
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: Literal[1] = 1
    echo: Unset = False
    suffix: Unset = ""


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


FinishReason = Literal["stop", "length"]


class TopLogprob(BaseModel):
    """A token and the logarithm of its probability. Of a part of a character, `bytes` is null."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token that was taken, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """An entry per token."""

    content: list[TokenLogprob]


class Reply(BaseModel):
    """A message of the model."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One of `n` replies."""

    index: int
    message: Reply
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatDelta(BaseModel):
    """What one of `n` replies has more of."""

    index: int
    delta: dict[str, str]
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextLogprobs(BaseModel):
    """An entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: None = None


class TextChoice(BaseModel):
    """One of `n` texts for each prompt, or what it has more of."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class OpenAIResponse(BaseModel):
    """What responses of both kinds have."""

    id: str
    created: int
    model: str = MODEL
    usage: Usage | None = None


class ChatCompletion(OpenAIResponse):
    """The replies."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatChunk(OpenAIResponse):
    """A part of the replies, in a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatDelta]


class TextCompletion(OpenAIResponse):
    """The texts, or in a stream a part of them."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class Model(BaseModel):
    """A model that the service has."""

    id: str = MODEL
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "HuggingFaceTB"


class Models(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[Model] = [Model()]


class Trouble(BaseModel):
    """Why a request was refused."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = None
    code: str | None = None


class OpenAIError(BaseModel):
    """The body of a refusal."""

    error: Trouble
