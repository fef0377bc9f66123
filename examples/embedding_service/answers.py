"""Responses other than plain results: refusals, and streams of lines."""

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request, Response

import aiopar
from aiopar.data import Stream
from aiopar.fastapi import Problem, responses

from .encoder import Embedding
from .schemas import OpenAIError, Trouble

MAX_BODY = 4_000_000
MAX_ERRORS = 20
MAX_NAME = 100
NDJSON = "application/x-ndjson"

REFUSALS: dict[int | str, dict[str, Any]] = {
    **responses,
    400: {"model": Problem, "description": "The body cannot be read"},
    413: {"description": f"The body is larger than {MAX_BODY} bytes"},
}
OPENAI_REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OpenAIError, "description": "Not a valid request"},
    "5XX": {"model": OpenAIError, "description": "Overloaded, not in service, or not in time"},
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A line of JSON per text. One with `detail` says why the stream ends early.",
        "content": {
            NDJSON: {
                "schema": {"type": "string"},
                "example": '{"index": 0, "embedding": [0.1, 0.2]}\n',
            }
        },
    }
}


async def invalid(_: Request, error: Any) -> Response:
    """Answer 422 with type, place and message of the first errors, but without the input.

    The input may be long. FastAPI's own handler repeats it, and fails with 500 for NaN and for half
    a surrogate pair.
    """
    errors = error.errors()
    detail = [
        {"type": found["type"], "loc": [*map(_short, found["loc"])], "msg": found["msg"]}
        for found in errors[:MAX_ERRORS]
    ]
    if (more := len(errors) - MAX_ERRORS) > 0:
        detail.append({"type": "more", "loc": ["body"], "msg": f"and {more} more errors"})
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")


def _short(name: str | int) -> str | int:
    if isinstance(name, int) or len(name) <= MAX_NAME:
        return name
    return name[:MAX_NAME] + "..."


def as_openai(refusal: Response) -> Response:
    """The same refusal in OpenAI's form."""
    detail = json.loads(bytes(refusal.body))["detail"]
    param = None
    if not isinstance(detail, str):  # of a body that does not fit, OpenAI tells the first error
        param, detail = _param(detail[0]["loc"]), detail[0]["msg"]
    # OpenAI has no 422.
    status = 400 if refusal.status_code == 422 else refusal.status_code
    trouble = Trouble(
        message=detail if param is None else f"{param}: {detail}",
        type="invalid_request_error" if status < 500 else "server_error",
        param=param,
        code="model_not_found" if status == 404 else None,
    )
    headers = {name: refusal.headers[name] for name in ("retry-after",) if name in refusal.headers}
    content = json.dumps({"error": trouble.model_dump()})
    return Response(content, status, headers, media_type="application/json")


def _param(loc: list[str | int]) -> str | None:
    """The place of an error in the body, as in "input[1]"."""
    # ["body", "input", "texts", 1]; "texts" is a tag of the schema, not a name of the body.
    match loc:
        case [_, str(name), *others]:
            return name + "".join(f"[{index}]" for index in others if isinstance(index, int))
    return None


async def lines(first: Embedding, others: Stream[Embedding]) -> AsyncIterator[str]:
    """Yield NDJSON. A slow client slows its computation; a client that leaves stops it."""
    async with others:
        yield _line(index=0, embedding=first.vector.tolist())
        index = 1
        try:
            async for other in others:
                yield _line(index=index, embedding=other.vector.tolist())
                index += 1
        except (
            aiopar.Overloaded,
            aiopar.DeadlineExceeded,
            aiopar.ReplicaUnavailable,
            aiopar.ServiceClosed,
        ) as error:
            yield _line(detail=str(error))  # too late for another status


def _line(**fields: Any) -> str:
    return json.dumps(fields) + "\n"
