"""What a `ReplicaPool` tells of its replicas."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

ReplicaState: TypeAlias = Literal["ready", "rebuilding", "retired", "closed"]


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What one replica has done, and how it is."""

    index: int
    """Its place in the pool's `devices`."""
    device: str
    """As `str(torch.device)`, so that all of this can be written as JSON."""
    state: ReplicaState
    """`"ready"`: in service. `"rebuilding"`: it failed, and comes back. `"retired"`: its device is
    lost to this process. `"closed"`: the pool is."""
    in_flight: int
    """Calls that wait for it or run on it."""
    completed: int
    failed: int
    rebuilds: int
    """How often it has come back."""
    busy_seconds: float
    """How long its worker ran calls; on an accelerator, how long it took to launch them."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot of a `ReplicaPool`."""

    replicas: tuple[ReplicaStats, ...]
    """Empty until the pool is open."""
