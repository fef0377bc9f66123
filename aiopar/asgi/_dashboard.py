"""The live page: the statistics of an application's resources, in a browser."""

import base64
import hashlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import files
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..executor._loop_tasks import Repeating
from ..executor._worker import Worker
from ..futures._future import running_future
from ..serve import Batcher, ReplicaPool
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
    sampler = _Sampler(service)

    async def page(_: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    async def events(_: Request) -> Response:
        return _Events(sampler)

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


class _Sampler:
    """Samples the statistics while a page is open; all pages share the samples.

    A sample has the counts since the start, and the page makes rates of the differences. So a page
    that misses a sample shows no wrong number.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pages = 0
        self._timer: Repeating | None = None
        self._delay: float | None = None  # the longest of the ticks since the latest sample
        self._sampled_at = 0.0
        self._sample = ""
        self._next = running_future()  # done at the next sample

    @contextmanager
    def page_open(self) -> Iterator[None]:
        """A page is open in the block. Called on the loop's thread."""
        if self._timer is None:
            self._timer = Repeating(_TICK, self._tick)
            self._take_sample()
        self._pages += 1
        try:
            yield
        finally:
            self._pages -= 1
            if not self._pages:
                self._timer.cancel()
                self._timer = self._delay = None

    async def events(self) -> AsyncIterator[str]:
        """The samples as server-sent events, until the server shuts down.

        The server waits for its connections, so an open page would hold the server up. The browser
        asks again after `retry` milliseconds: another process may serve by then.
        """
        yield f"retry: {_PERIOD * 1000:.0f}\n\n"
        while True:
            following = self._next
            yield f"data: {self._sample}\n\n"
            if self._ending:
                return
            await following

    @property
    def _ending(self) -> bool:
        return not self._service.lifespans or _uvicorn_exits()

    def _tick(self) -> None:
        assert self._timer is not None  # noqa: S101  # it calls this
        self._delay = max(self._delay or 0.0, self._timer.late)
        if monotonic() - self._sampled_at >= _PERIOD - _TICK / 2 or self._ending:
            self._take_sample()

    def _take_sample(self) -> None:
        self._sampled_at = monotonic()
        self._sample = json.dumps(self._statistics())
        self._delay = None
        following, self._next = self._next, running_future()
        following.set_result(None)

    def _statistics(self) -> dict[str, Any]:
        service, resources = self._service, self._service.resources
        batchers = [one for one in resources if isinstance(one, Batcher)]
        pools = [one for one in resources if isinstance(one, ReplicaPool)]
        pools += [one.pool for one in batchers if one.pool is not None]
        return {
            "at": self._sampled_at,
            "pid": os.getpid(),
            "unready": service.unready_reason(),
            "dead": service.dead_reason(),
            "loop_delay": self._delay,
            "batchers": [_batcher(one) for one in dict.fromkeys(batchers)],
            "pools": [{"name": one.name, **asdict(one.stats())} for one in dict.fromkeys(pools)],
            "executors": [
                {"name": one.thread_name_prefix, "workers": [_worker(each) for each in one.workers]}
                for one in worker_pools(resources)
            ],
        }


def _batcher(batcher: Batcher[Any, Any]) -> dict[str, Any]:
    settings = batcher._settings
    bounds = {"max_batch_size": settings.max_batch_size, "max_pending": settings.max_pending}
    return {"name": batcher.name, **bounds, **asdict(batcher.stats())}


def _worker(worker: Worker) -> dict[str, Any]:
    return {**asdict(worker.stats()), "device": str(worker.device), "label": worker.label}


def _uvicorn_exits() -> bool:
    """Whether uvicorn shuts down. All responses must end before it tells the application."""
    # `lifespan` may have replaced uvicorn's handler of SIGTERM, but not that of SIGINT.
    server = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return bool(getattr(server, "should_exit", False))


class _Events(StreamingResponse):
    """The stream of events for one page."""

    def __init__(self, sampler: _Sampler) -> None:
        # nginx would hold events back in its buffer.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(sampler.events(), headers=headers, media_type="text/event-stream")
        self._sampler = sampler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator, which a response that is cut off may leave suspended.
        with self._sampler.page_open():
            await super().__call__(scope, receive, send)
