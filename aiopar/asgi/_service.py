"""What an application serves with, and how that is doing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

from starlette.applications import Starlette


@runtime_checkable
class Resource(Protocol):
    """What `lifespan` opens and drains: a `Batcher`, a `ReplicaPool`, or one of your own."""

    @property
    def ready(self) -> bool:
        """Warmed up, and not closing."""

    @property
    def alive(self) -> bool:
        """False when it can never serve again in this process."""

    async def __aenter__(self) -> Any:
        """Open it: when this returns it is ready."""

    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109 - of the drain
        """Take nothing new, finish what was taken (or, without `drain`, drop it), close.

        After `timeout` seconds those who still wait get `ServiceClosed`. May be called again, also
        while it still drains: without `drain`, or with a shorter `timeout`, that is cut short.
        """


class Service:
    """The state of one application, from its startup to its end."""

    def __init__(self) -> None:
        self.installed = False
        self.draining = False
        """The service ends: requests are still answered, but no more should be sent."""
        self.has_served = False
        """Its startup was completed: what its resources have accepted is worth a drain."""
        self._resources: tuple[Resource, ...] | None = None
        self._started = False

    @contextmanager
    def running(self, resources: tuple[Resource, ...]) -> Iterator[None]:
        """From the moment when the resources are being opened until they are closed."""
        if self._resources is not None:
            raise RuntimeError(
                "a lifespan of aiopar runs on this application already: "
                "hand all its resources to that one"
            )
        self._resources = resources
        self.draining = self.has_served = False
        try:
            yield
        finally:
            self._resources = None

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While requests are served: everything is open and warmed up."""
        self._started = self.has_served = True
        try:
            yield
        finally:
            self._started = False

    def unready_reason(self) -> str | None:
        """Why no requests should be sent here; None: send them."""
        if self.draining:
            return "draining"
        if self._resources is None and not self.has_served:
            return "no lifespan of aiopar runs on this application"
        if not self._started:
            return "not started, or closing"
        unready = [name for name, resource in self._named() if not resource.ready]
        return f"not ready: {', '.join(unready)}" if unready else None

    def dead_reason(self) -> str | None:
        """Why this process can never serve again; None: it can."""
        dead = [name for name, resource in self._named() if not resource.alive]
        return f"never to serve again: {', '.join(dead)}" if dead else None

    def _named(self) -> Iterator[tuple[str, Resource]]:
        for index, resource in enumerate(self._resources or ()):
            yield f"{type(resource).__name__} (resource {index})", resource


def service_of(app: Starlette) -> Service:
    """The one of this application: `install` and `lifespan` come in any order."""
    if not isinstance(app, Starlette):
        raise TypeError(f"expected a Starlette or FastAPI application, got {type(app).__name__}")
    if not hasattr(app.state, "aiopar"):
        app.state.aiopar = Service()
    return cast(Service, app.state.aiopar)
