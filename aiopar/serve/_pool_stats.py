"""What a `ReplicaPool` tells of its replicas."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

ReplicaState: TypeAlias = Literal["ready", "rebuilding", "retired", "closed"]


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What one replica has done, and how it is.

    Attributes:
        index: Its place in the pool's `devices`.
        device: As `str(torch.device)`, so that all of this can be written as JSON.
        state: `"ready"`: in service. `"rebuilding"`: it failed, and comes back. `"retired"`: its
            device is lost to this process. `"closed"`: the pool is.
        in_flight: Calls that wait for it or run on it.
        completed: Calls that it has answered.
        failed: Calls that have raised.
        rebuilds: How often it has come back.
        busy_seconds: How long its worker ran calls; on an accelerator, how long it took to launch
            them.
    """

    index: int
    device: str
    state: ReplicaState
    in_flight: int
    completed: int
    failed: int
    rebuilds: int
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot of a `ReplicaPool`.

    Attributes:
        replicas: One for each replica; empty until the pool is open.
    """

    replicas: tuple[ReplicaStats, ...]
