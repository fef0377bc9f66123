"""Modules that know their copies, for replica pools, and helpers to watch a pool."""

import asyncio
import os
import uuid
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import torch
import trio
from anyio.abc import TaskGroup
from torch import Tensor, nn

import aiopar
from aiopar.serve import ReplicaPool
from aiopar.testing import Gate
from tests.home import AtHome, place

RUNNERS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "asyncio": lambda main: asyncio.run(main()),
    "trio": trio.run,
}
CPUS = ["cpu", "cpu"]
X = torch.arange(6.0).reshape(3, 2)


class Copies:
    """The copies of a module that have run here, in the order of their first run; weakly.

    A pool warms up its replicas in order, so the first copies are those of replicas 0, 1, ...
    """

    def __init__(self) -> None:
        self._refs: list[weakref.ref[nn.Module]] = []

    def note(self, module: nn.Module) -> None:
        """`module` runs."""
        if all(ref() is not module for ref in self._refs):
            self._refs.append(weakref.ref(module))

    def refs(self) -> list[weakref.ref[nn.Module]]:
        """Weak references to all copies."""
        return list(self._refs)

    def __getitem__(self, index: int) -> Any:
        """A copy that is alive."""
        copied = self._refs[index]()
        assert copied is not None
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, ()


class Runs:
    """What the copies of a module do, in whatever processes; kept in the process of the test."""

    def __init__(self, *on_call: Callable[[Tensor], object]) -> None:
        self.on_call = [*on_call]
        """Called with the input of each run; may hold the run, or raise."""
        self.copies: list[str] = []
        """The names of the copies, in the order of their first run."""
        self.broken: set[str] = set()

    def __call__(self, copy: str, x: Tensor) -> bool:
        """Note that a copy runs; returns whether it is broken."""
        if copy not in self.copies:
            self.copies.append(copy)
        for on_call in tuple(self.on_call):
            on_call(x)
        return copy in self.broken


def _own_name(module: nn.Module) -> str:
    """The name of a copy, which no other copy has."""
    here = os.getpid(), id(module)
    owner, name = module.__dict__.get("_own_name", (None, ""))
    if owner != here:  # a copy has the attributes of its original
        name = uuid.uuid4().hex
        module.__dict__["_own_name"] = here, name
    return str(name)


class Noted(nn.Module):
    """A module that notes its copies and their runs."""

    def __init__(self, *on_call: Callable[[Tensor], object]) -> None:
        super().__init__()
        # Lists and other objects are shared by all copies.
        self.runs = AtHome(Runs(*on_call))
        self.copies = Copies()

    @property
    def on_call(self) -> list[Callable[[Tensor], object]]:
        """See `Runs`."""
        return self.runs.fn.on_call

    def note(self, x: Tensor) -> bool:
        """This copy runs; returns whether it is broken."""
        self.copies.note(self)
        return self.runs(_own_name(self), x)  # type: ignore[no-any-return]


class Scale(Noted):
    """Multiplies by a parameter, and by a buffer with the same value.

    `on_call` is called in between with the input: it may hold the call there, or raise.
    """

    def __init__(self, value: float, *on_call: Callable[[Tensor], object]) -> None:
        super().__init__(*on_call)
        self.weight = nn.Parameter(torch.tensor(value))
        self.register_buffer("twin", torch.tensor(value))

    twin: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = x * self.weight
        self.note(x)
        return first, x * self.twin


class Where(nn.Module):
    """Returns where it runs, after the gate lets it on."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = AtHome(gate)

    def forward(self, _: object) -> tuple[int, str]:
        self.gate()
        return place()


class Broken(Exception):
    """The error of a broken module."""


class BadInput(Exception):
    """An error that is the input's fault."""


class Fragile(Noted):
    """Raises `BadInput` for a negative input, and `Broken` for any input once it is broken.

    Each replica has its own buffer: `break_copy` breaks one replica, and a fresh copy works.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("shift", torch.zeros(2))

    shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.note(x):
            self.shift.fill_(torch.nan)
        result: Tensor = self.linear(x) + self.shift
        if result.isnan().any():
            raise Broken("the weights are broken")
        if (x < 0).any():
            raise BadInput("negative")
        return result


def break_copy(module: Fragile, index: int) -> None:
    """Break for good the replica that has this copy of `module`, by the order of first runs."""
    runs = module.runs.fn
    runs.broken.add(runs.copies[index])


@asynccontextmanager
async def open_pool(
    module: nn.Module,
    *,
    on: Any = CPUS,
    executor: aiopar.DeviceExecutor | None = None,
    **settings: Any,
) -> AsyncIterator[ReplicaPool[Any]]:
    """An open pool, closed at the end; without an executor it has one of its own."""
    async with AsyncExitStack() as stack:
        if executor is None:
            executor = await stack.enter_async_context(aiopar.DeviceExecutor(on))
        pool = ReplicaPool(module, on, executor=executor, **settings)
        del module  # only the pool keeps it
        yield await stack.enter_async_context(pool)


@asynccontextmanager
async def held(gate: Gate) -> AsyncIterator[TaskGroup]:
    """A task group whose tasks the gate holds until the end of the block."""
    with gate:
        async with anyio.create_task_group() as tasks:
            yield tasks
            gate.open()


async def answers_of_all(pool: ReplicaPool[Any], module: Noted, x: Tensor) -> list[Any]:
    """The answer of each replica; in any order.

    `module` is the one that the pool serves. Calls that are held at a gate go to different
    replicas.
    """
    gate, answers = Gate(), list[Any]()
    count = len(pool.stats().replicas)

    def hold(*_: Tensor) -> None:
        gate()

    async def call() -> None:
        answers.append(await pool(x))

    module.on_call.append(hold)
    async with held(gate) as tasks:
        for _ in range(count):
            tasks.start_soon(call)
        await gate.entered(count)
    module.on_call.remove(hold)
    return answers


def in_service(pool: ReplicaPool[Any]) -> list[int]:
    """The indices of the replicas in service."""
    return [stats.index for stats in pool.stats().replicas if stats.state == "ready"]


def is_idle(executor: aiopar.DeviceExecutor) -> bool:
    """Whether its workers have no call, so that the next calls go to different workers."""
    return not any(stats.queued or stats.running for stats in executor.stats().workers)


def states(pool: ReplicaPool[Any]) -> list[str]:
    """The state of each replica."""
    return [stats.state for stats in pool.stats().replicas]


def named(pool: ReplicaPool[Any], index: int) -> str:
    """The name of a replica in notes."""
    return f"replica {index} on device {pool.stats().replicas[index].device}"
