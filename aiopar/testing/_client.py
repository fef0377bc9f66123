"""`client`: an HTTP client for an ASGI application, which runs with its lifespan."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from .._base.arguments import described
from .._base.thread_state import CallerState
from .._base.tracebacks import in_words, logger
from ..executor._loop_tasks import Tasks
from ._application import Application, ApplicationCall

if TYPE_CHECKING:
    import httpx2 as httpx


def client(
    app: Application, *, raise_app_exceptions: bool = True, **options: Any
) -> "AbstractAsyncContextManager[httpx.AsyncClient]":
    """Serve an ASGI application to a client in the same event loop, without a server.

    `async with client(app) as http` starts the application, and gives an `httpx.AsyncClient`. The
    application may be one of FastAPI, Starlette or any other framework. At the end of the block the
    application shuts down: running requests lose their client, the block waits for their end, then
    the lifespan ends. Whoever still waits for a response gets `httpx.RemoteProtocolError`. If the
    block raises or is cancelled, running requests are cancelled: they may wait for a later step of
    the test. Runs on asyncio and trio.

    The application behaves as on a server:

    - Its lifespan runs, in one task. The requests have the state that the lifespan yields. The log
      warns of an application that has no lifespan because it refuses the scope of a lifespan.
    - Each request runs in a task of its own. The test may hold it, and send others meanwhile.
    - The parts of a streaming response arrive when they are sent. `send` of the application waits
      until the client has read the part.
    - If the client leaves (it closes the response, or the task of the request is cancelled), the
      application gets `http.disconnect`, and runs on.

    Unlike on a server, a response ends when the application has ended, for example with its
    background tasks. The body of a request arrives in one piece. Requests have no time limit of
    their own (`timeout` of httpx): use `asyncio.timeout` or `anyio.fail_after`. Websockets need
    Starlette's `TestClient`.

    `httpx.ASGITransport` runs no lifespan, and sends a response only when it is complete.

    Args:
        app: The application, of ASGI 3.
        raise_app_exceptions: Whether the test gets an error that the application does not handle.
            False, as from a server: the client gets a response with status 500, or
            `httpx.RemoteProtocolError` if the response has begun.
        options: Options of `httpx.AsyncClient`, for example `headers`. `base_url` is
            `"http://test"` if it is not given.

    Raises:
        TypeError: `app` is not callable.
        ImportError: Neither `httpx2` nor `httpx` is installed.
        Exception: On entering and leaving the block, the error of the application that fails to
            start or to shut down.

    Example:
        >>> import asyncio, aiopar, torch
        >>> from aiopar.asgi import install, lifespan
        >>> from aiopar.testing import client
        >>> from starlette.applications import Starlette
        >>> batcher = aiopar.Batcher(torch.nn.Linear(2, 3).eval())
        >>> app = Starlette(lifespan=lifespan(batcher))
        >>> install(app)
        >>> async def main():
        ...     async with client(app) as http:
        ...         return await http.get("/readyz")
        >>> asyncio.run(main())
        <Response [200 OK]>
    """
    if not callable(app):
        raise TypeError(f"app must be an ASGI application, not {described(app)}")
    try:
        from ._transport import Transport, httpx
    except ModuleNotFoundError as error:
        raise ImportError("aiopar.testing.client needs httpx: pip install httpx2") from error

    @asynccontextmanager
    async def run() -> AsyncIterator[httpx.AsyncClient]:
        requests = Tasks(CallerState())
        async with _lifespan(app) as state:
            transport = Transport(app, requests, state, raise_app_exceptions=raise_app_exceptions)
            http = httpx.AsyncClient(transport=transport, **{"base_url": "http://test", **options})
            try:
                yield http
                await transport.aclose()
            except BaseException:
                requests.cancel()
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    await http.aclose()

    return run()


@asynccontextmanager
async def _lifespan(app: Application) -> AsyncIterator[dict[str, Any]]:
    """Start the application, and shut it down; gives the state of the lifespan."""
    tasks = Tasks(CallerState())
    state: dict[str, Any] = {}
    scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": state}
    start, stop = {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}
    async with aclosing(ApplicationCall(app, scope, tasks, first=start, last=stop)) as call:
        try:
            await _succeeds(call)
        except Exception as error:
            if call.began:
                raise
            logger.warning("the application has no lifespan: %s", in_words(error))  # as Django's
        except BaseException:  # perhaps the test was cancelled: then the startup must end too
            tasks.cancel()
            raise
        try:
            yield state
        finally:
            with anyio.CancelScope(shield=True):
                call.finish()
                await _succeeds(call)
                await call.next()


async def _succeeds(call: ApplicationCall) -> None:
    """Wait until the application has started or has shut down; raise why it has failed."""
    message = await call.next()
    if message is not None and message["type"].endswith(".failed"):
        call.finish()  # it may receive in a loop, as the example in the standard of ASGI
        await call.next()  # raises the error of the application
        raise RuntimeError(f"the application sent {message}")
