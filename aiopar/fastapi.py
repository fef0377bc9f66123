"""Serve from FastAPI: `aiopar.asgi`, with OpenAPI models of its error responses (extra `fastapi`).

Example:
    >>> import aiopar, torch
    >>> from aiopar.fastapi import install, lifespan, responses
    >>> from fastapi import FastAPI
    >>> pool = aiopar.ReplicaPool(torch.nn.Linear(2, 3), ["cpu"], warmup=[torch.ones(1, 2)])
    >>> batcher = aiopar.Batcher(pool, timeout=1.0)
    >>> app = FastAPI(lifespan=lifespan(pool, batcher, drain_delay=5.0), responses=responses)
    >>> install(app)
    >>> @app.post("/predict")
    ... async def predict(features: tuple[float, float]) -> list[float]:
    ...     output = await batcher(torch.tensor(features))
    ...     return output.tolist()
"""

from typing import Any

try:
    from pydantic import BaseModel
except ModuleNotFoundError as error:
    raise ImportError("aiopar.fastapi needs FastAPI: pip install 'aiopar[fastapi]'") from error

from .asgi import add_resources, cancel_on_disconnect, install, lifespan, remove_resources

__all__ = [
    "InvalidRequest",
    "Problem",
    "add_resources",
    "cancel_on_disconnect",
    "install",
    "lifespan",
    "remove_resources",
    "responses",
]


def __dir__() -> list[str]:
    return __all__


class Problem(BaseModel):
    """The body of a 503 or 504 response."""

    detail: str


class InvalidRequest(BaseModel):
    """The body of a 422 response: FastAPI's validation errors, or the message of `InvalidInput`."""

    detail: str | list[dict[str, Any]]


_RETRY_AFTER = {
    "description": "Seconds to wait before a retry.",
    "schema": {"type": "integer", "minimum": 1},
}

responses: dict[int | str, dict[str, Any]] = {
    422: {"model": InvalidRequest, "description": "Not a valid input"},
    503: {
        "model": Problem,
        "description": "Overloaded, or not in service",
        "headers": {"Retry-After": _RETRY_AFTER},
    },
    504: {"model": Problem, "description": "No result in time"},
}
"""The error responses of `install`, for `FastAPI(responses=responses)` or a route."""
