"""Helpers for tests of loaders: reading them, their threads, and samplers of all kinds."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aiopar.data import AsyncDataLoader, LoaderStream
from tests.data.streams import until

N = 23


def values(batch: Any) -> Any:
    """A batch in plain values, which compare by `==`."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: values(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [values(value) for value in batch]
    return batch


async def read(loader: AsyncDataLoader[Any]) -> list[Any]:
    """The batches of one epoch."""
    return [values(batch) async for batch in loader]


async def read_into(seen: list[Any], loader: AsyncDataLoader[Any] | LoaderStream[Any]) -> None:
    """Like `read`, but keeps the batches that come before an error."""
    async for batch in loader:
        seen.append(values(batch))  # noqa: PERF401  # a list of them all would be lost


def epochs(loader: AsyncDataLoader[Any], count: int = 1) -> list[list[Any]]:
    """The batches of `count` epochs, read on a new event loop."""

    async def main() -> list[list[Any]]:
        return [await read(loader) for _ in range(count)]

    return asyncio.run(main())


earlier_threads: set[threading.Thread] = set()
"""Threads of other tests: anyio keeps the tasks of a closed loop, and so their streams."""


def loader_threads() -> list[threading.Thread]:
    """The threads of loaders that the running test has made."""
    return [
        thread
        for thread in threading.enumerate()
        if "aiopar-loader" in thread.name and thread not in earlier_threads
    ]


async def no_threads() -> None:
    """Wait until no loader has threads."""
    # A thread reports its end just before it ends.
    await until(lambda: not loader_threads())


class Eager(Sampler[int]):
    """Draws in `iter`, not at its first index."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N, generator=self.generator).tolist())

    def __len__(self) -> int:
        return N


class Lazy(Sampler[int]):
    """Draws each index when it is asked for, from torch's default generator."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(N):
            yield int(torch.randint(N, ()).item())

    def __len__(self) -> int:
        return N


class Bucketed(Sampler[list[int]]):
    """Batches of varying length."""

    def __iter__(self) -> Iterator[list[int]]:
        order, size = torch.randperm(N).tolist(), 1
        while order:
            yield order[:size]
            order, size = order[size:], size + 1

    def __len__(self) -> int:
        return 7


Options = Callable[[torch.Generator], dict[str, Any]]

SAMPLERS: dict[str, Options] = {
    "in sequence": lambda g: {},
    "no generator, in sequence": lambda g: {"batch_size": 4},
    "shuffled": lambda g: {"batch_size": 4, "shuffle": True, "generator": g},
    "shuffled by torch's generator": lambda g: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda g: {"batch_size": 4, "shuffle": True, "generator": g, "drop_last": True},
    "no batching": lambda g: {"batch_size": None, "shuffle": True, "generator": g},
    "random sampler": lambda g: {"batch_size": 3, "sampler": RandomSampler(range(N), generator=g)},
    "another's generator": lambda g: {
        "batch_size": 3,
        "sampler": RandomSampler(range(N), generator=torch.Generator().manual_seed(5)),
        "generator": g,
    },
    "with replacement": lambda g: {
        "batch_size": 5,
        "sampler": RandomSampler(range(N), replacement=True, num_samples=71, generator=g),
        "generator": g,
    },
    "more than once": lambda g: {
        "batch_size": 5,
        "sampler": RandomSampler(range(N), num_samples=50, generator=g),
    },
    "subset": lambda g: {"batch_size": 2, "sampler": SubsetRandomSampler(range(3, 14))},
    "subset, generator elsewhere": lambda g: {
        "batch_size": 2,
        "sampler": SubsetRandomSampler(range(3, 14)),
        "generator": g,
    },
    "weighted": lambda g: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 30, generator=g),
        "generator": g,
    },
    "a plain list": lambda g: {"batch_size": 2, "sampler": [5, 3, 3, 8, 1], "generator": g},
    "eager": lambda g: {"batch_size": 4, "sampler": Eager(g), "generator": g},
    "lazy": lambda g: {"batch_size": 4, "sampler": Lazy(), "generator": g},
    "batch sampler": lambda g: {
        "batch_sampler": BatchSampler(RandomSampler(range(N), generator=g), 4, drop_last=True)
    },
    "batches in sequence": lambda g: {
        "batch_sampler": BatchSampler(SequentialSampler(range(N)), 4, drop_last=False)
    },
    "a list of batches": lambda g: {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
    "bucketed": lambda g: {"batch_sampler": Bucketed()},
}
"""The arguments of a loader for a generator, by the kind of sampling."""
