"""Iterables that are their own iterators, and start over in each `iter`."""

from collections.abc import Iterable
from typing import Any, Self

from torch.utils.data import IterableDataset


class Restarting:
    """Starts over in each `iter`, and counts them."""

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
    """Has torchdata's protocol: its state must be loaded after `iter`, which starts over."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Turning(Stateful):
    """Starts at another item in each `iter`; the number of `iter`s is part of its state."""

    def __next__(self) -> Any:
        super().__next__()
        return self.items[(self.place - 1 + self.iters) % len(self.items)]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "iters": self.iters}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.iters = state["place"], state["iters"]


class Late(Stateful):
    """Has no state, and accepts none, before it is iterated."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)
        self.iters = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert self.place is not None
        super().load_state_dict(state)


class Expecting(Stateful):
    """Goes on in the first `iter` after a `load_state_dict`, and starts over in all others."""

    def __init__(self, items: Iterable[Any]) -> None:
        super().__init__(items)
        self._next: int | None = None

    def __iter__(self) -> Self:
        super().__iter__()
        self.place, self._next = self._next or 0, None
        return self

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["place"]


class _Async(Restarting):
    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> Self:
        super().__iter__()
        return self

    async def __anext__(self) -> Any:
        try:
            return self.__next__()
        except StopIteration:
            raise StopAsyncIteration from None


class AsyncStateful(_Async, Stateful):
    pass


class AsyncTurning(_Async, Turning):
    pass


class AsyncLate(_Async, Late):
    pass


class AsyncExpecting(_Async, Expecting):  # type: ignore[misc]
    pass
