"""Schemas of OpenAI's API, as far as a language model without tools needs them.

Unknown fields of a request are ignored. A field that would change the answer is refused if this
service does not support it.
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
"""The most tokens of a prompt and its answer. More tokens would need more memory."""
VOCABULARY = 49_152
MAX_CHOICES = 16
"""How many answers a request may ask for, over all of its prompts."""


def _joined(content: Any) -> Any:
    """Join the text of a message, if it comes in parts."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        raise PydanticCustomError("unsupported", "This service reads only text")
    return "".join(part["text"] for part in content)


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _several(given: Any) -> Any:
    """Put a single prompt into a list."""
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
# The kind is decided before validation, so that an error names the field of that kind only.
Given = Annotated[
    Annotated[Text, Tag("a text")] | Annotated[Tokens, Tag("some tokens")], Discriminator(_kind)
]
Count = Annotated[int, Field(ge=1, le=CONTEXT)]
Unset = Annotated[Any, AfterValidator(_unset)]


class StreamOptions(BaseModel):
    """`include_usage`: the last chunk of the stream says how many tokens there were."""

    include_usage: bool = False


class OpenAIRequest(BaseModel):
    """The fields of both kinds of requests. null means the default."""

    takes: ClassVar[str]
    """The name of the field with the prompt."""
    model: str = Field(max_length=200, json_schema_extra={"enum": [MODEL]})
    max_tokens: Count | None = None
    temperature: float = Field(1.0, ge=0, le=2, description="0: the most likely token.")
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
    max_completion_tokens: Count | None = Field(None, description="null: what the context allows.")
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: Unset = []
    functions: Unset = []
    response_format: Unset = {}


class TextRequest(OpenAIRequest):
    """Asks for the text that follows a prompt, or one text for each of several prompts."""

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
    """How many tokens the model has read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


FinishReason = Literal["stop", "length"]


class TopLogprob(BaseModel):
    """A token and its log probability. If it is a part of a character, `bytes` is null."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The chosen token, and the most likely tokens in its place."""

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
    """The new text of one of `n` replies."""

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
    """One of `n` texts for each prompt; in a stream, its new text."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class OpenAIResponse(BaseModel):
    """The fields of both kinds of responses."""

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
    """The texts; in a stream, a part of the texts."""

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
