"""Modules for pools of replicas, and waiting for what a pool does of itself."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakMethod

import anyio
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import ReplicaPool
from aiopar.serve._replica import PoolReplica
from aiopar.testing import Gate

M = TypeVar("M", bound=nn.Module)
CPUS = ["cpu", "cpu"]
X = torch.arange(6.0).reshape(3, 2)


class Scale(nn.Module):
    """Multiplies by a parameter, and by a buffer that has the same value.

    `on_call` is called between the two, with the input: it may hold the call there, or raise.
    """

    def __init__(self, value: float, on_call: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))
        self.register_buffer("twin", torch.tensor(value))
        self.on_call = [on_call]  # a list is shared by all copies

    twin: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = x * self.weight
        if self.on_call[0] is not None:
            self.on_call[0](x)
        return first, x * self.twin


class Where(nn.Module):
    """Tells what thread it runs in, when the gate lets it."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, _: object) -> str:
        self.gate()
        return threading.current_thread().name


class Broken(Exception):
    """What a broken module raises."""


class BadInput(Exception):
    """What any module raises for some inputs; can be weakly referenced."""


class Fragile(nn.Module):
    """Raises for a negative input; and for any input, once its buffer is not a number.

    Each replica has a buffer of its own: poisoned, that replica is broken, and a fresh copy of the
    module is whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("shift", torch.zeros(2))
        self.calls: list[Any] = []  # shared by all copies
        self.on_call: list[Callable[[], object]] = []

    shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x)
        for on_call in tuple(self.on_call):
            on_call()
        result: Tensor = self.linear(x) + self.shift
        if result.isnan().any():
            raise Broken("the weights are broken")
        if (x < 0).any():
            raise BadInput("negative")
        return result


def module_of(replica: PoolReplica, kind: type[M]) -> M:
    """Its own copy of the module."""
    assert isinstance(replica.module, kind)
    return replica.module


def poison(replica: PoolReplica) -> None:
    """Break a replica, for good."""
    module_of(replica, Fragile).shift.fill_(torch.nan)


@asynccontextmanager
async def open_pool(
    module: nn.Module, *, on: Any = CPUS, **settings: Any
) -> AsyncIterator[ReplicaPool]:
    """A pool on workers of its own, which has them to itself, closed in the end."""
    async with aiopar.DeviceExecutor(on) as executor:
        pool = ReplicaPool(module, executor=executor, **settings)
        del module  # it is the pool's alone
        async with pool:
            yield pool


class _Change:
    def __init__(self) -> None:
        self.seen: aiopar.Future[None] = aiopar.Future()

    def tell(self) -> None:
        if self.seen.claim():
            self.seen.set_result(None)


async def until(pool: ReplicaPool, holds: Callable[[], bool]) -> None:
    """Wait until this holds, which can change only when a replica comes into service or leaves."""
    with anyio.fail_after(60):
        while True:
            changed = _Change()
            listener = WeakMethod(changed.tell)
            pool._listeners.add(listener)
            try:
                if holds():
                    return
                await changed.seen
            finally:
                pool._listeners.remove(listener)


def in_service(pool: ReplicaPool) -> list[int]:
    """The replicas that serve."""
    return [replica.index for replica in pool._replicas if replica.in_service]


def states(pool: ReplicaPool) -> list[str]:
    """How each replica is."""
    return [replica.state for replica in pool.stats().replicas]
