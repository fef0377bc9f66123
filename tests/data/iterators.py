"""What is its own iterator, and starts over when it is iterated: torch calls `iter` once."""

from collections.abc import Iterable
from typing import Any, Self

from torch.utils.data import IterableDataset


class Restarting:
    """Its own iterator, from the first item again at each `iter`, which it counts."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)
        self.iters = self.place = 0

    def __iter__(self) -> Self:
        self.iters += 1
        self.place = 0
        return self

    def __next__(self) -> Any:
        if self.place == len(self.items):
            raise StopIteration
        self.place += 1
        return self.items[self.place - 1]


class RestartingDataset(Restarting, IterableDataset[Any]):
    pass


class Stateful(Restarting):
    """One with torchdata's protocol: its state is loaded after `iter`, which starts over."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class AsyncStateful(Stateful):
    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> Self:
        super().__iter__()
        return self

    async def __anext__(self) -> Any:
        try:
            return self.__next__()
        except StopIteration:
            raise StopAsyncIteration from None


class NextOnly:
    """An iterator without `__iter__`, which torch takes too."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)

    def __next__(self) -> Any:
        return next(self._items)


class OfNextOnly(IterableDataset[Any]):
    """What `iter` makes a `NextOnly` of."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)

    def __iter__(self) -> NextOnly:  # type: ignore[override]
        return NextOnly(self.items)
