"""`Transport`: how an httpx client sends its requests to an application, without a server."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ..executor._loop_tasks import Tasks
from ._application import Application, ApplicationCall

if TYPE_CHECKING:
    import httpx2 as httpx
else:
    try:
        import httpx2 as httpx
    except ModuleNotFoundError:
        import httpx

__all__ = ["Transport", "httpx"]


class Transport(httpx.AsyncBaseTransport):
    """Calls an application for each request; `aclose` waits until the application has ended.

    Args:
        app: The application.
        tasks: Run its calls.
        state: That of its lifespan.
        raise_app_exceptions: Whether a request raises the error of the application.
    """

    def __init__(
        self, app: Application, tasks: Tasks, state: dict[str, Any], *, raise_app_exceptions: bool
    ) -> None:
        self._app = app
        self._tasks = tasks
        self._state = state
        self._raises = raise_app_exceptions
        self._calls: list[ApplicationCall] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response when it begins."""
        body = await request.aread()
        call = ApplicationCall(
            self._app,
            _scope(request, self._state.copy()),
            self._tasks,
            first={"type": "http.request", "body": body, "more_body": False},
            last={"type": "http.disconnect"},
            raises=self._raises,
        )
        self._calls = [*(call for call in self._calls if not call.ended), call]
        try:
            start = await call.next()
        except BaseException:  # also a cancellation
            call.leave()
            raise
        if start is None:
            if call.left:
                raise _incomplete(call)
            return httpx.Response(500)
        body_of = _Body(call, empty=request.method == "HEAD")
        return httpx.Response(start["status"], headers=start.get("headers", []), stream=body_of)

    async def aclose(self) -> None:
        """End all responses, and wait until the application has ended its requests."""
        for call in self._calls:
            call.leave()
        for call in self._calls:
            await call.wait_ended()


class _Body(httpx.AsyncByteStream):
    """The body of a response."""

    def __init__(self, call: ApplicationCall, *, empty: bool) -> None:
        self._call = call
        self._empty = empty

    async def __aiter__(self) -> AsyncIterator[bytes]:
        complete = False
        while (message := await self._call.next()) is not None:
            complete = not message.get("more_body")
            if not self._empty and message.get("body"):
                yield message["body"]
        if not complete:
            raise _incomplete(self._call)

    async def aclose(self) -> None:
        self._call.leave()


def _incomplete(call: ApplicationCall) -> httpx.RemoteProtocolError:
    """The error of httpx for a connection that a server has closed too early."""
    what = "the client was closed" if call.left else "the application ended"
    return httpx.RemoteProtocolError(f"{what} before the response was complete")


def _scope(request: httpx.Request, state: dict[str, Any]) -> dict[str, Any]:
    """The scope of a request, as uvicorn makes it."""
    url = request.url
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.split(b"?")[0],
        "query_string": url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (url.host, url.port),
        "client": ("127.0.0.1", 123),
        "state": state,
    }
