"""Errors in OpenAI's form."""

import json
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError

from .schemas import OpenAIError, Trouble

REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OpenAIError, "description": "Not a valid request"},
    "5XX": {"model": OpenAIError, "description": "Overloaded, not in service, or not in time"},
}


def refusal(status: int, message: str, *, param: str, code: str | None = None) -> HTTPException:
    """Return the error that an endpoint raises if clients look at its `param` or `code`."""
    return HTTPException(status, {"message": message, "param": param, "code": code})


def answer_in_openai_form(app: FastAPI) -> None:
    """Wrap the error handlers of `app`, so that their responses have OpenAI's form."""
    for kind, handler in [*app.exception_handlers.items()]:
        app.add_exception_handler(kind, partial(_answer, handler))
    app.add_exception_handler(RequestValidationError, _invalid)


async def _answer(handler: Any, *args: Any) -> Response:
    response = await handler(*args)
    detail = json.loads(bytes(response.body))["detail"]
    given = detail if isinstance(detail, dict) else {"message": detail}
    status = response.status_code
    kept = {name: value for name, value in response.headers.items() if name in _KEPT}
    return _response(400 if status == 422 else status, given, kept)  # OpenAI's API has no 422


_KEPT = {"retry-after", "allow"}


async def _invalid(_: Request, error: Any) -> Response:
    # As in OpenAI's API, only the first error; without the input, because that may be long.
    first = error.errors()[0]
    # For example ["body", "prompt", 0, "a text"]. "a text" is a tag of the schema, not a name.
    path = () if first["type"] == "json_invalid" else first["loc"][1:]  # a position, or names
    names = [name for name in path if isinstance(name, int) or name.isidentifier()]
    param = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)[1:]
    return _response(400, {"message": first["msg"], "param": param or None})


def _response(
    status: int, given: dict[str, Any], headers: dict[str, str] | None = None
) -> Response:
    given["type"] = "invalid_request_error" if status < 500 else "server_error"
    content = OpenAIError(error=Trouble(**given)).model_dump_json()
    return Response(content, status, headers, media_type="application/json")
