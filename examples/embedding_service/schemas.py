"""Schemas of requests and responses. A request that does not fit is answered with 422."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)
from pydantic_core import PydanticCustomError

MAX_TEXTS = 256
MAX_INPUTS = 2048
"""As in OpenAI's API. At most `TOGETHER` of them are in the queue at a time."""
MAX_CHARACTERS = 10_000
MODEL = "all-MiniLM-L6-v2"
DIMENSIONS = 384
VOCABULARY = 30_522


def _not_blank(text: str) -> str:
    if not text.strip(" \t\r\n"):
        raise PydanticCustomError("text_blank", "The text is blank")
    return text


def _taking(*examples: dict[str, Any]) -> ConfigDict:
    # A misspelt name is an error, not an option that is silently ignored.
    return ConfigDict(extra="forbid", json_schema_extra={"examples": list(examples)})


# The pattern tells client programs what `_not_blank` checks. It avoids `\S`, because Python,
# JavaScript and Rust disagree on what is white space.
Text = Annotated[
    str,
    Field(max_length=MAX_CHARACTERS, json_schema_extra={"pattern": r"[^ \t\r\n]"}),
    AfterValidator(_not_blank),
]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
# JSON has one kind of number, so 3.0 is an integer; true and "3" are not.
_INTEGER = BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)
Limit = Annotated[int, Field(ge=1, le=50, strict=True), _INTEGER]
Dimensions = Annotated[int, Field(ge=1, le=DIMENSIONS, strict=True), _INTEGER]

# What OpenAI's API takes: also " ", and tokens.
AnyText = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
Token = Annotated[int, Field(ge=0, lt=VOCABULARY, strict=True), _INTEGER]
Tokens = Annotated[list[Token], Field(min_length=1)]


def _not_too_many(inputs: list[Any]) -> list[Any]:
    # Not in the schema: so many of the longest texts are more than the largest body.
    if len(inputs) > MAX_INPUTS:
        raise PydanticCustomError("too_long", f"List should have at most {MAX_INPUTS} items")
    return inputs


def _kind(given: object) -> str:
    if isinstance(given, str):
        return "text"
    first = given[0] if isinstance(given, list) and given else None
    if isinstance(first, list):
        return "token arrays"
    return "tokens" if isinstance(first, int | float) else "texts"


# Discriminated before validation, so that an error refers to the intended alternative.
Input = Annotated[
    Annotated[AnyText, Tag("text")]
    | Annotated[list[AnyText], Field(min_length=1), AfterValidator(_not_too_many), Tag("texts")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[
        list[Tokens], Field(min_length=1), AfterValidator(_not_too_many), Tag("token arrays")
    ],
    Discriminator(_kind),
]


class EmbeddingsRequest(BaseModel):
    """A request of OpenAI's API. Other fields are ignored."""

    input: Input = Field(
        description=f"A text or an array of this model's tokens, or up to {MAX_INPUTS} of them. "
        "Only the first 256 tokens of each count."
    )
    model: str = Field(max_length=200, json_schema_extra={"enum": [MODEL]})
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions | None = Field(
        None, description="The first numbers of each vector, made a vector of length 1."
    )
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"input": ["A file", "A loop"], "model": MODEL}]}
    )


class EmbeddingObject(BaseModel):
    """A vector of length 1, as numbers or as base64 of 32-bit floats."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """The number of tokens that the model has read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """An embedding for each text, in order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str = MODEL
    usage: Usage


class Model(BaseModel):
    """A model that the service has."""

    id: str = MODEL
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "sentence-transformers"


class Models(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[Model] = [Model()]


class Trouble(BaseModel):
    """Why a request of OpenAI's API was refused."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """The body of a refusal of OpenAI's API."""

    error: Trouble


class StreamRequest(BaseModel):
    """Texts whose embeddings are sent as soon as they are ready."""

    texts: Texts
    model_config = _taking({"texts": ["A file", "A loop"]})


class SimilarityRequest(BaseModel):
    """A text, and the texts to compare it with."""

    source: Text
    texts: Texts
    model_config = _taking({"source": "close a file", "texts": ["open() and with", "for loops"]})


class Similarities(BaseModel):
    """The cosine of source and each text: 1 for the same meaning, about 0 for unrelated texts."""

    scores: list[float]


class SearchRequest(BaseModel):
    """A question about Python."""

    query: Text
    limit: Limit = 5
    model_config = _taking({"query": "How do I close a file?", "limit": 3})


class Hit(BaseModel):
    """A paragraph of a docstring of Python's standard library."""

    score: float
    module: str
    text: str


class Hits(BaseModel):
    """The nearest paragraphs, best first, and how many were searched."""

    hits: list[Hit]
    searched: int
