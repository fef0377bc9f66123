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
MAX_CHARACTERS = 10_000
MODEL = "all-MiniLM-L6-v2"


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
# Discriminated before validation, so that an error refers to the intended alternative.
OneOrMany = Annotated[
    Annotated[Text, Tag("one")] | Annotated[Texts, Tag("many")],
    Discriminator(lambda given: "one" if isinstance(given, str) else "many"),
]
# JSON has one kind of number, so 3.0 is an integer; true and "3" are not.
Limit = Annotated[
    int,
    Field(ge=1, le=50, strict=True),
    BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n),
]


class EmbeddingsRequest(BaseModel):
    """A request of OpenAI's API."""

    input: OneOrMany = Field(
        description=f"A text, or up to {MAX_TEXTS}; only the first 256 tokens of each count."
    )
    model: str = Field(max_length=200, json_schema_extra={"enum": [MODEL]})
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = Field(None, description="Ignored")
    model_config = _taking({"input": ["A file", "A loop"], "model": MODEL})


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
