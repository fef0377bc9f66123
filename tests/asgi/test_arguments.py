"""What `lifespan` and `install` do not take, and say so before anything begins."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette

import aiopar
from aiopar.asgi import Resource, install, lifespan

from .hall import Hall


async def _coroutine(app: Starlette) -> None:
    pytest.fail("it was run")


async def _undecorated(app: Starlette) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (5, "int"),
        (_coroutine, "a coroutine function"),
        (_undecorated, "an async generator function"),
    ],
)
def test_what_is_no_lifespan_of_an_application_is_refused(given: Any, found: str) -> None:
    with pytest.raises(
        TypeError, match=rf"app_lifespan must be .*asynccontextmanager\), not {found}$"
    ):
        lifespan(app_lifespan=given)


def test_wrong_arguments_of_lifespan_are_refused() -> None:
    hall = Hall("hall", lambda *_, **details: None)
    assert isinstance(hall, Resource)
    with pytest.raises(TypeError, match="resource 1 must be a Resource, not str"):
        lifespan(hall, "hall")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="resource 0 must be a Resource, not the class Batcher"):
        lifespan(aiopar.Batcher)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="drain_delay must be a number, not NoneType"):
        lifespan(drain_delay=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="shutdown_timeout must be a number, not str"):
        lifespan(shutdown_timeout="5")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gc_threshold must be an int, not float"):
        lifespan(gc_threshold=1e4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gc_threshold must be at least 1, got 0"):
        lifespan(gc_threshold=0)
    with pytest.raises(ValueError, match="gc_threshold must be at most 2147483647"):
        lifespan(gc_threshold=2**31)
    with pytest.raises(ValueError, match="drain_delay must be at least 0, got -1"):
        lifespan(drain_delay=-1)
    with pytest.raises(ValueError, match="shutdown_timeout must be at least 0, got nan"):
        lifespan(shutdown_timeout=math.nan)


def test_wrong_uses_of_install_are_refused() -> None:
    app = Starlette()
    with pytest.raises(TypeError, match="a Starlette or FastAPI application, got str"):
        install("app")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"healthz must be a path .* got '/healthz/\{of\}'"):
        install(app, healthz="/healthz/{of}")
    with pytest.raises(ValueError, match=r"readyz must be a path .* got 'ready'"):
        install(app, readyz="ready")
    for name in ("healthz", "readyz", "metrics"):
        for given, found in ((5, "int"), (b"/x", "bytes")):
            wrong: dict[str, Any] = {name: given}
            with pytest.raises(TypeError, match=f"{name} must be a str or None, not {found}"):
                install(app, **wrong)
    for metrics in ("/metrics", None):
        with pytest.raises(TypeError, match="registry must be a CollectorRegistry, not int"):
            install(app, metrics=metrics, registry=5)  # type: ignore[arg-type]
    assert not app.user_middleware
    assert not app.routes
    install(app)
    with pytest.raises(RuntimeError, match="installed on this application already"):
        install(app)
