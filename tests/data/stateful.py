"""Stateful samplers and datasets: some stay at their end, some return to their start."""

import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

from torch.utils.data import IterableDataset, Sampler

from tests.data.loaders import N


class Positioned(Sampler[int]):
    """A stateful sampler like torchdata's: it stays at its end, and goes on from a loaded state."""

    def __init__(self) -> None:
        self.rounds = 0
        self.yielded = 0
        self._next: int | None = None

    def __iter__(self) -> Iterator[int]:
        if self._next is None:
            self.rounds += self.yielded == N
            self.yielded = 0
        self._next = None
        order = random.Random(self.rounds).sample(range(N), N)
        for index in order[self.yielded :]:
            self.yielded += 1
            yield index

    def __len__(self) -> int:
        return N

    def state_dict(self) -> dict[str, int]:
        return {"rounds": self.rounds, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rounds, self._next = state["rounds"], state["yielded"]
        self.yielded = state["yielded"]


class Rolling(Sampler[int]):
    """A stateful sampler that is at the start of its next round when it has ended."""

    def __init__(self) -> None:
        self.rounds = self.position = 0

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.rounds).sample(range(N), N)
        while self.position < N:
            self.position += 1
            yield order[self.position - 1]
        self.rounds, self.position = self.rounds + 1, 0

    def __len__(self) -> int:
        return N

    def state_dict(self) -> dict[str, int]:
        return {"rounds": self.rounds, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rounds, self.position = state["rounds"], state["position"]


class Live(Sampler[int]):
    """Its state is one dict, which it returns, accepts and changes while it is read."""

    def __init__(self, count: int = N) -> None:
        self.state = {"next": 0}
        self._count = count

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < self._count:
            self.state["next"] += 1
            yield self.state["next"] - 1

    def __len__(self) -> int:
        return self._count

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class Lines(IterableDataset[int]):
    """A stateful dataset that counts its reads."""

    def __init__(self) -> None:
        self.position = self.reads = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < N:
            self.position += 1
            self.reads += 1
            yield self.position * 10
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class PositionedLines(Lines):
    """Like `Lines`, but stays at its end until the next `iter`."""

    def __init__(self) -> None:
        super().__init__()
        self._next: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.position, self._next = self._next or 0, None
        while self.position < N:
            self.position += 1
            yield self.position * 10

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = self._next = state["position"]


class LateLines(PositionedLines):
    """Like `PositionedLines`, but has no state before it is iterated."""

    def __init__(self) -> None:
        super().__init__()
        del self.position


class Days(IterableDataset[int]):
    """A log, read day by day: each `iter` begins the next day, before a row of it is read."""

    def __init__(self) -> None:
        self.day, self.row = -1, 0

    def __iter__(self) -> Iterator[int]:
        self._begin()
        return self._rows()

    def _begin(self) -> None:
        if self.row in (0, N):
            self.day, self.row = self.day + 1, 0

    def _rows(self) -> Iterator[int]:
        while self.row < N:
            self.row += 1
            yield self.day * N + self.row - 1

    def state_dict(self) -> dict[str, int]:
        return {"day": self.day, "row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.day, self.row = state["day"], state["row"]


class Turns(Days):
    """A sampler like `Days`: the same indices each day, in another order."""

    def _rows(self) -> Iterator[int]:
        return ((n * (n // N + 1)) % N for n in super()._rows())

    def __len__(self) -> int:
        return N


class Keeping(IterableDataset[int]):
    """Keeps a loaded state, like Hugging Face's datasets: each `iter` begins there."""

    def __init__(self) -> None:
        self._start: dict[str, int] | None = {"position": 0}
        self._state: dict[str, int] | None = self._start

    def __iter__(self) -> Iterator[int]:
        self._state = state = dict(self._start or {"position": 0})
        while state["position"] < N:
            state["position"] += 1
            yield state["position"] - 1

    def state_dict(self) -> dict[str, int] | None:
        return self._state

    def load_state_dict(self, state: dict[str, int] | None) -> None:
        self._start = state


class KeepingLate(Keeping):
    """Like `Keeping`, but its state is None before it is iterated."""

    def __init__(self) -> None:
        self._start = self._state = None


class BeginsWhenAsked(PositionedLines):
    """Like torchdata's `nodes.Loader`: asked for its state, it begins, and its next `iter` goes on.

    A state that it loads afterwards has no effect on that `iter`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: Iterator[int] | None = None
        self._was_asked = False

    def __iter__(self) -> Iterator[int]:
        if self._lines is None or not self._was_asked:
            self.position, self._next = self._next or 0, None
            self._lines = self._rest()
        self._was_asked = False
        return self._lines

    def _rest(self) -> Iterator[int]:
        while self.position < N:
            self.position += 1
            yield self.position * 10

    def state_dict(self) -> dict[str, int]:
        if self._lines is None:
            iter(self)
            self._was_asked = True
        return super().state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["position"]


class KeepingSampler(Keeping):
    def __len__(self) -> int:
        return N


class StatefulIterators(IterableDataset[int]):
    """Has no state itself: each of its iterators has one."""

    def __iter__(self) -> "StatefulIterator":
        return StatefulIterator()


class StatefulIterator:
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> "StatefulIterator":
        return self

    def __next__(self) -> int:
        if self.position == N:
            raise StopIteration
        self.position += 1
        FETCHED.append(self.position)
        return self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


FETCHED: list[int] = []
"""The samples of all `StatefulIterators`."""


class AsyncStatefulIterators:
    def __aiter__(self) -> "AsyncStatefulIterator":
        return AsyncStatefulIterator()


class AsyncStatefulIterator(StatefulIterator):
    def __aiter__(self) -> "AsyncStatefulIterator":
        return self

    async def __anext__(self) -> int:
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None


class CountedByItsLoader(IterableDataset[int]):
    """A dataset whose own loader must pass the number of samples to `state_dict`."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))

    def state_dict(self, num_samples: int, *, from_beginning: bool) -> dict[str, int]:
        raise AssertionError((num_samples, from_beginning))

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def _later(lines: type) -> Any:
    """The class of the same items, asynchronously."""

    async def later(self: Any) -> AsyncIterator[int]:
        for line in lines.__iter__(self):  # type: ignore[attr-defined]
            yield line

    return type(f"Async{lines.__name__}", (lines,), {"__iter__": None, "__aiter__": later})


AsyncLines, AsyncPositionedLines, AsyncKeeping = map(_later, (Lines, PositionedLines, Keeping))
