"""Responses other than plain results: refusals, and streams of lines."""

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request, Response
from torch import Tensor

import aiopar
from aiopar.data import Stream
from aiopar.fastapi import Problem, responses

MAX_BODY = 4_000_000
MAX_ERRORS = 20
MAX_NAME = 100
NDJSON = "application/x-ndjson"

REFUSALS: dict[int | str, dict[str, Any]] = {
    **responses,
    400: {"model": Problem, "description": "The body cannot be read"},
    413: {"description": f"The body is larger than {MAX_BODY} bytes"},
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


async def lines(first: Tensor, vectors: Stream[Tensor]) -> AsyncIterator[str]:
    """Yield NDJSON. A slow client slows its computation; a client that leaves stops it."""
    async with vectors:
        yield _line(index=0, embedding=first.tolist())
        index = 1
        try:
            async for vector in vectors:
                yield _line(index=index, embedding=vector.tolist())
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
