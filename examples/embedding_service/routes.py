"""Routes: what happens to each request before and after its endpoint.

A body with too many JSON values is refused before it is parsed. Parsing 4 MB of brackets, names or
numbers stalls the loop for up to 0.3 s, and reporting 380,000 wrong names for 1.5 s. Counting them
takes 0.02 s.

The header `Server-Timing` says in which batches the texts of a request were. Developer tools of
browsers show it.
"""

import itertools
import json
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeAlias

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from aiopar.serve import BatchInfo, BatchObserver, ItemInfo

from .answers import as_openai

MAX_VALUES = 1024
"""Four times the values of a valid request, so that validation reports a small excess in detail."""
MAX_OPENAI_VALUES = 32_768
"""Of a request of OpenAI's API, whose tokens are values."""
MAX_BATCHES = 16
"""How many batches the header of a response names: proxies refuse long headers."""

Batches: TypeAlias = dict[int, BatchInfo]  # by their number
_batches: ContextVar[Batches] = ContextVar("batches of the request")


class BatchesOfRequests(BatchObserver):
    """Notes in which batches the texts of a request are."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._batches: dict[ItemInfo, Batches] = {}

    def enqueue(self, item: ItemInfo) -> None:
        # This runs in the context of the request. `start` does not.
        if (batches := _batches.get(None)) is not None:
            self._batches[item] = batches

    def start(self, batch: BatchInfo) -> None:
        number = next(self._numbers)
        for item in batch.items:
            if (batches := self._batches.get(item)) is not None:
                batches[number] = batch

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        self._batches.pop(item, None)


def server_timing(seconds: float, batches: Batches) -> str:
    """The value of `Server-Timing`: milliseconds of the request, and of its first batches."""
    entries = [f"total;dur={seconds * 1000:.1f}"]
    # A copy: a stream goes on, and workers may add batches.
    for number, batch in batches.copy().items():
        if batch.seconds and len(entries) <= MAX_BATCHES:  # it has ended
            name = f"no. {number}, size {len(batch.items)}"
            entries.append(f'batch;dur={batch.seconds * 1000:.1f};desc="{name}"')
    return ", ".join(entries)


def holds_too_much(body: bytes, most: int) -> bool:
    """Whether JSON in UTF-8 has more than `most` values, counted by commas and opening brackets.

    Commas and brackets in strings do not count. A string ends at the first quotation mark without a
    backslash.
    """
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 4 * most:  # quotation marks of a name and a text per value
        return True
    outside = b"".join(bare.split(b'"')[::2])
    return sum(map(outside.count, (b",", b"[", b"{"))) > most


class _JsonRequest(Request):
    max_values = MAX_VALUES

    async def json(self) -> Any:
        """Parse the body, unless it has too many values."""
        body = await self.body()
        if holds_too_much(body, self.max_values):
            raise HTTPException(422, f"The body has more than {self.max_values} values")
        # `json.loads` would read bytes as UTF-16 too, whose commas `holds_too_much` does not count.
        # Parsing an integer takes time quadratic in its digits, so integers become floats.
        return json.loads(body.decode(), parse_int=float)


class JsonRoute(APIRoute):
    """A route that refuses bodies with too many values, and adds `Server-Timing` to responses."""

    request_class = _JsonRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            began = time.perf_counter()
            batches: Batches = {}
            _batches.set(batches)  # the context is of this request only
            response = await handle(self.request_class(request.scope, request.receive))
            seconds = time.perf_counter() - began
            response.headers["server-timing"] = server_timing(seconds, batches)
            return response

        return handle_json


class _OpenAIRequest(_JsonRequest):
    max_values = MAX_OPENAI_VALUES


class OpenAIRoute(JsonRoute):
    """A route that answers errors in OpenAI's form."""

    request_class = _OpenAIRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_openai(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:
                handlers = request.app.exception_handlers
                for kind in type(error).__mro__:
                    if kind in handlers:
                        return as_openai(await handlers[kind](request, error))
                raise

        return handle_openai
