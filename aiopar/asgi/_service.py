"""The state of a served application, for its health routes; the protocol of its resources."""

from collections.abc import Iterator
from typing import Any, Protocol, cast, runtime_checkable

from starlette.applications import Starlette


@runtime_checkable
class Resource(Protocol):
    """A resource that `lifespan` opens and drains: a `Batcher`, a `ReplicaPool`, or your class."""

    @property
    def ready(self) -> bool:
        """Whether it is warmed up and takes requests."""

    @property
    def alive(self) -> bool:
        """False when it can never serve again in this process."""

    async def __aenter__(self) -> Any:
        """Open it. It is ready when this returns."""

    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109 - of the drain
        """Take no new requests, then finish those that were taken, then close.

        It may be called again while it drains. A call with `drain=False` or with a shorter
        `timeout` then ends the drain early.

        Args:
            drain: Whether to finish the requests. If False, they get `ServiceClosed`.
            timeout: Seconds after which requests that still wait get `ServiceClosed`.
        """


class Service:
    """The state of one application.

    Attributes:
        installed: Whether `install` was called.
        resources: The resources of the lifespan that runs; None while no lifespan runs.
        serving: Whether the startup is complete and the shutdown has not begun.
        has_served: Whether the startup of the latest lifespan was completed.
        draining: Whether SIGTERM has come. Requests are still answered.
    """

    def __init__(self) -> None:
        self.installed = False
        self.resources: tuple[Resource, ...] | None = None
        self.serving = self.has_served = self.draining = False

    def unready_reason(self) -> str | None:
        """Why the application should get no requests; None if it should get them."""
        if self.draining:
            return "draining"
        if self.resources is None and not self.has_served:
            return "no lifespan of aiopar runs on this application"
        if not self.serving:
            return "not started, or closing"
        unready = [name for name, resource in self._named() if not resource.ready]
        return f"not ready: {', '.join(unready)}" if unready else None

    def dead_reason(self) -> str | None:
        """Why this process can never serve again; None if it can."""
        dead = [name for name, resource in self._named() if not resource.alive]
        return f"never to serve again: {', '.join(dead)}" if dead else None

    def _named(self) -> Iterator[tuple[str, Resource]]:
        for index, resource in enumerate(self.resources or ()):
            yield f"{type(resource).__name__} (resource {index})", resource


def service_of(app: Starlette) -> Service:
    """The service of `app`, made on the first call by `install` or by `lifespan`."""
    if not isinstance(app, Starlette):
        raise TypeError(f"expected a Starlette or FastAPI application, got {type(app).__name__}")
    if not hasattr(app.state, "aiopar"):
        app.state.aiopar = Service()
    return cast(Service, app.state.aiopar)
