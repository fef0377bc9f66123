"""A request that has ended before there was a queue for it."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from time import monotonic

from .._errors import ReplicaUnavailable, ServiceClosed
from ._tally import Rejection


@dataclass(slots=True, eq=False)
class Unqueued:
    """One that waits for its batcher to open; for observers, to whom this is an `ItemInfo`."""

    key: Hashable = None
    priority: int = 0
    cost: float = 1.0
    arrived: float = field(default_factory=monotonic)
    rejected: str | None = None


def refusal_of(error: BaseException) -> Rejection | None:
    """As what a request counts that was not taken, for this: as in the queue, had there been one.

    None: it was not refused, but something failed, or took too long.
    """
    if isinstance(error, ServiceClosed):
        return "closed"
    return "unavailable" if isinstance(error, ReplicaUnavailable) else None
