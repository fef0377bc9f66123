"""`Resource`: an object that serves requests from its opening until it is drained."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Resource(Protocol):
    """A resource that `lifespan` opens and drains: a `Batcher`, a `ReplicaPool`, or your class.

    It is opened at each start of the application, and closed at the end.
    """

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

        May be called again during the drain: `drain=False` or a shorter `timeout` ends it early.

        Args:
            drain: Whether to finish the requests. If False, they get `ServiceClosed`.
            timeout: Seconds after which requests that still wait get `ServiceClosed`.
        """
