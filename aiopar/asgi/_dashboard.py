"""The live page: the statistics of an application's resources, in a browser."""

import base64
import hashlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from importlib.resources import files
from time import monotonic
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from ..executor._worker import Worker
from ..serve import ModelStore, ReplicaPool
from ..serve._base_batcher import BaseBatcher
from ..serve._prometheus import worker_pools
from ._service import Service

_PERIOD = 1.0  # seconds from one sample to the next
_TICK = 0.02  # seconds from one look at the loop to the next; a shorter delay may go unseen


def dashboard_routes(service: Service, path: str) -> Iterator[Route]:
    """The routes of the page and of its events."""
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
        samples = _events(service)
        return StreamingResponse(samples, headers=unbuffered, media_type="text/event-stream")

    yield Route(path, page, include_in_schema=False)
    yield Route(f"{path.rstrip('/')}/events", events, include_in_schema=False)


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


async def _events(service: Service) -> AsyncIterator[str]:
    """Samples of the statistics as server-sent events, until the server shuts down.

    A sample has the counts since the start, and the page makes rates of the differences. The server
    waits for its connections, so an open page would hold the server up. The browser asks again
    after `retry` milliseconds: another process may serve by then.
    """
    yield f"retry: {_PERIOD * 1000:.0f}\n\n"
    delay: float | None = None  # the longest of the ticks since the latest sample
    while True:
        ending, sampled_at = _is_ending(service), monotonic()
        yield f"data: {json.dumps(_statistics(service, delay))}\n\n"
        if ending:
            return
        delay = 0.0
        while monotonic() - sampled_at < _PERIOD - _TICK / 2 and not _is_ending(service):
            due = monotonic() + _TICK
            await anyio.sleep(_TICK)
            delay = max(delay, monotonic() - due)


def _is_ending(service: Service) -> bool:
    """Whether the lifespan has ended, or will end: uvicorn first waits for all responses."""
    # `lifespan` may have replaced uvicorn's handler of SIGTERM, but not that of SIGINT.
    server = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return not service.lifespans or bool(getattr(server, "should_exit", False))


def _statistics(service: Service, loop_delay: float | None) -> dict[str, Any]:
    resources = service.resources
    batchers = [one for one in resources if isinstance(one, BaseBatcher)]
    pools = [one for one in resources if isinstance(one, ReplicaPool)]
    pools += [one.pool for one in batchers if one.pool is not None]
    return {
        "at": monotonic(),
        "pid": os.getpid(),
        "unready": service.unready_reason(),
        "dead": service.dead_reason(),
        "loop_delay": loop_delay,
        "batchers": [_batcher(one) for one in dict.fromkeys(batchers)],
        "pools": [{"name": one.name, **asdict(one.stats())} for one in dict.fromkeys(pools)],
        "stores": [
            {"name": one.name, **asdict(one.stats())}
            for one in resources
            if isinstance(one, ModelStore)
        ],
        "executors": [
            {"name": one.thread_name_prefix, "workers": [_worker(each) for each in one.workers]}
            for one in worker_pools(resources)
        ],
    }


def _batcher(batcher: BaseBatcher[Any, Any]) -> dict[str, Any]:
    settings = batcher._settings
    bounds = {"max_batch_size": settings.max_batch_size, "max_pending": settings.max_pending}
    return {"name": batcher.name, **bounds, **asdict(batcher.stats())}


def _worker(worker: Worker) -> dict[str, Any]:
    return {**asdict(worker.stats()), "device": str(worker.device), "label": worker.label}
