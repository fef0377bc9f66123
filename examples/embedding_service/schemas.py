"""What goes in and comes out, as OpenAPI shows it; what does not fit is answered with 422."""

from typing import Annotated, Any

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
    # A name that is spelt wrong is an error, and no option that is silently not there.
    return ConfigDict(extra="forbid", json_schema_extra={"examples": list(examples)})


# The pattern says to programs what `_not_blank` says to people. No `\S`: what counts as white space
# differs between Python, JavaScript and Rust.
Text = Annotated[
    str,
    Field(max_length=MAX_CHARACTERS, json_schema_extra={"pattern": r"[^ \t\r\n]"}),
    AfterValidator(_not_blank),
]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
# Told apart before they are validated, so that an error is about the one that was meant.
OneOrMany = Annotated[
    Annotated[Text, Tag("one")] | Annotated[Texts, Tag("many")],
    Discriminator(lambda given: "one" if isinstance(given, str) else "many"),
]
# JSON has one kind of number: 3.0 is an integer there; true and "3" are none.
Limit = Annotated[
    int,
    Field(ge=1, le=50, strict=True),
    BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n),
]


class EmbedRequest(BaseModel):
    """One text, or many."""

    texts: OneOrMany = Field(
        description=f"A text, or up to {MAX_TEXTS}; only the first 256 tokens of each count."
    )
    model_config = _taking({"texts": "A file is closed."}, {"texts": ["A file", "A loop"]})


class Embeddings(BaseModel):
    """One vector a text, of length 1."""

    model: str = MODEL
    embeddings: list[list[float]]


class StreamRequest(BaseModel):
    """Texts whose embeddings are sent as soon as they are there."""

    texts: Texts
    model_config = _taking({"texts": ["A file", "A loop"]})


class SimilarityRequest(BaseModel):
    """A text, and those it is compared with."""

    source: Text
    texts: Texts
    model_config = _taking({"source": "close a file", "texts": ["open() and with", "for loops"]})


class Similarities(BaseModel):
    """The cosine of source and each text: 1 for the same meaning, about 0 for nothing in common."""

    scores: list[float]


class SearchRequest(BaseModel):
    """A question about Python."""

    query: Text
    limit: Limit = 5
    model_config = _taking({"query": "How do I close a file?", "limit": 3})


class Hit(BaseModel):
    """A paragraph of Python's manual."""

    score: float
    topic: str
    text: str


class Hits(BaseModel):
    """The nearest paragraphs, the best first."""

    hits: list[Hit]
