"""The live page: the statistics of an application's resources, in a browser."""

import base64
import hashlib
import json
import re
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from importlib.resources import files
from time import monotonic
from typing import cast

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from ..serve._multiprocess_metrics import requests_of_all_processes
from ._history import PERIOD, TICK, History, statistics
from ._service import Service


def dashboard_routes(service: Service, path: str) -> Iterator[Route]:
    """The routes of the page and of its events. A lifespan then records the history."""
    history = History(service)
    service.tasks.append(history.record)
    html = files(__package__).joinpath("_dashboard.html").read_text(encoding="utf-8")
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": _content_security_policy(html),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def page(_: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    async def events(_: Request) -> Response:
        # nginx would hold events back in its buffer.
        unbuffered = {"cache-control": "no-store", "x-accel-buffering": "no"}
        samples = _events(history, service)
        return _EventStream(samples, headers=unbuffered, media_type="text/event-stream")

    yield Route(path, page, include_in_schema=False)
    yield Route(f"{path.rstrip('/')}/events", events, include_in_schema=False)


class _EventStream(StreamingResponse):
    """Closes its generator when the page is closed: else the garbage collector would."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(cast(AsyncGenerator[str, None], self.body_iterator)):
            await super().stream_response(send)


def _content_security_policy(html: str) -> str:
    """Allow the page's own script, style and events, and nothing else."""

    def hashed(element: str) -> str:
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", html, flags=re.DOTALL)
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{hashed('script')}'; "
        f"style-src 'sha256-{hashed('style')}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _events(history: History, service: Service) -> AsyncGenerator[str, None]:
    """The samples as server-sent events, each a list, until the server shuts down.

    The first event has the history. The server waits for its connections, so an open page would
    hold the server up. The browser asks again after `retry` milliseconds: another process may serve
    by then.
    """
    yield f"retry: {PERIOD * 1000:.0f}\n\n"
    count = 0
    while not _is_ending(service):
        if count < history.count:
            samples, count = ",".join(history.since(count)), history.count
            yield f"data: [{samples}]\n\n{await _all_processes()}"
        await anyio.sleep(TICK)
    yield f"data: [{json.dumps(statistics(service))}]\n\n"


async def _all_processes() -> str:
    """An event with the requests of all server processes; empty if only this one is known."""
    with suppress(OSError, ValueError):  # the folder of their files is not there, or not writable
        limiter = CapacityLimiter(1)  # anyio's default one may be held by `def` endpoints that wait
        found = await anyio.to_thread.run_sync(requests_of_all_processes, limiter=limiter)
        if found is not None:
            return f"event: all\ndata: {json.dumps({'at': monotonic(), **found})}\n\n"
    return ""


def _is_ending(service: Service) -> bool:
    """Whether the lifespan has ended, or will end: uvicorn first waits for all responses."""
    # `lifespan` may have replaced uvicorn's handler of SIGTERM, but not that of SIGINT.
    server = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return not service.lifespans or bool(getattr(server, "should_exit", False))
