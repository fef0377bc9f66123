"""What a loader reads from: which kind of source it is, and how torch's `DataLoader` sees it."""

import inspect
from collections.abc import AsyncIterable, Iterable, Iterator
from enum import Enum, auto
from typing import Any, Protocol, TypeAlias

from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from .._checks import described, is_iterable


class _Indexed(Protocol):
    """A map-style dataset; `__getitem__` may be `async def`."""

    def __getitem__(self, index: Any, /) -> Any: ...


class _Batched(Protocol):
    """One that fetches many samples at once; `__getitems__` may be `async def`."""

    def __getitems__(self, indices: Any, /) -> Any: ...


Source: TypeAlias = Dataset[Any] | _Indexed | _Batched | Iterable[Any] | AsyncIterable[Any]
"""What an `AsyncDataLoader` can read from."""


class Kind(Enum):
    """How samples are obtained from a source."""

    MAP = auto()
    """By index, from a plain `__getitem__` or `__getitems__`."""
    ASYNC_MAP = auto()
    """By index, from an `async def` of either."""
    ITERABLE = auto()
    ASYNC_ITERABLE = auto()


def kind_of(dataset: object, *, batched: bool) -> Kind:
    """Which kind of source `dataset` is.

    What can be indexed is read by index, as torch does, unless it is an `IterableDataset`.

    Args:
        dataset: The source.
        batched: Whether it may be asked for many samples at once.

    Raises:
        TypeError: It is none.
    """
    # A class has the methods of its objects; but that of an enum can be iterated itself.
    if not isinstance(dataset, type) or is_iterable(dataset):
        if hasattr(dataset, "__aiter__"):
            return Kind.ASYNC_ITERABLE
        if isinstance(dataset, IterableDataset):
            return Kind.ITERABLE
        if hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"):
            return Kind.ASYNC_MAP if fetches_async(dataset, batched=batched) else Kind.MAP
        if hasattr(dataset, "__iter__"):
            return Kind.ITERABLE
    raise TypeError(
        "dataset must have __getitem__ or __getitems__ (plain or async def), or be an iterable or "
        f"an async iterable; got {described(dataset)}"
    )


def getitems_of(dataset: Any) -> Any:
    """Its `__getitems__`, which fetches a batch at once; None where it has none."""
    part = isinstance(dataset, Subset)
    if part and fetches_async(dataset, batched=False) and getitems_of(dataset.dataset) is None:
        return None  # its own would make a list of coroutines
    # As torch asks: a wrapper may say by None that what it wraps has none.
    return getattr(dataset, "__getitems__", None) or None


def fetches_async(dataset: Any, *, batched: bool) -> bool:
    """Whether what fetches a sample of `dataset` (`batched`: a batch, if it can) is `async def`."""
    while isinstance(dataset, Subset):
        # Its own methods are plain, and return the coroutines of the dataset that it is a part of.
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        # One sample after the other, whatever its parts can do.
        return all(fetches_async(part, batched=False) for part in dataset.datasets)
    getitem = (batched and getitems_of(dataset)) or getattr(dataset, "__getitem__", None)
    return inspect.iscoroutinefunction(getitem)


class Streamed(IterableDataset[Any]):
    """An iterable, sync or async, that is no `IterableDataset`, in the eyes of torch's loader."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)  # a TypeError of its own, where it has none


def torch_loader(dataset: Any, kind: Kind, **options: Any) -> "DataLoader[Any]":
    """A torch `DataLoader` of it: for its checks, its default samplers, its worker processes.

    Raises:
        TypeError: As torch's.
        ValueError: As torch's.
    """
    streamed = kind is Kind.ASYNC_ITERABLE or (
        kind is Kind.ITERABLE and not isinstance(dataset, IterableDataset)
    )
    return DataLoader(Streamed(dataset) if streamed else dataset, **options)
