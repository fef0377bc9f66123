"""Datasets: one that is held at a gate, and some whose samples fail."""

import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio.lowlevel

from aiopar.testing import Gate


class Item:
    """A sample that can be weakly referenced."""

    def __init__(self, index: int) -> None:
        self.index = index


class Held:
    """A dataset whose samples wait at a gate."""

    def __init__(self, gate: Gate, count: int = 100) -> None:
        self.gate, self.count = gate, count
        self.refs: list[weakref.ref[Item]] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        self.gate()
        item = Item(index)
        self.refs.append(weakref.ref(item))
        return item


class Failing:
    """A dataset of which some samples fail."""

    def __init__(self, bad: set[int], count: int = 12) -> None:
        self.bad, self.count = bad, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"bad sample {index}")
        return index


class FailingAsync(Failing):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await anyio.lowlevel.checkpoint()
        return super().__getitem__(index)


class Plain:
    """An iterable that is no `IterableDataset`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class AsyncPlain(Plain):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for n in range(self.count):
            yield n


def same(samples: list[Any]) -> list[Any]:
    """A collate function that makes no tensors."""
    return samples
