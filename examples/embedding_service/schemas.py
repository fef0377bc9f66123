"""What goes in and comes out, as OpenAPI shows it; what does not fit is answered with 422."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_TEXTS = 256
MAX_CHARACTERS = 10_000
MODEL = "all-MiniLM-L6-v2"

Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS, pattern=r"\S")]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]


class EmbedRequest(BaseModel):
    """One text, or many."""

    texts: Text | Texts = Field(description=f"One text, or up to {MAX_TEXTS}; longer ones are cut.")
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"texts": "A file is closed."}, {"texts": ["A file", "A loop"]}]
        }
    )


class Embeddings(BaseModel):
    """One vector a text, of length 1."""

    model: str = MODEL
    embeddings: list[list[float]]


class StreamRequest(BaseModel):
    """Texts whose embeddings are sent as soon as they are there."""

    texts: Texts
    model_config = ConfigDict(json_schema_extra={"examples": [{"texts": ["A file", "A loop"]}]})


class SimilarityRequest(BaseModel):
    """A text, and those it is compared with."""

    source: Text
    texts: Texts
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"source": "close a file", "texts": ["open() and with", "for loops"]}]
        }
    )


class Similarities(BaseModel):
    """The cosine of source and each text: 1 for the same meaning, about 0 for nothing in common."""

    scores: list[float]


class SearchRequest(BaseModel):
    """A question about Python."""

    query: Text
    limit: int = Field(default=5, ge=1, le=50)
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"query": "How do I close a file?", "limit": 3}]}
    )


class Hit(BaseModel):
    """A paragraph of Python's manual."""

    score: float
    topic: str
    text: str


class Hits(BaseModel):
    """The nearest paragraphs, the best first."""

    hits: list[Hit]
